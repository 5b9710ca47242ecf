"""A session: its waits, its ends, its secret, and what goes wrong in its calls."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollserve.backend.base import GenerateRequest, Generation
from rollserve.errors import (
    AnothersSession,
    BackendError,
    BackendUnavailable,
    InfrastructureFailure,
    LimitReached,
    SessionClosed,
    UnknownSecret,
)
from rollserve.gateway.base import Ending
from rollserve.gateway.tokens import TextTokenizer
from rollserve.records.call import Message, VersionSpan
from rollserve.records.policy import RendererSpec

from .conftest import World, eventually

USER = Message(role="user", content="hi")


@pytest.mark.parametrize("held", [{"paused": True}, {"active": False}])
async def test_calls_wait_uncharged_while_the_policy_cant_serve(world: World, held: dict[str, Any]) -> None:
    session = await world.open()
    world.view(**held)
    call = asyncio.create_task(session.model.chat([USER]))
    await eventually(lambda: world.clock.now)
    assert world.service.stats()["waiting"] == 1
    assert not world.pool.requests
    world.view(version=4)
    await call
    assert world.clock.now == 0
    assert world.pool.requests[0].cache_salt == "p:4.0"
    assert world.pool.requests[0].session_id == session.id
    assert world.segments[0].calls[0].versions == (VersionSpan(0, len(world.ids("ok")), 4, 4, True),)


async def test_a_call_that_does_not_wait_is_charged(world: World) -> None:
    session = await world.open()
    await session.model.chat([USER])
    assert world.clock.total == 0


async def test_waiting_ends_at_the_wall_clock(world: World) -> None:
    session = await world.open(limits={"wall_s": 0.05})
    world.view(paused=True)
    with pytest.raises(LimitReached) as caught:
        await session.model.chat([USER])
    assert caught.value.limit == "wall_s"
    assert world.service.stats()["waiting"] == 0


async def test_an_older_view_is_ignored(world: World) -> None:
    world.view(version=3)
    world.revision = 0
    world.view(version=1)
    session = await world.open()
    await session.model.chat([USER])
    assert world.pool.requests[0].cache_salt == "p:3.0"


async def test_a_cancelled_call_is_aborted_and_not_recorded(world: World) -> None:
    session = await world.open()
    world.pool.gate = asyncio.Event()
    call = asyncio.create_task(session.model.chat([USER]))
    await world.pool.started.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert world.pool.aborted == [world.pool.requests[0].request_id]
    assert world.segments[0].calls == []
    assert world.service.stats()["in_flight"] == 0


async def test_closing_aborts_what_is_generated(world: World) -> None:
    session = await world.open()
    world.pool.gate = asyncio.Event()
    call = asyncio.create_task(session.model.chat([USER]))
    await world.pool.started.wait()
    await session.close()
    assert len(world.pool.aborted) == 1
    with pytest.raises(SessionClosed, match="its attempt has ended"):
        await call
    with pytest.raises(SessionClosed, match="its attempt has ended"):
        await session.model.chat([USER])
    await session.close(Ending.CANCELLED)
    assert world.pool.released == [session.id]
    with pytest.raises(SessionClosed, match="its attempt has ended"):
        world.service.session(session.secret)


async def test_counters_outlive_their_session(world: World) -> None:
    session = await world.open()
    await session.model.chat([USER])
    await session.close()
    stats = world.service.stats()
    assert (stats["calls"], stats["sessions"], stats["in_flight"]) == (1, 0, 0)
    assert stats["sampled_tokens"] == len(world.ids("ok"))
    assert stats["backends"] == {"b1": {"state": "active"}}


async def test_secrets_are_the_sessions_own(world: World) -> None:
    one, two = await world.open(), await world.open()
    assert one.secret != two.secret
    assert len(one.secret) >= 43
    assert world.service.session(one.secret) is one
    assert world.service.session(one.secret, one.id) is one
    with pytest.raises(UnknownSecret):
        world.service.session("x" * 43)
    with pytest.raises(UnknownSecret):
        world.service.session("x" * 43, one.id)
    with pytest.raises(AnothersSession):
        world.service.session(one.secret, two.id)
    assert one.base_url == f"http://gateway/s/{one.id}/v1"


async def test_an_ended_session_says_why_and_no_secret_is_kept(world: World) -> None:
    endings = {await world.open(): ending for ending in Ending}
    for session, ending in endings.items():
        await session.close(ending)
    for session, ending in endings.items():
        with pytest.raises(SessionClosed, match=ending.value):
            world.service.session(session.secret, session.id)
        with pytest.raises(AnothersSession):
            world.service.session(session.secret, "ses_other")
        assert session.secret not in repr(vars(world.service))


async def test_so_many_ended_sessions_are_remembered(tiny: TextTokenizer) -> None:
    world = World(tiny, remembered=3)
    sessions = [await world.open() for _ in range(5)]
    for session in sessions:
        await session.close()
    for session in sessions[:2]:
        with pytest.raises(UnknownSecret):
            world.service.session(session.secret)
    for session in sessions[2:]:
        with pytest.raises(SessionClosed):
            world.service.session(session.secret)
    await world.service.close()


async def test_the_pool_is_asked_for_the_session_whether_it_stalled(world: World) -> None:
    session = await world.open(limits={"run_s": 70})
    assert await session.stalled() is None
    world.pool.stall = BackendUnavailable("b1 was silent")
    assert await session.stalled() is world.pool.stall
    assert world.pool.asked == [(session.id, 70)] * 2


async def test_calls_can_be_refunded_on_the_attempts_clock(world: World) -> None:
    session = await world.open()
    await session.model.chat([USER])
    world.pool.lost_tries = 2
    await session.model.chat([USER])
    assert world.clock.refunds == 2


async def test_a_policy_nobody_knows(world: World) -> None:
    with pytest.raises(InfrastructureFailure, match="not known"):
        await world.open(run={"policy": "q"})


async def test_a_tokenizer_that_cant_be_loaded_may_come_later(
    world: World, tmp_path: Any, tiny: TextTokenizer
) -> None:
    world.spec = world.spec.model_copy(update={"tokenizer": str(tmp_path)})
    world.view()
    with pytest.raises(InfrastructureFailure, match=r"tokenizer\.json"):
        await world.open()
    (tmp_path / "tokenizer.json").write_text(tiny._inner.to_str())
    await (await world.open()).model.chat([USER])


async def test_a_renderer_that_does_not_fit(world: World) -> None:
    world.spec = world.spec.model_copy(update={"renderer": RendererSpec(name="glm-5")})
    world.view()
    with pytest.raises(InfrastructureFailure, match="does not fit"):
        await world.open()


async def test_nothing_is_answered_that_is_not_recorded(world: World) -> None:
    session = await world.open()
    world.segments[0].broken = OSError(28, "No space left on device")
    with pytest.raises(InfrastructureFailure, match="No space left"):
        await session.model.chat([USER])
    assert session.call_ids == []


async def test_a_backends_error_reaches_the_agent(world: World) -> None:
    session = await world.open()

    def broken(request: GenerateRequest) -> Generation:
        raise BackendError("out of memory")

    world.pool.script = broken
    with pytest.raises(BackendError):
        await session.model.chat([USER])
    world.pool.script = world.says("ok")
    assert (await session.model.chat([USER])).message.content == "ok"


async def test_closing_the_gateway_ends_all(world: World) -> None:
    session = await world.open()
    world.pool.gate = asyncio.Event()
    call = asyncio.create_task(session.model.chat([USER]))
    await world.pool.started.wait()
    await world.service.close()
    with pytest.raises(SessionClosed):
        await call
    assert world.pool.closed


async def test_what_goes_wrong_in_a_call_is_never_the_agents_doing(world: World) -> None:
    def script(request: GenerateRequest) -> Generation:
        return Generation(token_ids=[2**40], logprobs=[-0.5], finish_reason="stop")

    world.pool.script = script
    session = await world.open()
    with pytest.raises(InfrastructureFailure, match="the call failed: OverflowError"):
        await session.model.chat([USER])
    assert isinstance(session.trouble, InfrastructureFailure)
    assert world.segments[0].calls == []
