"""What a session holds is freed with it. A long episode is many thousand ids: were it part of a circle,
all ended episodes would pile up until the collector looks through everything."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from rollserve.backend.base import GenerateRequest, Generation
from rollserve.errors import RollserveError
from rollserve.gateway.http import make_app
from rollserve.gateway.sessions import GatewaySession
from rollserve.gateway.tree import Tree
from rollserve.records.call import Message

from .conftest import World, eventually

USER = Message(role="user", content="hi")


async def ask(session: GatewaySession, *messages: Message) -> None:
    with suppress(RollserveError):
        await session.model.chat(messages)


async def two_turns(world: World) -> GatewaySession:
    session = await world.open()
    first = await session.model.chat([USER])
    await ask(session, USER, first.message, USER)
    await ask(session, USER, first.message, USER)
    assert session.counts["turns"] == 3
    return session


async def out_of_turns(world: World) -> GatewaySession:
    session = await world.open(limits={"max_turns": 1})
    await ask(session, USER)
    await ask(session, USER)
    assert session.trouble is not None
    return session


async def over_its_context(world: World) -> GatewaySession:
    world.view(context_tokens=3)
    session = await world.open()
    await ask(session, USER)
    assert session.trouble is not None
    return session


async def a_full_disk(world: World) -> GatewaySession:
    session = await world.open()
    world.segments[-1].broken = OSError("no space")
    await ask(session, USER)
    assert session.trouble is not None
    return session


async def a_bug(world: World) -> GatewaySession:
    def broken(request: GenerateRequest) -> Generation:
        raise RuntimeError(request.request_id)

    world.pool.script = broken
    session = await world.open()
    await ask(session, USER)
    assert session.trouble is not None
    return session


async def a_refused_request(world: World) -> GatewaySession:
    session = await world.open()
    await ask(session)
    assert session.trouble is None
    return session


async def closed_during_a_call(world: World) -> GatewaySession:
    world.pool.gate = asyncio.Event()
    session = await world.open()
    asking = asyncio.create_task(ask(session, USER))
    await world.pool.started.wait()
    await session.close()
    await asking
    return session


async def over_http(world: World, **body: Any) -> GatewaySession:
    """One turn that does not fit, one that is served, one that the limit refuses."""
    session = await world.open(limits={"max_turns": 1})
    document = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **body}
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": [(b"authorization", f"Bearer {session.secret}".encode())],
    }
    statuses = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    for context_tokens in (3, None, None):
        world.view(context_tokens=context_tokens)
        parts = [{"type": "http.request", "body": msgspec.json.encode(document)}]

        async def receive(parts: list[dict[str, Any]] = parts) -> dict[str, Any]:
            if not parts:
                await asyncio.Event().wait()
            return parts.pop()

        await make_app(world.service)(scope, receive, send)
    assert statuses == [400, 200, 400]
    return session


async def over_http_streaming(world: World) -> GatewaySession:
    return await over_http(world, stream=True)


@pytest.mark.parametrize(
    "live",
    [
        two_turns,
        out_of_turns,
        over_its_context,
        a_full_disk,
        a_bug,
        a_refused_request,
        closed_during_a_call,
        over_http,
        over_http_streaming,
    ],
)
@pytest.mark.usefixtures("no_collector")
async def test_an_ended_session_is_freed_without_the_collector(
    world: World, live: Callable[[World], Awaitable[GatewaySession]]
) -> None:
    session = await live(world)
    await session.close()
    parts: list[weakref.ref[Any]] = [weakref.ref(session), weakref.ref(session.conversation_state)]
    del session
    await asyncio.sleep(0)
    assert all(part() is None for part in parts)


class Tool(dict[str, Any]):
    """A tool's schema that can be asked whether it is still there."""


@pytest.mark.usefixtures("no_collector")
def test_the_calls_of_a_tree_are_freed_without_the_collector() -> None:
    tree, tool = Tree(), Tool(type="function")
    given: list[Message] = [USER]
    for turn in range(3):
        match = tree.match(given, (tool,))
        reply = Message(role="assistant", content=str(turn))
        tree.add(match, call_id=str(turn), reply=reply, tools=(tool,), prompt_ids=b"", sampled_ids=b"")
        given += [reply, USER]
    assert tree.newest is not None
    assert len(tree.newest.path()) == 3
    held = weakref.ref(tool)
    del tree, tool, match
    assert held() is None


class Stubborn(asyncio.Event):
    """Waits on through its first cancel, until ``relent`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.relent = asyncio.Event()

    async def wait(self) -> Any:
        try:
            await super().wait()
        except asyncio.CancelledError:
            await self.relent.wait()
            raise


async def test_a_close_that_was_cut_short_is_done_by_the_next(world: World) -> None:
    gate = world.pool.gate = Stubborn()
    session = await world.open()
    asking = asyncio.create_task(ask(session, USER))
    await world.pool.started.wait()
    closing = asyncio.create_task(session.close())
    await eventually(lambda: session.ended)
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    assert world.pool.released == []
    gate.relent.set()
    await session.close()
    await asking
    assert world.pool.released == [session.id]
    assert world.service.stats()["sessions"] == 0
