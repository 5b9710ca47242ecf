"""Routes of the whole: health, readiness, status, metrics."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from rollserve import __version__
from rollserve.api.answers import record
from rollserve.api.metrics import CONTENT_TYPE, RequestMeter, exposition
from rollserve.api.parts import Core, StrictRoute
from rollserve.rollouts.status import Snapshot
from rollserve.wire import JSON, ServerStatus


async def _meter(request: Request) -> RequestMeter:
    meter: RequestMeter = request.app.state.meter
    return meter


async def health() -> Response:
    """The process answers."""
    return Response('{"ok":true}', media_type=JSON)


async def ready(core: Core) -> Response:
    """Rollouts can be run now; 503 otherwise."""
    await core.check_ready()
    return Response(f'{{"ready":true,"workers":{core.workers}}}', media_type=JSON)


async def status(core: Core) -> Response:
    return record(_status(await core.status.snapshot()))


def _status(snapshot: Snapshot) -> ServerStatus:
    return ServerStatus(
        version=__version__,
        uptime_s=snapshot.uptime_s,
        workers=snapshot.workers,
        stages=snapshot.stages,
        slots=snapshot.slots,
        counters=snapshot.counters,
        queued=snapshot.queued,
        running=snapshot.running,
        loop_lag_ms_p99=snapshot.loop_lag_ms_p99,
        backends=snapshot.backends,
        policies=snapshot.policies,
        callbacks=snapshot.callbacks,
    )


async def metrics(core: Core, meter: Annotated[RequestMeter, Depends(_meter)]) -> Response:
    """In Prometheus' text format."""
    return Response(exposition(await core.status.snapshot(), meter), media_type=CONTENT_TYPE)


def router() -> APIRouter:
    routes = APIRouter(tags=["status"], route_class=StrictRoute)
    add = routes.add_api_route
    add("/healthz", health, methods=["GET"], response_model=None)
    add("/readyz", ready, methods=["GET"], response_model=None)
    add("/metrics", metrics, methods=["GET"], response_model=None,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})  # fmt: skip
    add("/v1/status", status, methods=["GET"], response_model=ServerStatus)
    return routes
