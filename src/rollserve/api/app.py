"""The HTTP application. Its life is its caller's: the coordinator is started and stopped outside."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware import Middleware

from rollserve import __version__
from rollserve.api import (
    callbacks,
    deliveries,
    drift,
    evaluation,
    events,
    policies,
    problems,
    replay,
    rollouts,
    runs,
    status,
    trajectories,
    verify,
)
from rollserve.api.auth import Auth, AuthMiddleware
from rollserve.api.bodies import BodyBudget
from rollserve.api.bound import BoundMiddleware
from rollserve.api.metrics import MeterMiddleware, RequestMeter
from rollserve.api.openapi import DescribedApp
from rollserve.config import ApiSettings
from rollserve.rollouts.coordinator import Coordinator

_BODIES_AT_ONCE = 8
"""Of the largest size, before more are refused."""


def make_app(coordinator: Coordinator, settings: ApiSettings, auth: Auth) -> FastAPI:
    meter = RequestMeter()
    app = DescribedApp(
        title="rollserve",
        version=__version__,
        summary="Rollouts as a service for reinforcement learning of multi-turn LLM agents.",
        redoc_url=None,
        redirect_slashes=False,
        middleware=[
            Middleware(MeterMiddleware, meter=meter),
            Middleware(BoundMiddleware, max_requests=settings.max_requests),
            Middleware(AuthMiddleware, auth=auth),
        ],
    )
    max_body_bytes = settings.max_body_mb << 20
    app.state.coordinator = coordinator
    app.state.meter = meter
    app.state.budget = BodyBudget(max_body_bytes, _BODIES_AT_ONCE * max_body_bytes)
    problems.install(app)
    handed_over = (deliveries, callbacks, replay, evaluation)
    for topic in (policies, runs, rollouts, trajectories, drift, verify, *handed_over, events, status):
        app.include_router(topic.router())
    return app
