"""Routes that say where tokens differ from what was sent or consumed."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Response

from rollserve.api.answers import page, plain_listing
from rollserve.api.parts import Core, Paged, StrictRoute, slice_of
from rollserve.records.drift import RolloutDrift
from rollserve.wire import Listing


async def of_run(
    core: Core,
    run_id: str,
    paging: Paged,
    cause: Annotated[str | None, Query(max_length=64, description="Only rollouts that met it.")] = None,
) -> Response:
    """Drift of the run's rollouts by cause, a rollout an item; pages of at most 100 rollouts read, so that
    one may be empty and not the last."""
    return page(await core.drifts.of_run(run_id, cause=cause, cursor=paging.cursor, limit=paging.limit))


async def of_rollout(core: Core, rollout_id: str, paging: Paged) -> Response:
    """Each place where a call of the newest attempt drifted: cause, message, token, ids, text."""
    some, following = slice_of(await core.drifts.of_rollout(rollout_id), paging)
    return plain_listing([msgspec.to_builtins(each) for each in some], following)


def router() -> APIRouter:
    routes = APIRouter(tags=["trajectories"], prefix="/v1", route_class=StrictRoute)
    add = routes.add_api_route
    add("/runs/{run_id}/drift", of_run, methods=["GET"], response_model=Listing[RolloutDrift])
    add("/rollouts/{rollout_id}/drift", of_rollout, methods=["GET"], response_model=Listing[dict[str, Any]])
    return routes
