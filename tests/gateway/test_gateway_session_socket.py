"""The gateway as one sandbox sees it: the way to its session and to nothing else, over real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from rollserve.build.session_sockets import session_sockets
from rollserve.gateway.http import make_app
from rollserve.gateway.sessions import GatewaySession

from .conftest import World, eventually

HI = {"messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def served(world: World, session: GatewaySession) -> AsyncIterator[str]:
    sock = socket.create_server(("127.0.0.1", 0))
    async with session_sockets(make_app(world.service))(session, sock) as url:
        yield url
    assert sock.fileno() == -1


async def ask(url: str, secret: str) -> httpx.Response:
    async with httpx.AsyncClient(verify=False, timeout=30) as client:
        headers = {"authorization": f"Bearer {secret}"}
        return await client.post(f"{url}/chat/completions", json=HI, headers=headers)


async def test_a_way_whose_sandbox_was_closed_accepts_no_more(world: World) -> None:
    session = await world.open()
    sock = socket.create_server(("127.0.0.1", 0))
    async with session_sockets(make_app(world.service))(session, sock):
        (accepting,) = (
            task for task in asyncio.all_tasks() if task.get_name() == f"session-socket-{session.id}"
        )
        await asyncio.sleep(0)
        sock.shutdown(socket.SHUT_RDWR)  # as closing the sandbox does
        async with asyncio.timeout(20):
            await accepting


async def test_the_session_is_served_with_and_without_its_prefix(world: World) -> None:
    session = await world.open()
    async with served(world, session) as url:
        assert url.endswith(f"/s/{session.id}/v1")
        for address in (url, f"{url.partition('/s/')[0]}/v1"):
            answer = await ask(address, session.secret)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"]["content"] == "ok"
    assert len(session.call_ids) == 2


async def test_no_other_session_is(world: World) -> None:
    session, other = await world.open(), await world.open()
    async with served(world, session) as url:
        plain = url.partition("/s/")[0]
        for address in (url, f"{plain}/v1", f"{plain}/s/{other.id}/v1"):
            answer = await ask(address, other.secret)
            assert answer.status_code == 403, answer.text
        assert (await ask(url, "nobody's")).status_code == 401
    assert other.call_ids == []


async def test_leaving_ends_it_with_its_connections(world: World) -> None:
    world.pool.gate = asyncio.Event()
    session = await world.open()
    async with served(world, session) as url:
        asking = asyncio.create_task(ask(url, session.secret))
        await eventually(lambda: world.pool.requests != [])
        idle = await asyncio.open_connection("127.0.0.1", int(url.split(":")[2].partition("/")[0]))
        await session.close()
    answer = await asking
    assert answer.status_code == 400
    assert await idle[0].read() == b""
    idle[1].close()
    with pytest.raises(httpx.ConnectError):
        await ask(url, session.secret)
