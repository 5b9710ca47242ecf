"""Routes of groups and rollouts: look, and cancel."""

from __future__ import annotations

from fastapi import APIRouter, Response

from rollserve.api.answers import page, record
from rollserve.api.parts import Core, Paged, StrictRoute
from rollserve.records.rollout import Attempt, Rollout, RolloutState
from rollserve.rollouts.cancel import Cancelled as Outcome
from rollserve.wire import Cancelled, GroupStatus, Listing, RolloutStatus


async def show_group(core: Core, group_id: str) -> Response:
    """The group, and its rollouts counted by state; `/v1/rollouts?group_id=` lists them."""
    group = await core.groups.get(group_id)
    return record(GroupStatus(group=group, counts=await core.groups.counts(group_id)))


async def cancel_group(core: Core, group_id: str) -> Response:
    """Queued rollouts end at once, running ones are stopped at the backend and in the sandbox."""
    return record(_cancelled(await core.groups.cancel_group(group_id)))


async def list_rollouts(
    core: Core,
    paging: Paged,
    run_id: str | None = None,
    group_id: str | None = None,
    state: RolloutState | None = None,
) -> Response:
    found = await core.groups.rollouts(
        run_id=run_id, group_id=group_id, state=state, cursor=paging.cursor, limit=paging.limit
    )
    return page(found)


async def show_rollout(core: Core, rollout_id: str) -> Response:
    """The rollout, its task and its newest attempt; `…/attempts` lists all."""
    rollout, task, last = await core.groups.rollout(rollout_id)
    status = RolloutStatus(
        rollout=rollout,
        task=task,
        stage=core.stage_of(rollout_id),
        attempts=last.epoch if last else 0,
        last_attempt=last,
    )
    return record(status)


async def cancel_rollout(core: Core, rollout_id: str) -> Response:
    return record(_cancelled(await core.groups.cancel_rollout(rollout_id)))


async def attempts(core: Core, rollout_id: str, paging: Paged) -> Response:
    """The history: every try, and why it ended."""
    return page(await core.groups.attempts(rollout_id, cursor=paging.cursor, limit=paging.limit))


def _cancelled(outcome: Outcome) -> Cancelled:
    return Cancelled(ended=outcome.ended, stopping=outcome.stopping)


def router() -> APIRouter:
    routes = APIRouter(tags=["rollouts"], prefix="/v1", route_class=StrictRoute)
    add = routes.add_api_route
    add("/groups/{group_id}", show_group, methods=["GET"], response_model=GroupStatus)
    add("/groups/{group_id}/cancel", cancel_group, methods=["POST"], response_model=Cancelled)
    add("/rollouts", list_rollouts, methods=["GET"], response_model=Listing[Rollout])
    add("/rollouts/{rollout_id}", show_rollout, methods=["GET"], response_model=RolloutStatus)
    add("/rollouts/{rollout_id}/cancel", cancel_rollout, methods=["POST"], response_model=Cancelled)
    add("/rollouts/{rollout_id}/attempts", attempts, methods=["GET"], response_model=Listing[Attempt])
    return routes
