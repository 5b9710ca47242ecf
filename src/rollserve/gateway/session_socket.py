"""The gateway as one sandbox sees it: its own session, and nothing else."""

from __future__ import annotations

from rollserve.gateway import dialects
from rollserve.gateway.asgi import ASGIApp, Receive, Scope, Send


def only_session(app: ASGIApp, session_id: str) -> ASGIApp:
    """``app`` behind an address that is the session's whether or not a path says so: ``/v1/…`` and
    ``/s/<any>/v1/…`` are both ``/s/<session_id>/v1/…``. So another session's secret is refused, which
    the path of that session would let in."""

    async def narrowed(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = f"/s/{session_id}{dialects.split(scope['path'])[1]}"
            scope = {**scope, "path": path, "raw_path": path.encode()}
        await app(scope, receive, send)

    return narrowed
