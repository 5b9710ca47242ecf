"""Routes of what rollouts did: calls, trajectory, samples, log, artifacts."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from rollserve.api.answers import PiecesResponse, array_of, encode, form_of, listing, map_of, plain_listing
from rollserve.api.parts import Core, Paged, Paging, StrictRoute, answers, slice_of
from rollserve.errors import NotFound
from rollserve.records.call import Call
from rollserve.records.sample import Sample
from rollserve.rollouts.conversation import conversation
from rollserve.rollouts.trajectories import Recorded
from rollserve.wire import JSON, MSGPACK, Artifact, Form, Listing, Trajectory, to_node, to_wire, to_wire_call


async def calls(
    request: Request, core: Core, rollout_id: str, paging: Paged, attempt_id: str | None = None
) -> Response:
    """The calls of the newest attempt (or the one named), token for token; also while it runs."""
    form = form_of(request)
    recorded = await core.trajectories.of_rollout(rollout_id, attempt_id)
    some, following = slice_of(recorded.payload.calls, paging)
    pieces = await asyncio.to_thread(_encode_calls, recorded, some, following, form)
    return PiecesResponse(pieces, form)


def _encode_calls(recorded: Recorded, some: list[Call], following: str | None, form: Form) -> list[bytes]:
    items = [[encode(to_wire_call(call, form), form)] for call in some]
    fields = {
        "attempt_id": [encode(recorded.attempt and recorded.attempt.id, form)],
        "live": [encode(recorded.live, form)],
        "items": array_of(items, len(items), form),
        "next": [encode(following, form)],
    }
    return map_of(fields, form)


async def trajectory(core: Core, rollout_id: str, paging: Paged, attempt_id: str | None = None) -> Response:
    """To read: the tree of calls without tokens, and root to newest call as one conversation."""
    recorded = await core.trajectories.of_rollout(rollout_id, attempt_id)
    return PiecesResponse([await asyncio.to_thread(_encode_trajectory, recorded, paging)], "json")


def _encode_trajectory(recorded: Recorded, paging: Paging) -> bytes:
    every = recorded.payload.calls
    some, following = slice_of(every, paging)
    answer = Trajectory(
        attempt_id=recorded.attempt.id if recorded.attempt else None,
        live=recorded.live,
        total=len(every),
        calls=[to_node(call) for call in some],
        conversation=conversation(every),
        next=following,
    )
    return encode(answer, "json")


async def samples(request: Request, core: Core, rollout_id: str) -> Response:
    """The rollout's samples as a delivery would hand them over."""
    form = form_of(request)
    made = await core.trajectories.samples(rollout_id)
    if made.note and not made.samples:
        raise NotFound(f"no samples: {made.note}", field="rollout_id")
    return PiecesResponse(await asyncio.to_thread(encode_samples, made.samples, form), form)


def encode_samples(every: list[Sample], form: Form) -> list[bytes]:
    return array_of(([encode(to_wire(sample, form), form)] for sample in every), len(every), form)


async def log(core: Core, attempt_id: str, paging: Paged) -> Response:
    """Lines of the attempt's log as ``[seconds since the epoch, text]``."""
    recorded = await core.trajectories.of_attempt(attempt_id)
    return plain_listing(*slice_of(recorded.payload.log, paging))


async def artifacts(core: Core, attempt_id: str, paging: Paged) -> Response:
    recorded = await core.trajectories.of_attempt(attempt_id)
    kept = [
        Artifact(path=path, size_bytes=len(data)) for path, data in sorted(recorded.payload.artifacts.items())
    ]
    return listing(*slice_of(kept, paging))


async def artifact(core: Core, attempt_id: str, path: str) -> Response:
    """The bytes of one file kept from the sandbox; its path as listed."""
    recorded = await core.trajectories.of_attempt(attempt_id)
    kept = recorded.payload.artifacts
    data = kept.get(path, kept.get(f"/{path}"))
    if data is None:
        raise NotFound(f"attempt {attempt_id!r} kept no {path!r}", field="path")
    # What an agent wrote is never shown as a page of this server.
    headers = {"X-Content-Type-Options": "nosniff", "Content-Disposition": "attachment"}
    return Response(data, headers=headers, media_type="application/octet-stream")


def router() -> APIRouter:
    routes = APIRouter(tags=["trajectories"], prefix="/v1", route_class=StrictRoute)
    add = routes.add_api_route
    rollout = "/rollouts/{rollout_id}"
    add(f"{rollout}/calls", calls, methods=["GET"], response_model=None,
        responses=answers("RecordedCalls", JSON, MSGPACK))  # fmt: skip
    add(f"{rollout}/trajectory", trajectory, methods=["GET"], response_model=None,
        responses=answers("Trajectory", JSON))  # fmt: skip
    add(f"{rollout}/samples", samples, methods=["GET"], response_model=None,
        responses=answers("WireSamples", JSON, MSGPACK))  # fmt: skip
    add("/attempts/{attempt_id}/log", log, methods=["GET"], response_model=Listing[tuple[float, str]])
    add("/attempts/{attempt_id}/artifacts", artifacts, methods=["GET"], response_model=Listing[Artifact])
    add("/attempts/{attempt_id}/artifacts/{path:path}", artifact, methods=["GET"], response_model=None,
        responses={200: {"content": {"application/octet-stream": {}}}})  # fmt: skip
    return routes
