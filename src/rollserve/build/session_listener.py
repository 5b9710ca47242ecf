"""A worker's listener for sandboxes elsewhere: sessions, each by its secret, and whether it is there.

It faces a network. Connections whose TLS handshake is not over are no connections of uvicorn's yet, which its
bounds could hold: they have a time-out and a bound of their own here.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from rollserve.build.accepted import Accepted
from rollserve.build.connections import IdleBounds
from rollserve.build.http import idle_bounds
from rollserve.build.session_address import SessionAddresses
from rollserve.gateway.asgi import ASGIApp
from rollserve.rollouts.worker_ports import SessionAddress
from rollserve.sandbox.accepting import accept_all

HANDSHAKE_S = 10.0
GOODBYE_S = 2.0
"""For the end of TLS at the peer's side; a connection that is closed counts for no other bound."""

HANDSHAKES = 256
_PAUSE_S = 0.1
_TELL_EVERY_S = 60.0

_log = structlog.get_logger(__name__)


class SessionListener:
    """Serves ``app`` on ``sock`` between ``start`` and ``stop``, by TLS where there is ``tls``. Of more than
    ``handshakes`` at once the oldest is given up."""

    def __init__(
        self,
        app: ASGIApp,
        sock: socket.socket,
        tls: ssl.SSLContext | None,
        *,
        idle: IdleBounds | None = None,
        handshake_s: float = HANDSHAKE_S,
        handshakes: int = HANDSHAKES,
        goodbye_s: float = GOODBYE_S,
    ) -> None:
        self._sock = sock
        self._tls = tls
        self._accepted = Accepted(app, idle or idle_bounds())
        self._handshake_s = handshake_s
        self._most = handshakes
        self._goodbye_s = goodbye_s
        self._greeting: dict[asyncio.Task[None], None] = {}
        self._accepting: asyncio.Task[None] | None = None
        self._failed: Counter[str] = Counter()
        self._told_at = float("-inf")

    def start(self) -> None:
        self._accepting = asyncio.create_task(self._accept(), name="session-listener")

    async def stop(self) -> None:
        """Idempotent."""
        accepting, self._accepting = self._accepting, None
        if accepting is not None:
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)
        self._sock.close()
        greeting = list(self._greeting)
        for task in greeting:
            task.cancel()
        await asyncio.gather(*greeting, return_exceptions=True)
        await self._accepted.finish()

    async def _accept(self) -> None:
        """The socket is nobody else's, so that an accept which fails (of a network that is down) is made
        again."""
        while True:
            await accept_all(self._sock, self._take)
            await asyncio.sleep(_PAUSE_S)

    async def _take(self, connection: socket.socket) -> None:
        if len(self._greeting) >= self._most:
            next(task for task in self._greeting if not task.cancelling()).cancel()
        task = asyncio.create_task(self._greet(connection), name="session-handshake")
        self._greeting[task] = None
        task.add_done_callback(lambda task: self._greeted(task, connection))

    async def _greet(self, connection: socket.socket) -> None:
        await asyncio.get_running_loop().connect_accepted_socket(
            self._accepted.answer,
            connection,
            ssl=self._tls,
            ssl_handshake_timeout=None if self._tls is None else self._handshake_s,
            ssl_shutdown_timeout=None if self._tls is None else self._goodbye_s,
        )

    def _greeted(self, task: asyncio.Task[None], connection: socket.socket) -> None:
        self._greeting.pop(task, None)
        if task.cancelled():
            connection.close()
        elif (error := task.exception()) is not None:
            connection.close()
            self._tell(error)

    def _tell(self, error: BaseException) -> None:
        """Once a while, as strangers can make it happen: by what went wrong, how often since."""
        self._failed[getattr(error, "reason", None) or type(error).__name__] += 1
        now = asyncio.get_running_loop().time()
        if now - self._told_at >= _TELL_EVERY_S:
            self._told_at = now
            _log.warning("session_address.no_handshake", times=dict(self._failed))
            self._failed.clear()


@asynccontextmanager
async def session_listener(
    addresses: SessionAddresses | None, app: ASGIApp
) -> AsyncIterator[SessionAddress | None]:
    """This worker's, open; None where none is advertised. Raises ``ConfigError`` when no port is free."""
    if addresses is None:
        yield None
        return
    sock = addresses.take_port()
    listener = SessionListener(app, sock, addresses.tls)
    listener.start()
    address = SessionAddress(url=addresses.at(sock.getsockname()[1]), authority=addresses.authority)
    _log.info("session_address.listens", url=address.url)
    try:
        yield address
    finally:
        await listener.stop()
