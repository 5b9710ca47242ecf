"""Streams asked for in a wrong or unusual way, and requests of ten thousand tools, in every dialect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from rollserve.gateway.sessions import GatewaySession
from rollserve.records.call import Message

from .conftest import World, eventually
from .serving import PATIENT, of_session, serving

HI: list[Any] = [{"role": "user", "content": "hi"}]
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/chat/completions", {"messages": HI}),
    "responses": ("/responses", {"input": "hi"}),
    "messages": ("/messages", {"messages": HI, "max_tokens": 16}),
}
"""By a field of the body; Google's say it in the path."""


@pytest.fixture
async def served(world: World) -> AsyncIterator[World]:
    world.pool.script = world.says("first words, then more")
    async with serving(world):
        yield world


@pytest.fixture
async def session(served: World) -> GatewaySession:
    return await served.open()


@pytest.fixture
async def client(session: GatewaySession) -> AsyncIterator[httpx.AsyncClient]:
    async with of_session(session) as made:
        yield made


@pytest.mark.parametrize("stream", ["yes", 1, [True], {"on": True}])
@pytest.mark.parametrize("name", list(ASKED))
async def test_a_stream_that_is_no_boolean_is_named(
    client: httpx.AsyncClient, name: str, stream: Any
) -> None:
    path, body = ASKED[name]
    answer = await client.post(path, json=body | {"stream": stream})
    assert answer.status_code == 400
    assert "stream" in answer.json()["error"]["message"] + str(answer.json()["error"].get("param"))


@pytest.mark.parametrize("name", list(ASKED))
async def test_the_body_says_whether_it_streams_and_not_the_header(
    client: httpx.AsyncClient, name: str
) -> None:
    path, body = ASKED[name]
    for accepts, streams in (("application/json", True), ("text/event-stream", False)):
        answer = await client.post(path, json=body | {"stream": streams}, headers={"accept": accepts})
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream") == streams


async def test_a_stream_is_not_taken_up_where_it_broke_off(
    client: httpx.AsyncClient, session: GatewaySession
) -> None:
    """As browsers' event sources try, by GET; a POST with their header is a request like any other."""
    again = {"last-event-id": "7", "accept": "text/event-stream"}
    assert (await client.get("/chat/completions", headers=again)).status_code == 405
    answer = await client.post("/chat/completions", json={"messages": HI, "stream": True}, headers=again)
    assert answer.text.endswith("data: [DONE]\n\n")
    assert len(session.call_ids) == 1


async def test_a_client_that_reads_nothing_of_its_stream_holds_up_nobody(
    served: World, session: GatewaySession
) -> None:
    """Its answer fills all buffers on the way; the call is recorded all the same, and others are answered."""
    served.pool.script = served.says("word " * 4000)
    place = urlsplit(session.base_url)
    _, writer = await asyncio.open_connection(place.hostname, place.port, limit=1)
    data = json.dumps({"messages": HI, "stream": True, "logprobs": True}).encode()
    head = f"POST {place.path}/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n"
    writer.write(f"{head}authorization: Bearer {session.secret}\r\n\r\n".encode() + data)
    await eventually(lambda: session.call_ids)
    other = await served.open()
    served.pool.script = served.says("ok")
    async with of_session(other) as client:
        answer = await client.post("/chat/completions", json={"messages": HI})
    assert answer.status_code == 200
    await session.close()
    writer.close()


def tools_of(name: str, count: int) -> Any:
    names = [f"tool_{index}" for index in range(count)]
    if name == "chat":
        return [{"type": "function", "function": {"name": each}} for each in names]
    if name == "responses":
        return [{"type": "function", "name": each} for each in names]
    return [{"name": each, "input_schema": {}} for each in names]


@pytest.mark.parametrize("name", list(ASKED))
async def test_ten_thousand_tools_are_sent_or_are_too_long(world: World, name: str) -> None:
    path, body = ASKED[name]
    async with serving(world, PATIENT), of_session(await world.open()) as client:
        answer = await client.post(path, json=body | {"tools": tools_of(name, 10_000)})
        assert answer.status_code == 200, answer.text
        (call,) = world.segments[0].calls
        assert call.tools is not None
        assert len(call.tools) == 10_000
        world.view(context_tokens=1000)
        refused = await client.post(path, json=body | {"tools": tools_of(name, 10_001)})
    assert refused.status_code == 400
    assert len(world.segments[0].calls) == 1


async def test_ten_thousand_tools_of_an_agent_in_the_worker(world: World) -> None:
    session = await world.open()
    await session.model.chat([Message(role="user", content="hi")], tools=tools_of("chat", 10_000))
    (call,) = world.segments[0].calls
    assert call.tools is not None
    assert len(call.tools) == 10_000
