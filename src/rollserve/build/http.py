"""An ASGI application on a port: uvicorn, started and stopped by whoever owns it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import resource
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from rollserve.build.connections import IdleBounds, bounded_connections
from rollserve.errors import ConfigError, InfrastructureFailure

BACKLOG = 2048


class _Server(uvicorn.Server):
    """Signals are the process owner's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises ``ConfigError``."""
    try:
        return listening(host, port)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"can't listen on {host}:{port}: {error}",
            field="api.port",
            hint="choose another with --port PORT (0 takes a free one) or --host",
        ) from error


def listening(host: str, port: int) -> socket.socket:
    """The same. Raises ``OSError``, ``OverflowError`` for a port that is none. Of two that bind the same free
    port at once, one learns that it is taken when it listens."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def is_loopback(host: str) -> bool:
    """A name or address that only this machine reaches."""
    bare = host.strip("[]")
    if bare == "localhost":
        return True
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False


def url_of(sock: socket.socket) -> str:
    """Where a client on this machine reaches the socket."""
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def idle_bounds() -> IdleBounds:
    """Idle connections take no more than a quarter of the files that this process may open."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return IdleBounds()
    return IdleBounds(connections=max(1, min(IdleBounds.connections, allowed // 4)))


class HttpServer:
    """Serves ``app`` on ``sock`` between ``start`` and ``stop``."""

    def __init__(
        self, app: ASGIApp, sock: socket.socket, *, keep_alive_s: int = 75, idle: IdleBounds | None = None
    ) -> None:
        self._sock = sock
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            http=bounded_connections(idle or idle_bounds()),  # type: ignore[arg-type]  # called as a class is
            ws="none",
            proxy_headers=False,
            timeout_keep_alive=keep_alive_s,
            timeout_graceful_shutdown=2,
        )
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises ``InfrastructureFailure`` when it does not come up."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._sock]), name="http")
        async with asyncio.timeout(30):
            while not self._server.started:
                if self._serving.done():
                    raise InfrastructureFailure("the HTTP server ended at its start", operation="http.start")
                await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Finish what is being answered, for two seconds at most. Idempotent."""
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving
            self._serving = None
        self._sock.close()
