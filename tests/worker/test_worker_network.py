"""The network of a task: for its agent's sandbox, and gone before that is."""

from __future__ import annotations

from rollserve.errors import SandboxError
from rollserve.records.network import AllowedHosts
from rollserve.records.rollout import RolloutState
from rollserve.testing.attempt_bench import AttemptBench as Bench


async def test_a_task_without_one_has_none(bench: Bench) -> None:
    await bench.play()
    assert "network.closed" not in bench.fakes.journal.entries


async def test_it_is_opened_for_the_agent_and_closed_before_grading(bench: Bench) -> None:
    bench.fakes.graders.carry = ("/workspace",)
    attempt = await bench.play(network={"allow": ["pypi.org"]})
    assert attempt.reward == 1.0
    assert bench.fakes.opened_networks == [AllowedHosts(allow=["pypi.org"])]
    order = bench.fakes.journal.entries
    assert order.count("network.closed") == 1
    assert order.index("network.closed") < order.index("sandbox.closed a-1") < order.index("stage grade a")
    assert bench.fakes.leftovers == []
    agents, graders = bench.fakes.runtime.made
    assert any("HTTP_PROXY=http://inside" in command for command in agents.commands)
    assert not any("HTTP_PROXY" in command for command in graders.commands)


async def test_one_that_does_not_open_is_an_infrastructure_failure(bench: Bench) -> None:
    async def refuse() -> None:
        raise SandboxError("no way out", operation="network")

    bench.fakes.hooks.open_network = refuse
    attempt = await bench.play(network="full")
    assert attempt.outcome is RolloutState.FAILED
    assert attempt.failure is not None
    assert attempt.failure.code == "sandbox_error"
    assert bench.fakes.leftovers == []
