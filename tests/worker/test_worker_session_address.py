"""From a sandbox elsewhere to its session: the worker's address, and whom to trust there."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from rollserve.agent.base import AgentResult, Episode
from rollserve.errors import SandboxError
from rollserve.records.rollout import RolloutState
from rollserve.rollouts.worker_ports import SessionAddress
from rollserve.sandbox.trust import trusted_in
from rollserve.testing.attempt_bench import AttemptBench as Bench

ADDRESS = SessionAddress(url="https://10.0.0.5:8801", authority=b"-----BEGIN CERTIFICATE-----")


async def inside(episode: Episode) -> AgentResult:
    first, second = await episode.reach(), await episode.reach()
    assert first == second
    return AgentResult(answer="ok", detail={"url": first})


def advertised(bench: Bench, address: SessionAddress, runtime: str = "fake") -> None:
    bench.fakes.ports = replace(bench.fakes.ports, session_addresses={runtime: address})
    bench.fakes.agents.plays["inside"] = inside


async def test_it_is_given_the_address_and_the_authority_once(bench: Bench) -> None:
    advertised(bench, ADDRESS)
    attempt = await bench.play(agent="inside")
    assert attempt.detail["agent"] == {"url": "https://10.0.0.5:8801/s/session-a/v1"}
    (sandbox,) = bench.fakes.runtime.made
    assert sandbox.files[trusted_in(sandbox).authority] == ADDRESS.authority + b"\n"
    assert sum("NODE_EXTRA_CA_CERTS" in command for command in sandbox.commands) == 1
    assert "session_socket.closed" not in bench.fakes.journal.entries
    assert bench.fakes.leftovers == []


async def test_those_who_ask_at_once_share_one_opening(bench: Bench) -> None:
    advertised(bench, ADDRESS)

    async def at_once(episode: Episode) -> AgentResult:
        first, second = await asyncio.gather(episode.reach(), episode.reach())
        assert first == second
        return AgentResult(answer="ok", detail={"url": first})

    async def others_first() -> None:
        await asyncio.sleep(0)

    bench.fakes.agents.plays["inside"] = at_once
    bench.fakes.hooks.write_file = others_first
    attempt = await bench.play(agent="inside")
    assert attempt.detail["agent"] == {"url": "https://10.0.0.5:8801/s/session-a/v1"}
    (sandbox,) = bench.fakes.runtime.made
    assert sum("NODE_EXTRA_CA_CERTS" in command for command in sandbox.commands) == 1


async def test_what_everybody_trusts_needs_no_word(bench: Bench) -> None:
    advertised(bench, replace(ADDRESS, authority=b""))
    await bench.play(agent="inside")
    (sandbox,) = bench.fakes.runtime.made
    assert trusted_in(sandbox).authority not in sandbox.files
    assert sandbox.commands == []


async def test_other_runtimes_have_their_socket(bench: Bench) -> None:
    advertised(bench, ADDRESS, runtime="another")
    attempt = await bench.play(agent="inside")
    assert attempt.detail["agent"] == {"url": "http://inside/s/session-a/v1"}


async def test_an_authority_that_can_not_be_placed_is_no_fault_of_the_agents(bench: Bench) -> None:
    advertised(bench, ADDRESS)

    async def goes(episode: Episode) -> AgentResult:
        assert episode.sandbox is not None
        await episode.sandbox.close()
        return await inside(episode)

    bench.fakes.agents.plays["inside"] = goes
    attempt = await bench.play(agent="inside")
    assert attempt.outcome is RolloutState.FAILED
    assert attempt.failure is not None
    assert attempt.failure.code == SandboxError.code
