"""A receiver of callbacks on a real socket, that answers as a test wants. Signatures are checked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from rollserve.errors import Unauthenticated
from rollserve.webhooks import ID_HEADER, new_secret, verify

Answer = Callable[["Received"], int]


@dataclass(frozen=True)
class Received:
    """``id`` is what the headers say, ``number`` how many came before."""

    id: str
    type: str
    data: dict[str, Any]
    headers: dict[str, str]
    raw: bytes
    number: int

    @property
    def group_id(self) -> str:
        return str(self.data["delivery"]["groups"][0]["group"]["id"])

    @property
    def lease_id(self) -> str:
        return str(self.data["delivery"]["lease"]["id"])


@dataclass
class CallbackReceiver:
    """``answer`` gives the status of each answer, ``headers`` go with it. ``let`` holds answers back while
    it is not set."""

    secret: str = field(default_factory=new_secret)
    answer: Answer = lambda _: 204
    headers: dict[str, str] = field(default_factory=dict)
    url: str = ""
    received: list[Received] = field(default_factory=list)
    forged: int = 0
    most_at_once: int = 0
    let: asyncio.Event = field(default_factory=asyncio.Event)
    _at_once: int = 0

    @property
    def group_ids(self) -> list[str]:
        return [each.group_id for each in self.received if each.type == "group.finished"]

    async def handle(self, request: web.Request) -> web.Response:
        raw = await request.read()
        try:
            verify(self.secret, request.headers, raw)
        except Unauthenticated:
            self.forged += 1
            return web.Response(status=401)
        body = msgspec.json.decode(raw)
        headers = {name.lower(): value for name, value in request.headers.items()}
        one = Received(headers[ID_HEADER], body["type"], body["data"], headers, raw, len(self.received))
        self.received.append(one)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            await self.let.wait()
        finally:
            self._at_once -= 1
        return web.Response(status=self.answer(one), headers=self.headers)


@asynccontextmanager
async def a_receiver(port: int = 0) -> AsyncIterator[CallbackReceiver]:
    receiver = CallbackReceiver()
    receiver.let.set()
    app = web.Application(client_max_size=256 << 20)
    app.router.add_post("/hook", receiver.handle)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
    try:
        yield receiver
    finally:
        receiver.let.set()
        await runner.cleanup()
