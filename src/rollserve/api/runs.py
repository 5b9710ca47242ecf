"""Routes of runs and of their groups' submission."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Response

from rollserve.api.answers import page, record
from rollserve.api.bodies import body, groups_body
from rollserve.api.parts import Core, IdempotencyKey, Paged, StrictRoute, accepts
from rollserve.records.rollout import Group, GroupState
from rollserve.records.run import Run, RunState
from rollserve.wire import (
    BinCount,
    Checked,
    GroupSummary,
    Listing,
    OpenRun,
    Pruned,
    RunClosed,
    RunStatus,
    SubmitGroups,
    Submitted,
)


async def open_run(
    core: Core, spec: Annotated[OpenRun, body(OpenRun)], key: IdempotencyKey = None
) -> Response:
    secret = spec.callback_secret
    run = await core.runs.open(spec, key, None if secret is None else secret.get_secret_value())
    return record(run, 201)


async def list_runs(
    core: Core, paging: Paged, state: RunState | None = None, newest: bool = False
) -> Response:
    """In the order they were opened; `newest=true` turns it round."""
    found = await core.runs.page(state=state, newest=newest, cursor=paging.cursor, limit=paging.limit)
    return page(found)


async def show(core: Core, run_id: str) -> Response:
    """The run, its rollouts and groups counted by state, what became of its tokens, its task source."""
    bins = {
        kind: {name: BinCount(count=each.count, tokens=each.tokens) for name, each in found.items()}
        for kind, found in (await core.runs.bins(run_id)).items()
    }
    status = RunStatus(
        run=await core.runs.get(run_id),
        counts=await core.runs.counts(run_id),
        bins=bins,
        source=await core.runs.source(run_id),
    )
    return record(status)


async def prune(core: Core, run_id: str) -> Response:
    """Forget a closed run with all its data."""
    return record(Pruned(payloads=await core.runs.prune(run_id)))


async def pause(core: Core, run_id: str) -> Response:
    """Start no more of its rollouts; what runs goes on."""
    return record(await core.runs.pause(run_id))


async def resume(core: Core, run_id: str) -> Response:
    return record(await core.runs.resume(run_id))


async def close(core: Core, run_id: str) -> Response:
    """Take no more groups and cancel what is queued or running. Finished groups stay deliverable."""
    run, cancelled = await core.runs.close(run_id)
    return record(RunClosed(run=run, ended=cancelled.ended, stopping=cancelled.stopping))


async def submit(
    core: Core, run_id: str, groups: Annotated[SubmitGroups, groups_body()], key: IdempotencyKey = None
) -> Response:
    """Queue groups: all or none. They are durable when the answer comes."""
    stored = await core.groups.submit(run_id, groups.groups, key)
    summaries = [
        GroupSummary(id=group.id, num_rollouts=group.num_rollouts, state=group.state.value)
        for group in stored
    ]
    return record(Submitted(groups=summaries), 201)


async def list_groups(core: Core, run_id: str, paging: Paged, state: GroupState | None = None) -> Response:
    found = await core.groups.of_run(
        run_id, state=state.value if state else None, cursor=paging.cursor, limit=paging.limit
    )
    return await asyncio.to_thread(page, found)  # tasks may be large


async def check(core: Core, groups: Annotated[SubmitGroups, groups_body()]) -> Response:
    """Would these groups be taken? Nothing is stored or started."""
    await core.groups.check(groups.groups)
    return record(Checked(groups=len(groups.groups)))


def router() -> APIRouter:
    routes = APIRouter(tags=["runs"], prefix="/v1", route_class=StrictRoute)
    add = routes.add_api_route
    add("/runs", open_run, methods=["POST"], status_code=201, response_model=Run,
        openapi_extra=accepts(OpenRun))  # fmt: skip
    add("/runs", list_runs, methods=["GET"], response_model=Listing[Run])
    add("/runs/{run_id}", show, methods=["GET"], response_model=RunStatus)
    add("/runs/{run_id}", prune, methods=["DELETE"], response_model=Pruned)
    add("/runs/{run_id}/pause", pause, methods=["POST"], response_model=Run)
    add("/runs/{run_id}/resume", resume, methods=["POST"], response_model=Run)
    add("/runs/{run_id}/close", close, methods=["POST"], response_model=RunClosed)
    add("/runs/{run_id}/groups", submit, methods=["POST"], status_code=201, response_model=Submitted,
        openapi_extra=accepts(SubmitGroups))  # fmt: skip
    add("/runs/{run_id}/groups", list_groups, methods=["GET"], response_model=Listing[Group])
    add("/check", check, methods=["POST"], response_model=Checked, openapi_extra=accepts(SubmitGroups))
    return routes
