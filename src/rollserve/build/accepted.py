"""uvicorn's connections without uvicorn's server, whose clock would tick for each listener."""

from __future__ import annotations

import asyncio

import uvicorn
from uvicorn.server import ServerState

from rollserve.build.connections import IdleBounds, bounded_connections
from rollserve.gateway.asgi import ASGIApp

CLOSE_S = 2.0
"""For answers under way at the end."""


class Accepted:
    """The connections of one listener: ``answer`` makes the protocol of one that was accepted."""

    def __init__(self, app: ASGIApp, idle: IdleBounds, *, keep_alive_s: int = 75) -> None:
        self._config = uvicorn.Config(
            app,
            interface="asgi3",
            lifespan="off",
            log_config=None,
            access_log=False,
            ws="none",
            proxy_headers=False,
            timeout_keep_alive=keep_alive_s,
        )
        self._config.load()
        self._state = ServerState()
        self._connect = bounded_connections(idle)

    def answer(self) -> asyncio.Protocol:
        return self._connect(config=self._config, server_state=self._state, app_state={})

    async def finish(self) -> None:
        """Close what is idle, wait for what is being answered, and end what takes too long."""
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            _, late = await asyncio.wait(set(self._state.tasks), timeout=CLOSE_S)
            for task in late:
                task.cancel()
        for connection in list(self._state.connections):
            transport: asyncio.Transport | None = getattr(connection, "transport", None)
            if transport is not None:
                transport.abort()
