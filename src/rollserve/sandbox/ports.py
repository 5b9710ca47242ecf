"""A port of a sandbox, brought out: an address on this machine that leads to what listens inside."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from rollserve.errors import RollserveError
from rollserve.sandbox.base import Sandbox

READ_BYTES = 65536
CONNECTIONS = 64
_NAME = "socket"


class Forward:
    """Hands each connection on; one that nothing answers inside, or that is one too many, is closed."""

    def __init__(self, sandbox: Sandbox, port: int) -> None:
        self._sandbox = sandbox
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._relay(reader, writer), name=f"forward-{self._port}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        streams = [writer]
        try:
            inside = await self._sandbox.connect(self._port)
            from_inside, to_inside = await asyncio.open_connection(sock=inside, limit=READ_BYTES)
            streams.append(to_inside)
            await asyncio.gather(_copy(reader, to_inside), _copy(from_inside, writer))
            for stream in streams:
                stream.close()
        except (OSError, RollserveError):
            return  # either side is gone
        finally:
            for stream in streams:
                if not stream.is_closing():
                    stream.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(READ_BYTES):
        writer.write(data)
        await writer.drain()
    with suppress(OSError):
        writer.write_eof()


@asynccontextmanager
async def forwarded(sandbox: Sandbox, port: int) -> AsyncIterator[str]:
    """The path of a Unix socket that leads to a port of the sandbox, for this user alone; it and its
    connections go on leaving. Nothing need listen inside yet."""
    forward = Forward(sandbox, port)
    with tempfile.TemporaryDirectory(prefix="rollserve-port-") as folder:
        path = os.path.join(folder, _NAME)
        server = await asyncio.start_unix_server(forward.accept, path, limit=READ_BYTES)
        try:
            yield path
        finally:
            server.close()
            await forward.close()


@asynccontextmanager
async def forwarded_tcp(sandbox: Sandbox, port: int) -> AsyncIterator[int]:
    """The same as a port of this machine's loopback address, for programs that speak to no other: whoever is
    on this machine can reach it. Sandboxes can't."""
    forward = Forward(sandbox, port)
    sock = socket.create_server(("127.0.0.1", 0))
    server = await asyncio.start_server(forward.accept, sock=sock, limit=READ_BYTES)
    try:
        yield int(sock.getsockname()[1])
    finally:
        server.close()
        await forward.close()
