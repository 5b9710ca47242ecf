"""Sessions served on sockets inside sandboxes: each on its own, for as long as its attempt runs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollserve.build.accepted import Accepted
from rollserve.build.connections import IdleBounds
from rollserve.build.http import url_of
from rollserve.gateway.asgi import ASGIApp
from rollserve.gateway.base import Session
from rollserve.gateway.session_socket import only_session
from rollserve.rollouts.worker_ports import ServeSession
from rollserve.sandbox.accepting import accept_all

IDLE_CONNECTIONS = 64


def session_sockets(app: ASGIApp, *, keep_alive_s: int = 75) -> ServeSession:
    """Serves ``app`` cut down to a session, which has ended before its socket goes."""

    @asynccontextmanager
    async def serve(session: Session, sock: socket.socket) -> AsyncIterator[str]:
        idle = IdleBounds(connections=IDLE_CONNECTIONS)
        accepted = Accepted(only_session(app, session.id), idle, keep_alive_s=keep_alive_s)

        async def accept(connection: socket.socket) -> None:
            await asyncio.get_running_loop().connect_accepted_socket(accepted.answer, connection)

        url = f"{url_of(sock)}/s/{session.id}/v1"
        with sock:
            accepting = asyncio.create_task(accept_all(sock, accept), name=f"session-socket-{session.id}")
            try:
                yield url
            finally:
                accepting.cancel()
                await asyncio.gather(accepting, return_exceptions=True)
                await accepted.finish()

    return serve
