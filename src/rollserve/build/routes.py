"""Sessions served on sockets inside sandboxes: each on its own, for as long as its attempt runs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from uvicorn.server import ServerState

from rollserve.build.connections import IdleBounds, bounded_connections
from rollserve.build.http import url_of
from rollserve.gateway.asgi import ASGIApp
from rollserve.gateway.base import Session
from rollserve.gateway.route import only_session
from rollserve.rollouts.worker_ports import ServeSession
from rollserve.sandbox.accepting import accept_all

IDLE_CONNECTIONS = 64
CLOSE_S = 2.0
"""For answers under way when the route ends; their session has ended before, and so have they."""


def session_routes(app: ASGIApp, *, keep_alive_s: int = 75) -> ServeSession:
    """Serves ``app`` cut down to a session: uvicorn's connections without uvicorn's server, whose clock
    ticks for each."""

    @asynccontextmanager
    async def serve(session: Session, sock: socket.socket) -> AsyncIterator[str]:
        config = uvicorn.Config(
            only_session(app, session.id),
            interface="asgi3",
            lifespan="off",
            log_config=None,
            access_log=False,
            ws="none",
            proxy_headers=False,
            timeout_keep_alive=keep_alive_s,
        )
        config.load()
        state = ServerState()
        connect = bounded_connections(IdleBounds(connections=IDLE_CONNECTIONS))

        def answer() -> asyncio.Protocol:
            return connect(config=config, server_state=state, app_state={})

        async def accept(connection: socket.socket) -> None:
            await asyncio.get_running_loop().connect_accepted_socket(answer, connection)

        url = f"{url_of(sock)}/s/{session.id}/v1"
        with sock:
            accepting = asyncio.create_task(accept_all(sock, accept), name=f"route-{session.id}")
            try:
                yield url
            finally:
                accepting.cancel()
                await asyncio.gather(accepting, return_exceptions=True)
                await _finish(state)

    return serve


async def _finish(state: ServerState) -> None:
    """Close what is idle, wait for what is being answered, and end what takes too long."""
    for connection in list(state.connections):
        connection.shutdown()
    if state.tasks:
        _, late = await asyncio.wait(set(state.tasks), timeout=CLOSE_S)
        for task in late:
            task.cancel()
    for connection in list(state.connections):
        transport: asyncio.Transport | None = getattr(connection, "transport", None)
        if transport is not None:
            transport.abort()
