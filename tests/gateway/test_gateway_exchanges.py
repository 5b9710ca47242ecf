"""The same request again: joined, replayed, or a new sibling (promise 10), over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import httpx
import pytest

from rollserve.backend.base import GenerateRequest, Generation
from rollserve.backend.pool import BackendPool
from rollserve.build.http import HttpServer, bind, url_of
from rollserve.errors import BackendUnavailable
from rollserve.gateway.base import Ending
from rollserve.gateway.exchanges import KEPT_ARRIVED, MOST_LEFT
from rollserve.gateway.sending import Waits
from rollserve.gateway.service import GatewayService
from rollserve.gateway.sessions import GatewaySession
from rollserve.testing.scripted import ScriptedEngine
from rollserve.testing.scripted_server import ScriptedApp

from .conftest import World, eventually
from .serving import PATIENT, of_session, serving

HI: list[Any] = [{"role": "user", "content": "hi"}]
PATH = "/chat/completions"
STREAM = {"messages": HI, "stream": True}
WHOLE = {"messages": HI}
RETRY = {"x-stainless-retry-count": "1"}


@pytest.fixture
async def served(world: World) -> AsyncIterator[World]:
    async with serving(world, PATIENT):
        yield world


@pytest.fixture
async def session(served: World) -> GatewaySession:
    return await served.open()


@pytest.fixture
async def client(session: GatewaySession) -> AsyncIterator[httpx.AsyncClient]:
    async with of_session(session) as made:
        yield made


def calls(world: World) -> int:
    return len(world.segments[0].calls)


async def text_of(response: httpx.Response) -> str:
    return "".join([part async for part in response.aiter_text()])


def said(text: str) -> str:
    """The content of a stream of chunks."""
    found = [line.partition('"content":"')[2].partition('"')[0] for line in text.splitlines()]
    return "".join(found)


async def drop_after(session: GatewaySession, body: dict[str, Any], seen: str) -> None:
    """Read a stream until ``seen`` is in it, and close the connection."""
    async with of_session(session) as one, one.stream("POST", PATH, json=body) as response:
        text = ""
        async for part in response.aiter_text():
            text += part
            if seen in text:
                return


async def test_what_a_client_says_of_itself_makes_no_other_request(
    served: World, session: GatewaySession
) -> None:
    """Codex writes its metadata in another order each time."""
    served.pool.gate = asyncio.Event()
    first = {"input": HI, "client_metadata": {"a": "1", "b": "2"}}
    again = {"client_metadata": {"b": "2", "a": "1"}, "input": HI}
    async with of_session(session) as one:
        asking = asyncio.create_task(one.post("/responses", json=first))
        await served.pool.started.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await eventually(lambda: session.exchanges.left)
    served.pool.gate.set()
    async with of_session(session) as one:
        assert (await one.post("/responses", json=again)).status_code == 200
        assert calls(served) == 1
        other = {**again, "input": [{"role": "user", "content": "ho"}]}
        assert (await one.post("/responses", json=other)).status_code == 200
    assert calls(served) == 2


async def give_up(world: World, session: GatewaySession, body: dict[str, Any]) -> None:
    """Ask, and close the connection once the generation runs."""
    world.pool.started.clear()
    async with of_session(session) as one:
        asking = asyncio.create_task(one.post(PATH, json=body))
        await world.pool.started.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await eventually(lambda: session.exchanges.left)


# -- joined


async def test_a_request_that_comes_back_joins_its_stream(
    served: World, session: GatewaySession, client: httpx.AsyncClient
) -> None:
    """What was let out is sent again, then it goes on."""
    served.pool.script = served.says("one two three")
    go = asyncio.Event()

    async def pace(index: int) -> None:
        if index == 4:
            await go.wait()

    served.pool.pace = pace
    await drop_after(session, STREAM, '"content":"o')
    await eventually(lambda: session.exchanges.left)
    async with client.stream("POST", PATH, json=STREAM) as response:
        go.set()
        again = await text_of(response)
    assert said(again) == "one two three"
    assert (calls(served), len(served.pool.requests), served.pool.aborted) == (1, 1, [])
    assert f"chatcmpl-{session.call_ids[0]}" in again


async def test_a_request_that_comes_back_waits_for_its_whole_answer(
    served: World, session: GatewaySession, client: httpx.AsyncClient
) -> None:
    served.pool.gate = asyncio.Event()
    await give_up(served, session, WHOLE)
    again = asyncio.create_task(client.post(PATH, json=WHOLE))
    await eventually(lambda: not session.exchanges.left)
    served.pool.gate.set()
    assert (await again).json()["choices"][0]["message"]["content"] == "ok"
    assert (calls(served), len(served.pool.requests)) == (1, 1)


async def test_only_the_same_bytes_to_the_same_path_are_the_same(
    served: World, session: GatewaySession, client: httpx.AsyncClient
) -> None:
    served.pool.gate = asyncio.Event()
    await give_up(served, session, WHOLE)
    served.pool.gate.set()
    await eventually(lambda: calls(served) == 1)
    assert (await client.post(PATH, json={**WHOLE, "user": "x"})).status_code == 200
    other = await client.post(f"{PATH}?beta=true", json=WHOLE)
    assert other.status_code == 200
    assert calls(served) == 3


async def test_of_two_orphans_each_is_joined_once(
    served: World, session: GatewaySession, client: httpx.AsyncClient
) -> None:
    served.pool.gate = asyncio.Event()
    first = asyncio.create_task(client.post(PATH, json=WHOLE))
    await served.pool.started.wait()
    await give_up(served, session, WHOLE)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await eventually(lambda: len(session.exchanges.left) == 2)
    again = [asyncio.create_task(client.post(PATH, json=WHOLE)) for _ in range(3)]
    await eventually(lambda: len(served.pool.requests) == 3)
    served.pool.gate.set()
    ids = {answer.json()["id"] for answer in await asyncio.gather(*again)}
    assert len(ids) == calls(served) == 3


# -- replayed


@pytest.mark.parametrize("body", [STREAM, WHOLE])
async def test_an_answer_that_nobody_got_is_replayed(
    served: World, session: GatewaySession, client: httpx.AsyncClient, body: dict[str, Any]
) -> None:
    served.pool.gate = asyncio.Event()
    await give_up(served, session, body)
    served.pool.gate.set()
    await eventually(lambda: calls(served) == 1)
    again = (await client.post(PATH, json=body)).text
    assert session.call_ids[0] in again
    assert (calls(served), len(served.pool.requests)) == (1, 1)
    assert session.call_ids[0] not in (await client.post(PATH, json=body)).text
    assert calls(served) == 2


async def test_an_error_that_nobody_got_is_replayed_once(
    served: World, session: GatewaySession, client: httpx.AsyncClient
) -> None:
    served.pool.gate = asyncio.Event()
    await give_up(served, session, WHOLE)

    def broken(request: GenerateRequest) -> Generation:
        raise BackendUnavailable("nothing answers")

    served.pool.script = broken
    served.pool.gate.set()
    await eventually(lambda: session.trouble)
    served.pool.script = served.says("ok")
    assert (await client.post(PATH, json=WHOLE)).status_code == 503
    assert (await client.post(PATH, json=WHOLE, headers=RETRY)).status_code == 200
    assert len(served.pool.requests) == 2


async def test_a_retry_marker_replays_what_has_arrived(
    served: World, session: GatewaySession, client: httpx.AsyncClient
) -> None:
    first = (await client.post(PATH, json=WHOLE)).json()
    assert (await client.post(PATH, json=WHOLE, headers=RETRY)).json() == first
    assert calls(served) == 1
    zero = {"x-stainless-retry-count": "0"}
    assert (await client.post(PATH, json=WHOLE, headers=zero)).json()["id"] != first["id"]
    for number in range(KEPT_ARRIVED):
        await client.post(PATH, json={**WHOLE, "user": str(number)})
    assert (await client.post(PATH, json=WHOLE, headers=RETRY)).json()["id"] != first["id"]


async def test_a_retry_after_an_error_is_a_new_try(
    served: World, session: GatewaySession, client: httpx.AsyncClient
) -> None:
    """Though an earlier request of the same bytes was answered."""
    first = (await client.post(PATH, json=WHOLE)).json()

    def broken(request: GenerateRequest) -> Generation:
        raise BackendUnavailable("nothing answers")

    served.pool.script = broken
    assert (await client.post(PATH, json=WHOLE)).status_code == 503
    served.pool.script = served.says("ok")
    assert (await client.post(PATH, json=WHOLE, headers=RETRY)).json()["id"] != first["id"]


# -- a new sibling


async def test_the_same_after_its_answer_has_arrived_is_a_sibling(
    served: World, client: httpx.AsyncClient
) -> None:
    """Qwen Code asks again on purpose."""
    ids = {(await client.post(PATH, json=body)).text for body in (WHOLE, WHOLE, STREAM, STREAM)}
    assert len(ids) == calls(served) == 4
    assert [call.parent for call in served.segments[0].calls] == [None] * 4


async def test_the_same_on_two_live_connections_is_a_sibling(
    served: World, client: httpx.AsyncClient
) -> None:
    served.pool.gate = asyncio.Event()
    asking = [asyncio.create_task(client.post(PATH, json=WHOLE)) for _ in range(2)]
    await eventually(lambda: len(served.pool.requests) == 2)
    served.pool.gate.set()
    assert len({answer.json()["id"] for answer in await asyncio.gather(*asking)}) == 2


@pytest.mark.parametrize("retried", [False, True])
async def test_a_client_that_sends_again_before_it_hangs_up(
    served: World, session: GatewaySession, retried: bool
) -> None:
    """One that waited for long, or says that it tries again, means the same request."""
    served.pool.gate = asyncio.Event()
    one, other = of_session(session), of_session(session, **(RETRY if retried else {}))
    first = asyncio.create_task(one.post(PATH, json=WHOLE))
    await served.pool.started.wait()
    (exchange,) = session.exchanges.open
    (bell,) = exchange.bells
    if not retried:
        exchange.begun_at -= 60
    second = asyncio.create_task(other.post(PATH, json=WHOLE))
    if not retried:
        await asyncio.sleep(0.05)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await eventually(lambda: len(exchange.bells) == 1 and bell not in exchange.bells)
    served.pool.gate.set()
    assert (await second).status_code == 200
    assert (calls(served), len(served.pool.requests)) == (1, 1)
    await one.aclose()
    await other.aclose()


# -- how long it goes on


@pytest.mark.parametrize("body", [STREAM, WHOLE])
async def test_after_its_grace_a_generation_is_aborted(world: World, body: dict[str, Any]) -> None:
    async with serving(world, Waits(grace_s=0.01)):
        session = await world.open()
        world.pool.gate = asyncio.Event()
        async with of_session(session) as one:
            asking = asyncio.create_task(one.post(PATH, json=body))
            await world.pool.started.wait()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await eventually(lambda: world.pool.aborted)
        await eventually(lambda: not world.service.stats()["in_flight"])
        assert world.segments[0].calls == []
        assert list(session.exchanges.open) == []


async def test_the_end_of_the_attempt_aborts_at_once(served: World, session: GatewaySession) -> None:
    """With a grace of ten minutes."""
    served.pool.gate = asyncio.Event()
    await give_up(served, session, STREAM)
    assert served.pool.aborted == []
    await session.close(Ending.CANCELLED)
    assert len(served.pool.aborted) == 1


@pytest.mark.parametrize("body", [STREAM, WHOLE])
async def test_the_engine_has_stopped_when_the_session_has_closed(world: World, body: dict[str, Any]) -> None:
    """Over the engine's own HTTP route, where it must be told."""
    engine = ScriptedEngine(model="tiny")
    engine.gate.clear()
    sock = bind("127.0.0.1", 0)
    server = HttpServer(ScriptedApp(engine), sock)
    await server.start()
    service = GatewayService(lambda policy: BackendPool(model="tiny"))
    world.service, world.url = service, url_of(sock)
    world.view()
    async with serving(world, PATIENT):
        session = await world.open()
        async with of_session(session) as one:
            asking = asyncio.create_task(one.post(PATH, json=body))
            await eventually(lambda: engine.running)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await eventually(lambda: session.exchanges.left)
        assert (len(engine.running), engine.aborted) == (1, 0)
        await session.close(Ending.CANCELLED)
        await eventually(lambda: not engine.running)
        assert (engine.aborted, engine.finished) == (1, 0)
    await server.stop()


async def test_what_nobody_listens_to_is_bounded(served: World) -> None:
    session = await served.open(limits={"max_turns": 1000})
    served.pool.gate = asyncio.Event()
    for number in range(MOST_LEFT + 2):
        await give_up(served, session, {**WHOLE, "user": str(number)})
        await eventually(partial(_left, session, min(number + 1, MOST_LEFT)))
    await eventually(lambda: len(served.pool.aborted) == 2)
    assert len(session.exchanges.left) == MOST_LEFT


def _left(session: GatewaySession, number: int) -> bool:
    return len(session.exchanges.left) >= number


async def test_what_is_kept_of_an_answered_request_is_not_its_messages(
    session: GatewaySession, client: httpx.AsyncClient
) -> None:
    whole = await client.post(PATH, json=WHOLE)
    (kept,) = session.exchanges._arrived
    assert kept.asked.request.messages == ()
    again = await client.post(PATH, json=WHOLE, headers=RETRY)
    assert again.content == whole.content
