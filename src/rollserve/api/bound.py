"""A bound on the requests in flight, in front of everything that could make one wait.

What watches over the server is answered also when trainers have taken all places: it has a few of its
own.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from rollserve.api.problems import problem_response
from rollserve.errors import QueueFull

WATCHED_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})
WATCHERS = 64
RETRY_S = 1.0


class BoundMiddleware:
    """At most ``max_requests`` at once, long polls and event streams included; one more is answered 429
    at once, and nothing of it is read."""

    def __init__(self, app: ASGIApp, max_requests: int) -> None:
        self._app = app
        self._max_requests = max_requests
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._in_flight >= self._places(scope["path"]):
            error = QueueFull(f"{self._max_requests} requests are being answered", retry_after_s=RETRY_S)
            await problem_response(error)(scope, receive, send)
            return
        self._in_flight += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._in_flight -= 1

    def _places(self, path: str) -> int:
        return self._max_requests + (WATCHERS if path in WATCHED_PATHS else 0)
