"""The bound on calls in flight, over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx

from rollserve.build.http import HttpServer, bind, url_of
from rollserve.gateway import http
from rollserve.gateway.asgi import ASGIApp, Receive, Scope, Send
from rollserve.gateway.bound import bounded

from .conftest import World

MOST = 3


def held(go: asyncio.Event, begun: asyncio.Semaphore) -> ASGIApp:
    """Answers at once on ``/healthz``, elsewhere after ``go``."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != "/healthz":
            begun.release()
            await go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    return app


async def test_one_call_too_many_meets_503_and_never_429() -> None:
    go, begun = asyncio.Event(), asyncio.Semaphore(0)
    app: Any = bounded(held(go, begun), MOST)
    sock = bind("127.0.0.1", 0)
    server = HttpServer(app, sock)
    await server.start()
    async with httpx.AsyncClient(base_url=url_of(sock), timeout=30) as client:
        calls = [asyncio.create_task(client.post("/v1/chat/completions")) for _ in range(MOST)]
        for _ in calls:
            await begun.acquire()
        refused = await client.post("/s/ses_1/v1/chat/completions", content=b"x" * (4 << 20))
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("overloaded_error", "unavailable")
        assert (await client.get("/healthz")).text == "ok"
        go.set()
        assert [answer.status_code for answer in await asyncio.gather(*calls)] == [200] * MOST
        assert (await client.post("/v1/chat/completions")).status_code == 200
    await server.stop()


async def test_half_a_body_does_not_hold_its_place_for_ever(
    world: World,
) -> None:
    session = await world.open()
    app: Any = bounded(http.make_app(world.service), 1)
    sock = bind("127.0.0.1", 0)
    server = HttpServer(app, sock)
    await server.start()

    async def half() -> AsyncIterator[bytes]:
        yield b'{"messages": ['
        await asyncio.Event().wait()

    headers = {"authorization": f"Bearer {session.secret}"}
    async with httpx.AsyncClient(base_url=url_of(sock), headers=headers, timeout=30) as client:
        sending = asyncio.create_task(client.post("/v1/chat/completions", content=half()))

        async def free() -> bool:
            return (await client.get("/v1/models")).status_code == 200

        async with asyncio.timeout(20):
            while not await free():
                await asyncio.sleep(0.01)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    await server.stop()
