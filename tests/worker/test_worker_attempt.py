"""One attempt that goes well: its order, what it carries and keeps, and many at once."""

from __future__ import annotations

import asyncio

import pytest

from rollserve.agent.base import AgentResult, Episode
from rollserve.errors import BackendUnavailable, FailureKind
from rollserve.grader.base import Grade, Grading
from rollserve.records.rollout import RolloutState
from rollserve.rollouts.worker_ports import Bounds
from rollserve.testing.attempt_bench import AttemptBench as Bench
from rollserve.testing.fakes_worker import FakePorts

from .conftest import raising


async def test_a_graded_attempt(bench: Bench) -> None:
    attempt = await bench.play(files={"in.txt": "data"}, env={"A": "b"})
    assert attempt.outcome is RolloutState.COMPLETED
    assert attempt.reward == 1.0
    assert attempt.failure is None
    assert attempt.counts["turns"] == 1
    assert attempt.code == {"agent": "1", "grader": "2"}
    assert attempt.detail == {"answer": "ok"}
    assert attempt.payload == "run/a"
    assert [stage for _, stage in bench.stages] == ["init", "ready", "run", "grade", "done"]
    spec = bench.fakes.runtime.made[0].spec
    assert spec.files == {"in.txt": b"data"}
    assert spec.env == {"A": "b"}
    assert bench.fakes.leftovers == []
    assert bench.free()
    assert bench.clock.timers == 0


async def test_the_agent_side_is_gone_before_grading(bench: Bench) -> None:
    bench.fakes.graders.carry = ("/workspace",)
    await bench.play()
    order = bench.fakes.journal.entries
    assert order.index("tools.closed") < order.index("session.closed a") < order.index("sandbox.closed a-1")
    assert (
        order.index("sandbox.closed a-1") < order.index("stage grade a") < order.index("sandbox.closed a-2")
    )
    assert order.index("sandbox.closed a-2") < order.index("stage done a")


async def test_carried_files_reach_a_fresh_sandbox(bench: Bench) -> None:
    async def write(episode: Episode) -> AgentResult:
        await episode.tools.call("write", '{"path": "/workspace/out", "text": "42"}')
        return AgentResult()

    async def read(grading: Grading) -> Grade:
        assert grading.sandbox is not None
        data = await grading.sandbox.read_file("/workspace/out")
        return Grade(reward=float(data), detail={"seen": data.decode()})

    bench.fakes.agents.plays["write"] = write
    bench.fakes.graders.judges["read"] = read
    bench.fakes.graders.carry = ("/workspace",)
    attempt = await bench.play(agent="write", grader="read")
    assert attempt.reward == 42.0
    assert attempt.detail["grader"] == {"seen": "42"}
    assert len(bench.fakes.runtime.made) == 2


async def test_an_empty_carry_gets_an_empty_sandbox(bench: Bench) -> None:
    async def judge(grading: Grading) -> Grade:
        assert grading.sandbox is not None
        return Grade(reward=0.5)

    bench.fakes.graders.judges["judge"] = judge
    bench.fakes.graders.carry = ()
    assert (await bench.play(grader="judge")).reward == 0.5


async def test_what_was_carried_is_bounded(bench: Bench) -> None:
    bench.fakes = FakePorts(bench.clock, bounds=Bounds(carry_bytes=10))
    bench.fakes.graders.carry = ("/workspace",)
    attempt = await bench.play(files={"/workspace/big": "x" * 1000})
    assert attempt.failure is not None
    assert attempt.failure.kind is FailureKind.AGENT
    assert attempt.failure.operation == "carry"
    assert bench.fakes.leftovers == []


async def test_artifacts_are_kept_and_bounded(bench: Bench) -> None:
    bench.fakes = FakePorts(bench.clock, bounds=Bounds(artifact_bytes=10, artifacts_bytes=16))
    files = {"one": "x" * 10, "two": "y" * 11, "three": "z" * 6, "four": "w"}
    await bench.play(files=files, artifacts=["one", "two", "gone", "three", "four"])
    kept = bench.fakes.payloads.kept["run/a"].artifacts
    assert kept == {"one": b"x" * 10, "three": b"z" * 6}
    assert "artifact two:" in bench.log()
    assert "artifact gone:" in bench.log()
    assert "artifact four: left out" in bench.log()


async def test_call_rewards_are_recorded(bench: Bench) -> None:
    async def judge(grading: Grading) -> Grade:
        return Grade(reward=1, call_rewards={grading.call_ids[0]: 0.25})

    bench.fakes.graders.judges["judge"] = judge
    await bench.play(grader="judge")
    assert bench.fakes.payloads.kept["run/a"].call_rewards == {"call-0": 0.25}


async def test_agent_and_grader_may_log_within_a_bound(bench: Bench) -> None:
    bench.fakes = FakePorts(bench.clock, bounds=Bounds(log_bytes=2000, line_chars=100))

    async def chatty(episode: Episode) -> AgentResult:
        episode.log("long " * 100)
        for number in range(1000):
            episode.log(f"line {number}")
        return AgentResult(answer="ok")

    bench.fakes.agents.plays["chatty"] = chatty
    assert (await bench.play(agent="chatty")).reward == 1
    log = bench.log()
    assert "characters cut" in log
    assert "over its limit" in log
    assert len(log) < 3000


async def test_details_that_are_no_json_do_not_cost_the_result(bench: Bench) -> None:
    async def odd(episode: Episode) -> AgentResult:
        return AgentResult(answer="ok", detail={"what": object()})

    bench.fakes.agents.plays["odd"] = odd
    attempt = await bench.play(agent="odd")
    assert attempt.reward == 1
    assert "not_kept" in attempt.detail["agent"]
    assert attempt.model_dump_json()


@pytest.mark.parametrize("failing", [False, True])
async def test_the_run_sandbox_can_be_kept(bench: Bench, failing: bool) -> None:
    if failing:
        bench.fakes.hooks.chat = raising(BackendUnavailable("nobody", operation="chat"))
    attempt = await bench.play(keep_s=60)
    assert [sandbox.id for sandbox in bench.kept] == ["a-1"]
    assert attempt.detail["kept_sandbox"] == "a-1"
    assert [sandbox.id for sandbox in bench.fakes.runtime.open] == ["a-1"]


async def test_two_hundred_at_once_stay_within_their_slots(bench: Bench) -> None:
    bench.fakes.hooks.create = lambda: bench.clock.sleep(0.5)
    bench.fakes.hooks.chat = lambda: bench.clock.sleep(1)
    bench.fakes.graders.carry = ()
    tasks = [bench.spawn(bench.runner(f"a{number}")) for number in range(200)]
    gathered = asyncio.gather(*tasks)
    for _ in range(400):
        if gathered.done():
            break
        await bench.clock.advance(0.5)
        seen = bench.pools.occupancy()
        assert seen["init"] <= 2
        assert seen["run"] <= 4
        assert seen["grade"] <= 2
        assert seen["ready"] <= 2 + 4 - seen["run"]
    attempts = await gathered
    assert all(attempt is not None and attempt.reward == 1.0 for attempt in attempts)
    assert bench.fakes.leftovers == []
    assert bench.fakes.runtime.most_open <= 2 + 2 + 4 + 2
    assert bench.fakes.gateway.calls == 200
