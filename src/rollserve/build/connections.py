"""Connections that send no request: closed after a while, and never more than so many.

uvicorn waits for ever for the first request of a connection, for the end of a head that has begun, and
for the rest of a body that was answered before it had arrived. A connection is *idle* in each of these
cases and between two requests; it is *busy* from the end of a request's head to the end of its answer,
and then the application's bounds hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from rollserve.build.gathering import Gathered
from rollserve.gateway.asgi import BREAK_OFF


@dataclass(frozen=True, kw_only=True)
class IdleBounds:
    """``head_s`` is how long a connection may owe the rest of a request before it is closed, ``head_bytes``
    how large a request's head may be, and ``connections`` how many may be idle: one more takes the place
    of the one that has been idle longest."""

    head_s: float = 20.0
    head_bytes: int = 64 << 10
    connections: int = 4096


@dataclass(slots=True)
class _Idle:
    """The idle connections of one server, the longest idle first."""

    most: int
    connections: dict[Connection, None] = field(default_factory=dict)

    def add(self, connection: Connection) -> None:
        self.connections[connection] = None
        if len(self.connections) > self.most:
            next(iter(self.connections)).drop()

    def remove(self, connection: Connection) -> None:
        self.connections.pop(connection, None)


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with a deadline for what it owes."""

    def __init__(self, bounds: IdleBounds, idle: _Idle, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._bounds = bounds
        self._idle = idle
        self._deadline: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._in_head = False
        self._in_message = False

    # -- what uvicorn and its parser call
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # a server's are; uvloop's are no subclass
        super().connection_made(Gathered(cast("asyncio.Transport", transport), self.loop))
        self._owes()
        self._idle.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._settled()
        self._idle.remove(self)
        super().connection_lost(exc)
        if self.scope is not None:
            self.scope.pop("extensions", None)  # it holds this connection, which holds it

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._busy and not self.transport.is_closing():
            self._owes()
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self._bounds.head_bytes and not self.transport.is_closing():
                self.send_400_response("The request's head is too large.")

    def on_message_begin(self) -> None:
        self._in_head = self._in_message = True
        self._head_bytes = 0
        super().on_message_begin()
        extensions: dict[str, Any] = {BREAK_OFF: self.drop}
        self.scope["extensions"] = extensions

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._settled()
        self._idle.remove(self)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_message = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._busy or self.transport.is_closing():
            return
        self._idle.add(self)
        if self._in_message:
            self._owes()

    # -- what it owes
    @property
    def _busy(self) -> bool:
        """Requests that were sent ahead are answered in turn."""
        return bool(self.pipeline) or (self.cycle is not None and not self.cycle.response_complete)

    def _owes(self) -> None:
        """More data does not move a deadline that stands: a byte now and then is no request."""
        if self._deadline is None:
            self._deadline = self.loop.call_later(self._bounds.head_s, self.drop)

    def _settled(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def drop(self) -> None:
        """Close at once, whatever has not been sent or read."""
        self._settled()
        self._idle.remove(self)
        self.transport.abort()


def bounded_connections(bounds: IdleBounds) -> Callable[..., Connection]:
    """A factory of connections for one ``uvicorn.Server``."""
    idle = _Idle(bounds.connections)

    def connect(
        *,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> Connection:
        return Connection(
            bounds, idle, config=config, server_state=server_state, app_state=app_state, _loop=_loop
        )

    return connect
