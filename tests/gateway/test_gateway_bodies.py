"""Bodies that are being read: what one agent holds, and all of them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from rollserve.errors import Unavailable
from rollserve.gateway.asgi import Gone
from rollserve.gateway.bodies import OF_A_SESSION, OF_ALL, Bodies
from rollserve.gateway.sessions import GatewaySession

from .conftest import World
from .serving import of_session, serving

MOST = 100
HEADERS: dict[str, str] = {}
HI = {"messages": [{"role": "user", "content": "hi"}]}


def whole(size_bytes: int) -> Any:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"x" * size_bytes, "more_body": False}

    return receive


async def gone() -> dict[str, Any]:
    return {"type": "http.disconnect"}


async def test_a_session_holds_a_part_of_what_all_may() -> None:
    bodies = Bodies(MOST, 10)
    async with AsyncExitStack() as held:
        for _ in range(OF_A_SESSION):
            assert len(await held.enter_async_context(bodies.read("a", HEADERS, whole(MOST)))) == MOST
        with pytest.raises(Unavailable, match="too many large requests"):
            await held.enter_async_context(bodies.read("a", HEADERS, whole(1)))
        for name in "bcdefghi"[: OF_ALL - OF_A_SESSION]:
            await held.enter_async_context(bodies.read(name, HEADERS, whole(MOST)))
        with pytest.raises(Unavailable, match="too many large requests"):
            await held.enter_async_context(bodies.read("z", HEADERS, whole(1)))
    assert bodies.held_bytes == 0
    async with bodies.read("a", HEADERS, whole(MOST)) as body:
        assert bodies.held_bytes == len(body)


async def test_what_a_client_that_left_had_sent_is_given_back() -> None:
    bodies = Bodies(MOST, 10)
    parts = iter([{"type": "http.request", "body": b"x" * 60, "more_body": True}, await gone()])

    async def receive() -> dict[str, Any]:
        return next(parts)

    with pytest.raises(Gone):
        async with bodies.read("a", HEADERS, receive):
            raise AssertionError
    assert bodies.held_bytes == 0


async def test_slow_large_bodies_of_one_agent_take_no_other_agents_place(world: World) -> None:
    """Over a real socket; the largest body is 1 MB."""
    async with serving(world) as url:
        slow, other = await world.open(), await world.open()
        sending = [await _half(url, slow) for _ in range(3)]
        answers = [asyncio.create_task(reader.readline()) for reader, _ in sending]
        done, _ = await asyncio.wait(answers, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result() for task in done] == [b"HTTP/1.1 503 Service Unavailable\r\n"]
        async with of_session(other) as others:
            assert (await others.post("/chat/completions", json=HI)).status_code == 200
        for _, writer in sending:
            writer.close()
        await asyncio.gather(*answers)
        async with of_session(slow) as own, asyncio.timeout(20):
            while (await own.post("/chat/completions", content=b"x" * 900_000)).status_code != 400:
                await asyncio.sleep(0.01)


async def _half(url: str, session: GatewaySession) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request of the session's, most of whose body has been sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    head = [f"POST /s/{session.id}/v1/chat/completions HTTP/1.1", "Host: gateway"]
    head += [f"Authorization: Bearer {session.secret}", "Content-Length: 1000000", "", ""]
    writer.write("\r\n".join(head).encode() + b"x" * 900_000)
    await writer.drain()
    return reader, writer
