"""Sandboxes that an agent forks: as its own, few, and closed with it."""

from __future__ import annotations

from rollserve.agent.base import AgentResult, Episode
from rollserve.errors import Conflict
from rollserve.testing.attempt_bench import AttemptBench as Bench


async def test_a_fork_has_the_files_bounds_and_network_and_ends_with_the_attempt(bench: Bench) -> None:
    async def forks(episode: Episode) -> AgentResult:
        assert episode.sandbox is not None
        await episode.sandbox.write_file("/workspace/f", b"one")
        snapshot = await episode.sandbox.snapshot()
        await episode.sandbox.write_file("/workspace/f", b"two")
        fork = await episode.fork(snapshot)
        assert await fork.read_file("/workspace/f") == b"one"
        early = await episode.fork(snapshot)
        await early.close()
        return AgentResult(answer="ok")

    bench.fakes.agents.plays["forks"] = forks
    bench.fakes.agents.mounts = {"/harness": "/srv/pi"}
    attempt = await bench.play(agent="forks", network="full", env={"A": "1"}, files={"given": "x"})
    assert attempt.reward == 1.0
    own, fork, _ = bench.fakes.runtime.made
    assert (fork.spec.limits, fork.spec.env, fork.spec.mounts) == (
        own.spec.limits,
        {"A": "1"},
        {"/harness": "/srv/pi"},
    )
    assert (fork.spec.files, fork.spec.prepare) == ({}, ())
    assert bench.fakes.opened_networks == ["full"] * 3
    assert bench.fakes.leftovers == []


async def test_an_agent_forks_so_many(bench: Bench) -> None:
    most = bench.fakes.bounds.forks

    async def forks(episode: Episode) -> AgentResult:
        assert episode.sandbox is not None
        snapshot = await episode.sandbox.snapshot()
        for _ in range(most):
            await episode.fork(snapshot)
        try:
            await episode.fork(snapshot)
        except Conflict:
            return AgentResult(answer="ok")
        raise AssertionError

    bench.fakes.agents.plays["forks"] = forks
    assert (await bench.play(agent="forks")).reward == 1.0
    assert len(bench.fakes.runtime.made) == most + 1
    assert bench.fakes.leftovers == []
