"""Routes of deliveries: lease → ack → commit, and rewind."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request, Response
from starlette.requests import ClientDisconnect

from rollserve.api.answers import (
    JSON_WEIGHT,
    PiecesResponse,
    array_of,
    encode,
    form_of,
    map_of,
    page,
    record,
)
from rollserve.api.bodies import body
from rollserve.api.parts import Core, Paged, StrictRoute, accepts, answers, disconnected
from rollserve.api.trajectories import encode_samples
from rollserve.records.delivery import Checkpoint, Lease
from rollserve.rollouts.delivery import Delivered, Wanted
from rollserve.rollouts.staleness import FinishedGroup, FinishedRollout
from rollserve.wire import (
    JSON,
    MSGPACK,
    CommitCheckpoint,
    Form,
    LeaseGroups,
    Listing,
    RenewLease,
    Rewind,
    Rewound,
    TrainerStatus,
)

T = TypeVar("T")


async def lease(
    request: Request, core: Core, run_id: str, asked: Annotated[LeaseGroups, body(LeaseGroups, optional=True)]
) -> Response:
    """Up to ``max_groups`` finished groups, leased to the trainer; waits for the first. A request whose
    client goes away takes nothing."""
    form = form_of(request)
    wanted = Wanted(
        trainer=asked.trainer,
        epoch=asked.epoch,
        max_groups=asked.max_groups,
        max_tokens=asked.max_tokens,
        wait_s=asked.wait_s,
        ttl_s=asked.ttl_s,
        weight=JSON_WEIGHT if form == "json" else 1.0,
    )
    delivered = await while_connected(request, core.deliveries.lease(run_id, wanted))
    return PiecesResponse(await asyncio.to_thread(encode_delivery, delivered, form), form)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client goes away first."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def encode_delivery(delivered: Delivered, form: Form) -> list[bytes]:
    lease = delivered.lease.model_dump(mode="json") if delivered.lease else None
    groups = [_encode_group(group, form) for group in delivered.groups]
    fields = {
        "lease": [encode(lease, form)],
        "groups": array_of(groups, len(groups), form),
        "policy_version": [encode(delivered.policy_version, form)],
        "over": [encode(delivered.over, form)],
    }
    return map_of(fields, form)


def _encode_group(group: FinishedGroup, form: Form) -> list[bytes]:
    return map_of(group_fields(group, form), form)


def group_fields(group: FinishedGroup, form: Form) -> dict[str, list[bytes]]:
    rollouts = [_encode_rollout(rollout, form) for rollout in group.rollouts]
    return {
        "group": [encode(group.group.model_dump(mode="json"), form)],
        "rollouts": array_of(rollouts, len(rollouts), form),
    }


def _encode_rollout(rollout: FinishedRollout, form: Form) -> list[bytes]:
    fields = {
        "rollout": [encode(rollout.rollout.model_dump(mode="json"), form)],
        "samples": encode_samples(rollout.samples, form),
        "note": [encode(rollout.note, form)],
        "tokens": [encode(rollout.tokens, form)],
        "staleness": [encode(rollout.staleness, form)],
        "stale": [encode(rollout.stale, form)],
    }
    return map_of(fields, form)


async def renew(
    core: Core, lease_id: str, asked: Annotated[RenewLease, body(RenewLease, optional=True)]
) -> Response:
    return record(await core.deliveries.renew(lease_id, asked.ttl_s))


async def ack(core: Core, lease_id: str) -> Response:
    """The trainer has the groups. Until the next commit a rewind brings them back."""
    return record(await core.deliveries.ack(lease_id))


async def nack(core: Core, lease_id: str) -> Response:
    """Give the groups back: they go to whoever leases next."""
    await core.deliveries.nack(lease_id)
    return Response(status_code=204)


async def commit(
    core: Core, run_id: str, trainer: str, asked: Annotated[CommitCheckpoint, body(CommitCheckpoint)]
) -> Response:
    """All that was acked so far is in this checkpoint of the trainer."""
    checkpoint = await core.deliveries.commit(
        run_id, trainer, asked.epoch, name=asked.name, cursor=asked.cursor
    )
    return record(checkpoint)


async def rewind(
    core: Core, run_id: str, trainer: str, asked: Annotated[Rewind, body(Rewind, optional=True)]
) -> Response:
    """Back to a checkpoint: what was handed over since comes again, to the new epoch only."""
    epoch, version, checkpoint = await core.deliveries.rewind(run_id, trainer, asked.name)
    return record(Rewound(epoch=epoch, policy_version=version, checkpoint=checkpoint))


async def trainer(core: Core, run_id: str, trainer: str) -> Response:
    """The trainer's epoch, which a rewind raises: 0 for one that was never heard of."""
    return record(TrainerStatus(trainer=trainer, epoch=await core.deliveries.epoch(run_id, trainer)))


async def checkpoints(core: Core, run_id: str, trainer: str, paging: Paged) -> Response:
    """In the order of their commits."""
    found = await core.deliveries.checkpoints(run_id, trainer, cursor=paging.cursor, limit=paging.limit)
    return page(found)


def router() -> APIRouter:
    routes = APIRouter(tags=["deliveries"], prefix="/v1", route_class=StrictRoute)
    add = routes.add_api_route
    add("/runs/{run_id}/deliveries", lease, methods=["POST"], response_model=None,
        responses=answers("Delivery", JSON, MSGPACK), openapi_extra=accepts(LeaseGroups))  # fmt: skip
    add("/deliveries/{lease_id}/renew", renew, methods=["POST"], response_model=Lease,
        openapi_extra=accepts(RenewLease))  # fmt: skip
    add("/deliveries/{lease_id}/ack", ack, methods=["POST"], response_model=Lease)
    add("/deliveries/{lease_id}/nack", nack, methods=["POST"], status_code=204, response_model=None)
    one = "/runs/{run_id}/trainers/{trainer}"
    add(one, trainer, methods=["GET"], response_model=TrainerStatus)
    add(f"{one}/commit", commit, methods=["POST"], response_model=Checkpoint,
        openapi_extra=accepts(CommitCheckpoint))  # fmt: skip
    add(f"{one}/rewind", rewind, methods=["POST"], response_model=Rewound,
        openapi_extra=accepts(Rewind))  # fmt: skip
    add(f"{one}/checkpoints", checkpoints, methods=["GET"], response_model=Listing[Checkpoint])
    return routes
