"""Closed loops of calls against a process, and what they cost it."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httptools
import msgspec

from gateway.bodies import CHAT


def spent_by(pid: int) -> float:
    """CPU seconds of a process, to the system's tick."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Connection(asyncio.Protocol):
    """One request after another."""

    def __init__(self) -> None:
        self._answered: asyncio.Future[int] | None = None
        self.first_at: float | None = None
        self.received = bytearray()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(error or ConnectionError("closed"))

    def data_received(self, data: bytes) -> None:
        if b"\ndata: " in data and self.first_at is None:
            self.first_at = time.perf_counter()
        self.received += data
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        if self._answered is not None:
            self._answered.set_result(self._parser.get_status_code())

    async def ask(self, wire: bytes) -> bytes:
        self._parser = httptools.HttpResponseParser(self)
        self._answered = asyncio.get_running_loop().create_future()
        self.first_at, self.received = None, bytearray()
        self.transport.write(wire)
        status = await self._answered
        if status != 200:
            raise RuntimeError(bytes(self.received)[:2000].decode())
        return bytes(self.received)


def wire(url: str, body: bytes, secret: str) -> bytes:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: {url}\r\ncontent-type: application/json\r\n"
    return f"{head}authorization: Bearer {secret}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


@dataclass
class Load:
    """Of one run: milliseconds of each call."""

    wall_ms: list[float]
    first_ms: list[float]
    cpu_ms: float
    seconds: float


class Target:
    """A process under load. Without ``pid`` it says itself what it has spent."""

    def __init__(self, port: int, *, has_sessions: bool = False, pid: int | None = None) -> None:
        self.port = port
        self.has_sessions = has_sessions
        self._pid = pid

    async def cpu_s(self) -> float:
        """CPU seconds so far."""
        if self._pid is None:
            return float((await self.get("/bench/cpu"))["cpu_s"])
        return spent_by(self._pid)

    async def get(self, path: str) -> Any:
        url = f"http://127.0.0.1:{self.port}{path}"
        async with aiohttp.ClientSession() as client, client.get(url) as response:
            return msgspec.json.decode(await response.read())

    async def connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(Connection, "127.0.0.1", self.port)
        return made

    async def secrets(self, count: int) -> list[str]:
        found: list[str] = await self.get(f"/bench/sessions?{count}") if self.has_sessions else ["x"] * count
        return found

    async def load(self, bodies: list[bytes], connections: int, calls: int, per_session: int = 8) -> Load:
        """``bodies`` in turn, by closed loops; a session has ``per_session`` calls."""
        secrets = await self.secrets(-(-calls // per_session))
        wires = [
            wire(str(self.port), bodies[index % len(bodies)], secrets[index // per_session])
            for index in range(calls)
        ]
        waiting, wall, first = iter(wires), list[float](), list[float]()
        open_ones = [await self.connect() for _ in range(connections)]

        async def loop(connection: Connection) -> None:
            for each in waiting:
                begun = time.perf_counter()
                await connection.ask(each)
                wall.append((time.perf_counter() - begun) * 1e3)
                first.append(((connection.first_at or time.perf_counter()) - begun) * 1e3)

        before, begun = await self.cpu_s(), time.perf_counter()
        await asyncio.gather(*map(loop, open_ones))
        seconds = time.perf_counter() - begun
        used = await self.cpu_s() - before
        for each in open_ones:
            each.transport.close()
        return Load(wall, first, used * 1e3 / calls, seconds)
