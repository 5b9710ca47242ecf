"""Connections that send no request, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from rollserve.build.connections import IdleBounds
from rollserve.build.http import HttpServer, bind, idle_bounds

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
PATIENT = IdleBounds(head_s=600.0)
HASTY = IdleBounds(head_s=0.05)
BRISK = IdleBounds(head_s=0.5)
"""What is sent at once after connecting is in time, on a machine that is busy too."""
WITHIN_S = 20.0


@dataclass
class App:
    """Answers ``ok``; ``/held`` once ``go`` is set. Reads no body."""

    go: asyncio.Event = field(default_factory=asyncio.Event)
    held: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/held":
            self.held += 1
            await self.go.wait()
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})


@dataclass
class Peer:
    """A connection of a client."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> bytes:
        async with asyncio.timeout(WITHIN_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            return head + await self.reader.readexactly(2)

    async def closed(self) -> bytes:
        """What came before the end."""
        try:
            async with asyncio.timeout(WITHIN_S):
                return await self.reader.read()
        except ConnectionError:
            return b""


class Site:
    def __init__(self, app: App, port: int) -> None:
        self.app = app
        self._port = port
        self._peers: list[Peer] = []

    async def peer(self) -> Peer:
        peer = Peer(*await asyncio.open_connection("127.0.0.1", self._port))
        self._peers.append(peer)
        return peer

    async def close(self) -> None:
        for peer in self._peers:
            peer.writer.close()
            await asyncio.gather(peer.writer.wait_closed(), return_exceptions=True)


@asynccontextmanager
async def serving(bounds: IdleBounds) -> AsyncIterator[Site]:
    app: Any = App()
    sock = bind("127.0.0.1", 0)
    server = HttpServer(app, sock, idle=bounds)
    await server.start()
    site = Site(app, sock.getsockname()[1])
    try:
        yield site
    finally:
        app.go.set()
        await site.close()
        await server.stop()


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n", b"\r\n"])
async def test_a_connection_without_a_whole_head_is_closed(sent: bytes) -> None:
    async with serving(HASTY) as site:
        peer = await site.peer()
        await peer.send(sent)
        assert await peer.closed() == b""


async def test_a_byte_now_and_then_is_no_request() -> None:
    async with serving(HASTY) as site:
        peer = await site.peer()

        async def dribble() -> None:
            while True:
                await peer.send(b"X-A: b\r\n")
                await asyncio.sleep(0.005)

        await peer.send(GET[:-2])
        dribbling = asyncio.create_task(dribble())
        assert await peer.closed() == b""
        dribbling.cancel()
        await asyncio.gather(dribbling, return_exceptions=True)


@pytest.mark.parametrize("sent", [b"GET /again", b"\r\n"])
async def test_half_a_second_request_is_closed_too(sent: bytes) -> None:
    async with serving(BRISK) as site:
        peer = await site.peer()
        await peer.send(GET)
        assert (await peer.answer()).endswith(b"ok")
        await peer.send(sent)
        assert await peer.closed() == b""


async def test_a_body_that_was_answered_before_its_end_must_end() -> None:
    async with serving(BRISK) as site:
        peer = await site.peer()
        await peer.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nbegun")
        assert (await peer.answer()).endswith(b"ok")
        assert await peer.closed() == b""


async def test_who_waits_for_an_answer_or_rests_between_two_requests_is_left_alone() -> None:
    async with serving(BRISK) as site:
        rests = await site.peer()
        await rests.send(GET)
        await rests.answer()
        waits = await site.peer()
        await waits.send(GET.replace(b"/ ", b"/held ", 1))
        for _ in range(2):  # deadlines go by
            assert await (await site.peer()).closed() == b""
        await rests.send(GET)
        assert (await rests.answer()).endswith(b"ok")
        site.app.go.set()
        assert (await waits.answer()).endswith(b"ok")


async def test_one_idle_connection_too_many_takes_the_place_of_the_oldest() -> None:
    async with serving(IdleBounds(head_s=600.0, connections=2)) as site:
        busy = await site.peer()
        await busy.send(GET.replace(b"/ ", b"/held ", 1))
        async with asyncio.timeout(WITHIN_S):
            while not site.app.held:
                await asyncio.sleep(0.002)
        peers = [await site.peer() for _ in range(3)]
        assert await peers[0].closed() == b""
        for peer in peers[1:]:
            await peer.send(GET)
            assert (await peer.answer()).endswith(b"ok")
        site.app.go.set()
        assert (await busy.answer()).endswith(b"ok")


async def test_a_flood_of_silent_connections_does_not_keep_others_out() -> None:
    async with serving(IdleBounds(head_s=600.0, connections=10)) as site:
        silent = [await site.peer() for _ in range(60)]
        peer = await site.peer()
        await peer.send(GET)
        assert (await peer.answer()).endswith(b"ok")
        for gone in silent[:50]:
            assert await gone.closed() == b""


async def test_a_head_without_end_is_refused() -> None:
    async with serving(IdleBounds(head_s=600.0, head_bytes=4096)) as site:
        peer = await site.peer()
        await peer.send(GET[:-2] + b"X-A: b\r\n" * 2000)
        assert (await peer.closed()).startswith(b"HTTP/1.1 400 ")


async def test_requests_sent_ahead_are_answered_in_turn() -> None:
    async with serving(PATIENT) as site:
        peer = await site.peer()
        await peer.send(GET * 3)
        for _ in range(3):
            assert (await peer.answer()).endswith(b"ok")


def test_idle_connections_leave_files_to_others() -> None:
    assert 0 < idle_bounds().connections <= IdleBounds.connections
