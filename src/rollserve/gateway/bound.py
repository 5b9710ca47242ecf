"""A bound on the calls that a worker's gateway holds at once.

It is far above what a worker's agents make: one more than that is a fault, or an attack. Agents are never
told 429, at which some give up for good; they meet 503, and come back.
"""

from __future__ import annotations

from rollserve.dialect import clients
from rollserve.errors import Unavailable
from rollserve.gateway import dialects
from rollserve.gateway.asgi import Answering, ASGIApp, Receive, Scope, Send, header_map
from rollserve.gateway.sending import refuse


def bounded(app: ASGIApp, max_requests: int) -> ASGIApp:
    """``app`` with at most ``max_requests`` in flight; one more is answered at once, and nothing of it is
    read. ``/healthz`` is always answered."""
    return _Bounded(app, max_requests)


class _Bounded:
    def __init__(self, app: ASGIApp, max_requests: int) -> None:
        self._app = app
        self._max_requests = max_requests
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/healthz":
            await self._app(scope, receive, send)
        elif self._in_flight >= self._max_requests:
            headers = header_map(scope["headers"])
            error = Unavailable(f"this worker holds {self._max_requests} calls already")
            dialect = dialects.nearest(dialects.split(scope["path"])[1], headers)
            await refuse(Answering(scope, receive, send), error, dialect, clients.recognise(headers))
        else:
            self._in_flight += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._in_flight -= 1
