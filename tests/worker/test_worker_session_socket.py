"""From the sandbox of an attempt to its session: opened when asked for, gone before the sandbox is."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from rollserve.agent.base import AgentResult, Episode
from rollserve.errors import InfrastructureFailure, SandboxError
from rollserve.gateway.base import Session
from rollserve.records.call import Message
from rollserve.records.rollout import RolloutState
from rollserve.testing.attempt_bench import AttemptBench as Bench
from rollserve.testing.fakes_worker import hang

ASK = [Message(role="user", content="hello")]


async def inside(episode: Episode) -> AgentResult:
    """Asks twice for the way, and looks at its session."""
    assert episode.sandbox is not None
    assert episode.session is not None
    await episode.model.chat(ASK)
    first, second = await episode.reach(), await episode.reach()
    assert first == second
    return AgentResult(answer="ok", detail={"url": first, "calls": episode.session.call_ids})


async def test_the_way_is_opened_once_and_closed_before_the_sandbox(bench: Bench) -> None:
    bench.fakes.agents.plays["inside"] = inside
    attempt = await bench.play(agent="inside")
    assert attempt.reward == 1.0
    assert attempt.detail["agent"] == {"url": "http://inside/s/session-a/v1", "calls": ["call-0"]}
    order = bench.fakes.journal.entries
    assert order.count("session_socket.closed") == 1
    assert (
        order.index("session.closed a")
        < order.index("session_socket.closed")
        < order.index("sandbox.closed a-1")
    )
    assert bench.fakes.leftovers == []


async def test_those_who_ask_at_once_share_one_way(bench: Bench) -> None:
    async def at_once(episode: Episode) -> AgentResult:
        first, second = await asyncio.gather(episode.reach(), episode.reach())
        assert first == second
        return AgentResult(answer="ok", detail={"url": first})

    async def others_first() -> None:
        await asyncio.sleep(0)

    bench.fakes.agents.plays["inside"] = at_once
    bench.fakes.hooks.listen = others_first
    attempt = await bench.play(agent="inside")
    assert attempt.detail["agent"] == {"url": "http://inside/s/session-a/v1"}
    assert bench.fakes.journal.entries.count("session_socket.closed") == 1
    assert bench.fakes.leftovers == []


async def test_a_way_that_did_not_open_is_tried_again(bench: Bench) -> None:
    tries = 0

    @asynccontextmanager
    async def refuses_once(session: Session, sock: socket.socket) -> AsyncIterator[str]:
        nonlocal tries
        tries += 1
        if tries == 1:
            sock.close()
            raise OSError("not now")
        async with bench.fakes.serve_session(session, sock) as url:
            yield url

    async def insists(episode: Episode) -> AgentResult:
        with pytest.raises(InfrastructureFailure, match="not now"):
            await episode.reach()
        return AgentResult(answer="ok", detail={"url": await episode.reach()})

    bench.fakes.ports = replace(bench.fakes.ports, serve_session=refuses_once)
    bench.fakes.agents.plays["inside"] = insists
    attempt = await bench.play(agent="inside")
    assert attempt.detail["agent"] == {"url": "http://inside/s/session-a/v1"}
    assert bench.fakes.leftovers == []


async def test_an_agent_that_asks_for_none_has_none(bench: Bench) -> None:
    await bench.play()
    assert "session_socket.closed" not in bench.fakes.journal.entries


async def test_it_is_closed_when_the_attempt_is_cancelled(bench: Bench) -> None:
    async def waits(episode: Episode) -> AgentResult:
        await episode.reach()
        bench.fakes.journal("reached")
        await hang()
        raise AssertionError

    bench.fakes.agents.plays["waits"] = waits
    runner = bench.runner(agent="waits")
    task = bench.spawn(runner)
    while "reached" not in bench.fakes.journal.entries:
        await asyncio.sleep(0)
    runner.cancel("enough")
    attempt = await task
    assert attempt is not None
    assert attempt.outcome is RolloutState.CANCELLED
    assert bench.fakes.leftovers == []


async def test_no_way_is_an_infrastructure_failure(bench: Bench) -> None:
    async def refuse() -> None:
        raise SandboxError("no way in", operation="sandbox.listen")

    bench.fakes.hooks.listen = refuse
    bench.fakes.agents.plays["inside"] = inside
    attempt = await bench.play(agent="inside")
    assert attempt.outcome is RolloutState.FAILED
    assert attempt.failure is not None
    assert attempt.failure.code == "sandbox_error"
    assert bench.fakes.leftovers == []


async def test_what_an_agent_mounts_its_sandbox_has_and_its_graders_has_not(bench: Bench) -> None:
    bench.fakes.agents.mounts = {"/harness": "/srv/pi"}
    bench.fakes.graders.carry = ("/workspace",)
    await bench.play()
    agents, graders = bench.fakes.runtime.made
    assert agents.spec.mounts == {"/harness": "/srv/pi"}
    assert graders.spec.mounts == {}
