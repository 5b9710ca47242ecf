"""A forward proxy for one sandbox: CONNECT for TLS, absolute addresses for plain HTTP.

It runs in the worker and listens inside the sandbox (``Sandbox.listen``), so the sandbox keeps a network
namespace without a way out, and nobody else reaches its proxy. Programs that don't heed ``HTTP_PROXY`` and
its kin don't get out. What it relays is bounded: connections at once, bytes in all, time to say what is
wanted, silence, and life of a connection.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus

from rollserve.records.network import AllowedHosts, Network
from rollserve.sandbox.accepting import accept_all
from rollserve.sandbox.egress.addresses import AddressRules
from rollserve.sandbox.egress.gate import Gate, Internet, RefusedError, Stream, Verdicts
from rollserve.sandbox.egress.request import Request

READ_BYTES = 65536
LINGER_S = 2.0
LINGER_READS = 64
TOLD = 16


@dataclass(frozen=True, kw_only=True)
class EgressBounds:
    """Of one sandbox: ``connections`` at once, ``total_bytes`` both ways over its life; of one connection:
    size of the request's head and seconds until it has arrived, seconds to look up and connect, without a
    byte, and in all."""

    connections: int = 64
    total_bytes: int = 4 << 30
    head_bytes: int = 16 << 10
    head_s: float = 10.0
    connect_s: float = 15.0
    idle_s: float = 300.0
    life_s: float = 3600.0


class EgressProxy:
    """Serves between ``start`` and ``close``."""

    def __init__(self, gate: Gate, bounds: EgressBounds) -> None:
        self._gate = gate
        self._bounds = bounds
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self.relayed_bytes = 0

    def start(self, sock: socket.socket) -> None:
        self._accepting = asyncio.create_task(accept_all(sock, self._accept), name="egress-accept")

    async def close(self) -> None:
        tasks = [*self._tasks, *([] if self._accepting is None else [self._accepting])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, connection: socket.socket) -> None:
        """A few too many are told so; more are closed, as each takes a descriptor of the worker's."""
        if len(self._tasks) >= self._bounds.connections + TOLD:
            connection.close()
            return
        task = asyncio.create_task(self._serve(connection), name="egress")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket) -> None:
        try:
            reader, writer = await asyncio.open_connection(sock=connection, limit=READ_BYTES)
        except OSError:
            connection.close()
            return
        streams = [writer]
        try:
            async with asyncio.timeout(self._bounds.life_s):
                if len(self._tasks) > self._bounds.connections:
                    raise RefusedError(503, f"more than {self._bounds.connections} connections at once")
                await self._answer((reader, writer), streams)
        except RefusedError as refused:
            writer.write(_refusal(refused))
            await _part(reader, writer)
        except (TimeoutError, OSError):
            pass  # it is over for both sides
        finally:
            for stream in streams:
                stream.transport.abort()

    async def _answer(self, client: Stream, streams: list[asyncio.StreamWriter]) -> None:
        request = await self._read_head(client[0])
        host, port = request.target()
        head = b"" if request.tunnel else request.head()
        if self.relayed_bytes >= self._bounds.total_bytes:
            raise RefusedError(403, f"this sandbox's {self._bounds.total_bytes} bytes are used up")
        upstream = await self._gate.open(host, port)
        streams.append(upstream[1])
        if request.tunnel:
            client[1].write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await self._hand_on(request.rest, upstream[1])
            sending = self._pump(client[0], upstream[1])
        else:
            await self._hand_on(head + request.body(), upstream[1])
            sending = self._send_body(request, client[0], upstream[1])
        await self._both(sending, self._pump(upstream[0], client[1]))
        await _part(*client)

    async def _read_head(self, reader: asyncio.StreamReader) -> Request:
        request = Request(self._bounds.head_bytes)
        try:
            async with asyncio.timeout(self._bounds.head_s):
                while not request.read_head:
                    data = await reader.read(READ_BYTES)
                    if not data:
                        raise RefusedError(400, "the request ends before its head does")
                    request.feed(data)
        except TimeoutError:
            raise RefusedError(408, f"the request did not arrive in {self._bounds.head_s:g} s") from None
        return request

    # -- relaying
    async def _both(self, *ways: Coroutine[None, None, None]) -> None:
        """Until the answer has ended, the last of the ways, or sending fails."""
        sending, answering = (asyncio.create_task(way) for way in ways)
        try:
            await asyncio.wait({sending, answering}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                sending.result()
            await answering
        finally:
            for task in (sending, answering):
                task.cancel()
            await asyncio.gather(sending, answering, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await self._next(reader):
            await self._hand_on(data, writer)
        if writer.can_write_eof():
            writer.write_eof()

    async def _send_body(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while not request.whole:
            data = await self._next(reader)
            if not data:
                raise ConnectionError("the request ends before its body does")
            request.feed(data)
            await self._hand_on(request.body(), writer)

    async def _next(self, reader: asyncio.StreamReader) -> bytes:
        async with asyncio.timeout(self._bounds.idle_s):
            return await reader.read(READ_BYTES)

    async def _hand_on(self, data: bytes, writer: asyncio.StreamWriter) -> None:
        self.relayed_bytes += len(data)
        if self.relayed_bytes > self._bounds.total_bytes:
            raise ConnectionError("the sandbox's bytes are used up")
        writer.write(data)
        async with asyncio.timeout(self._bounds.idle_s):
            await writer.drain()


def _refusal(refused: RefusedError) -> bytes:
    text = f"{refused}\n".encode("utf-8", "backslashreplace")
    status = HTTPStatus(refused.status)
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: text/plain; charset=utf-8\r\n"
    return f"{head}Content-Length: {len(text)}\r\nConnection: close\r\n\r\n".encode() + text


async def _part(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Let what was written arrive before the connection is ended: what the client still sends is read and
    dropped, as a connection that is closed over unread bytes takes the answer with it."""
    try:
        async with asyncio.timeout(LINGER_S):
            if writer.can_write_eof():
                writer.write_eof()
            await writer.drain()
            for _ in range(LINGER_READS):
                if not await reader.read(READ_BYTES):
                    break
    except (TimeoutError, OSError):
        pass


@dataclass(frozen=True, kw_only=True)
class Egress:
    """Opens a sandbox's way out, as the operator and the task have it."""

    rules: AddressRules
    bounds: EgressBounds = EgressBounds()
    internet: Internet = field(default_factory=Internet)

    @asynccontextmanager
    async def serve(
        self, network: Network, sock: socket.socket, *, log: Callable[[str], None]
    ) -> AsyncIterator[Mapping[str, str]]:
        """On a socket that listens inside the sandbox; what is entered is the environment that its programs
        need. Leaving ends its connections and closes the socket."""
        verdicts = Verdicts(log)
        gate = Gate(
            network if isinstance(network, AllowedHosts) else None,
            rules=self.rules,
            verdicts=verdicts,
            internet=self.internet,
            connect_s=self.bounds.connect_s,
        )
        proxy = EgressProxy(gate, self.bounds)
        with sock:
            address = "http://{}:{}".format(*sock.getsockname()[:2])
            proxy.start(sock)
            try:
                yield proxy_environment(address)
            finally:
                await proxy.close()
                verdicts.sum_up(proxy.relayed_bytes)


def proxy_environment(address: str) -> dict[str, str]:
    """What programs read, in both spellings. The sandbox's own addresses are reached without it."""
    own = "localhost,127.0.0.1,::1"
    named = {"HTTP_PROXY": address, "HTTPS_PROXY": address, "ALL_PROXY": address, "NO_PROXY": own}
    return {**named, **{name.lower(): value for name, value in named.items()}}
