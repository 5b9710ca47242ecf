"""The route that proves a rollout's samples."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from rollserve.api.answers import record
from rollserve.api.parts import Core, StrictRoute
from rollserve.records.verification import Verification
from rollserve.rollouts.verify import Criteria


async def verify(
    core: Core,
    rollout_id: str,
    score: Annotated[bool, Query(description="Ask a backend for the tokens' logprobs again.")] = True,
    backend_id: Annotated[str | None, Query(max_length=128, description="Which one.")] = None,
    max_difference: Annotated[float, Query(ge=0, description="Of one token, in nats.")] = 1.0,
    mean_difference: Annotated[float, Query(ge=0, description="Of a sample, in nats.")] = 0.05,
) -> Response:
    """Check the rollout's samples: whole, read back from their ids, and scored again by a backend."""
    criteria = Criteria(
        score=score, backend_id=backend_id, max_difference=max_difference, mean_difference=mean_difference
    )
    return record(await core.verifier.verify(rollout_id, criteria))


def router() -> APIRouter:
    routes = APIRouter(tags=["trajectories"], prefix="/v1", route_class=StrictRoute)
    routes.add_api_route(
        "/rollouts/{rollout_id}/verify", verify, methods=["POST"], response_model=Verification
    )
    return routes
