"""Routes of evaluations: what a run found, and how two runs differ."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response

from rollserve.api.answers import listing, record
from rollserve.api.parts import Core, Paged, StrictRoute, slice_of
from rollserve.errors import InvalidInput
from rollserve.records.evaluation import Comparison, Evaluation, TaskDifference, TaskResult
from rollserve.rollouts.evaluation import Asked
from rollserve.wire import Listing

_MAX_K = 100_000
_MAX_KS = 16


def _ks(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 0 < int(part) <= _MAX_K for part in parts):
        raise InvalidInput(f"whole numbers from 1 to {_MAX_K}, such as 1,4,8", field="k")
    if len(parts) > _MAX_KS:
        raise InvalidInput(f"at most {_MAX_KS} of them", field="k")
    return tuple(sorted({int(part) for part in parts}))


async def _asked(
    k: Annotated[str, Query(max_length=256, description="Of pass@k; several by comma.")] = "1",
    threshold: Annotated[
        float, Query(allow_inf_nan=False, description="A rollout passes with this reward or more.")
    ] = 1.0,
    confidence: Annotated[float, Query(ge=0.5, le=0.9999, description="Of the intervals.")] = 0.95,
) -> Asked:
    return Asked(ks=_ks(k), threshold=threshold, confidence=confidence)


How = Annotated[Asked, Depends(_asked)]
Other = Annotated[str, Query(max_length=160, description="Id of the run to compare with.")]


async def show(core: Core, run_id: str, how: How) -> Response:
    """Mean reward and pass@k over the run's tasks with intervals, rollouts without a grade by reason, and
    what it took."""
    return record(await core.evaluations.evaluate(run_id, how))


async def tasks(core: Core, run_id: str, how: How, paging: Paged) -> Response:
    """The same task by task, the worst first."""
    return listing(*slice_of(await core.evaluations.results(run_id, how), paging))


async def compare(core: Core, run_id: str, other: Other, how: How) -> Response:
    """This run less the `other`, paired by task: differences with intervals, wins and losses, and the tasks
    that only one has."""
    return record(await core.evaluations.compare(run_id, other, how))


async def differences(core: Core, run_id: str, other: Other, paging: Paged) -> Response:
    """The same task by task, what was lost most first."""
    return listing(*slice_of(await core.evaluations.differences(run_id, other), paging))


def router() -> APIRouter:
    routes = APIRouter(tags=["evaluation"], prefix="/v1", route_class=StrictRoute)
    add = routes.add_api_route
    one = "/runs/{run_id}/evaluation"
    add(one, show, methods=["GET"], response_model=Evaluation)
    add(f"{one}/tasks", tasks, methods=["GET"], response_model=Listing[TaskResult])
    add(f"{one}/compare", compare, methods=["GET"], response_model=Comparison)
    add(f"{one}/compare/tasks", differences, methods=["GET"], response_model=Listing[TaskDifference])
    return routes
