"""Routes of replay: stored attempts graded once more, and samples made anew; no policy is run."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Request, Response

from rollserve.api.answers import JSON_WEIGHT, PiecesResponse, array_of, encode, form_of, map_of, page, record
from rollserve.api.bodies import body
from rollserve.api.deliveries import group_fields, while_connected
from rollserve.api.parts import Core, IdempotencyKey, Paged, StrictRoute, accepts, answers
from rollserve.records.export import ExportSettings
from rollserve.records.regrade import Regrade, Regrading, RegradingState
from rollserve.rollouts.exports import Exported
from rollserve.wire import (
    JSON,
    MSGPACK,
    BeginRegrade,
    ExportGroups,
    Form,
    Listing,
    RegradeCancelled,
    RegradeStatus,
)


async def begin(
    core: Core, run_id: str, asked: Annotated[BeginRegrade, body(BeginRegrade)], key: IdempotencyKey = None
) -> Response:
    """Grade each stored attempt that came to its end once more, by another grader. New gradings stand beside
    the rollouts' own rewards, which stay."""
    return record(await core.regrades.begin(run_id, asked.grader, key, routes=asked.routes), 201)


async def of_run(core: Core, run_id: str, paging: Paged) -> Response:
    """The run's regrades, in the order they were begun."""
    return page(await core.regrades.of_run(run_id, cursor=paging.cursor, limit=paging.limit))


async def show(core: Core, regrade_id: str) -> Response:
    """The regrade, and its gradings counted by state."""
    regrade, counts = await core.regrades.get(regrade_id)
    return record(RegradeStatus(regrade=regrade, counts=counts))


async def gradings(
    core: Core, regrade_id: str, paging: Paged, state: RegradingState | None = None
) -> Response:
    """Each rollout's: the reward it had before, and what this grader says; where it could not, why."""
    found = await core.regrades.regradings(regrade_id, state=state, cursor=paging.cursor, limit=paging.limit)
    return page(found)


async def cancel(core: Core, regrade_id: str) -> Response:
    """What has not begun is not graded."""
    return record(RegradeCancelled(cancelled=await core.regrades.cancel(regrade_id)))


async def export(
    request: Request,
    core: Core,
    run_id: str,
    asked: Annotated[ExportGroups, body(ExportGroups, optional=True)],
) -> Response:
    """Samples of the run's groups, made anew from what was stored, by other settings; a page of groups."""
    form = form_of(request)
    settings = ExportSettings.model_validate(asked.model_dump(include=set(ExportSettings.model_fields)))
    weight = JSON_WEIGHT if form == "json" else 1.0
    work = core.exports.page(run_id, settings, cursor=asked.cursor, limit=asked.limit, weight=weight)
    found, following = await while_connected(request, work)
    return PiecesResponse(await asyncio.to_thread(_encode, found, following, form), form)


def _encode(found: list[Exported], following: str | None, form: Form) -> list[bytes]:
    groups = [
        map_of(group_fields(each.finished, form) | {"left_out": [encode(each.left_out, form)]}, form)
        for each in found
    ]
    fields = {"groups": array_of(groups, len(groups), form), "next": [encode(following, form)]}
    return map_of(fields, form)


def router() -> APIRouter:
    routes = APIRouter(tags=["replay"], prefix="/v1", route_class=StrictRoute)
    add = routes.add_api_route
    add("/runs/{run_id}/regrades", begin, methods=["POST"], status_code=201, response_model=Regrade,
        openapi_extra=accepts(BeginRegrade))  # fmt: skip
    add("/runs/{run_id}/regrades", of_run, methods=["GET"], response_model=Listing[Regrade])
    add("/regrades/{regrade_id}", show, methods=["GET"], response_model=RegradeStatus)
    add("/regrades/{regrade_id}/gradings", gradings, methods=["GET"], response_model=Listing[Regrading])
    add("/regrades/{regrade_id}/cancel", cancel, methods=["POST"], response_model=RegradeCancelled)
    add("/runs/{run_id}/export", export, methods=["POST"], response_model=None,
        responses=answers("ExportPage", JSON, MSGPACK), openapi_extra=accepts(ExportGroups))  # fmt: skip
    return routes
