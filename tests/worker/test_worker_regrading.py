"""A stored attempt, graded once more by a worker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollserve.agent.base import AgentResult, Episode
from rollserve.errors import BackendUnavailable, FailureKind, InvalidInput
from rollserve.executor.base import StartRegrading
from rollserve.grader.base import Grade, Grading
from rollserve.records.call import Message
from rollserve.records.regrade import Graded, RegradingState
from rollserve.records.rollout import Attempt
from rollserve.records.run import RouteSpec, RunSpec
from rollserve.records.task import GraderSpec, Limits, Task
from rollserve.rollouts.regrading import RegradingRunner
from rollserve.testing.attempt_bench import AttemptBench
from rollserve.testing.fakes_server import a_call
from rollserve.testing.fakes_worker import hang

from .conftest import raising

WORK = ("/workspace",)


def by(bench: AttemptBench, judge: Any, carry: tuple[str, ...] | None = None) -> Task:
    bench.fakes.graders.judges["other"] = judge
    bench.fakes.graders.carry = carry
    return Task(instruction="act", grader=GraderSpec(name="other"), limits=Limits(grade_s=5))


def grading(bench: AttemptBench, task: Task, attempt: Attempt, run: RunSpec | None = None) -> RegradingRunner:
    start = StartRegrading(
        regrade_id="reg",
        run_id="run",
        rollout_id="rol",
        tries=1,
        run_json=(run or RunSpec(policy="p")).model_dump_json().encode(),
        task_json=task.model_dump_json().encode(),
        attempt_json=attempt.model_dump_json().encode(),
    )
    return RegradingRunner(start, ports=bench.fakes.ports, pools=bench.pools, observer=bench)


async def regraded(bench: AttemptBench, task: Task, attempt: Attempt, run: RunSpec | None = None) -> Graded:
    graded = await grading(bench, task, attempt, run).run()
    assert bench.free()
    assert bench.fakes.leftovers == []
    assert all(sandbox.closed for sandbox in bench.fakes.runtime.made)
    return graded


async def test_another_grader_sees_what_the_first_one_saw(bench: AttemptBench) -> None:
    attempt = await bench.play()
    bench.fakes.payloads.kept["run/a"].calls.append(a_call())
    seen: list[Grading] = []

    async def judge(grading: Grading) -> Grade:
        seen.append(grading)
        grading.log("half of it")
        return Grade(reward=0.5, call_rewards={grading.call_ids[0]: 0.25}, detail={"n": 1})

    graded = await regraded(bench, by(bench, judge), attempt)
    assert (graded.state, graded.reward, graded.detail) == (RegradingState.GRADED, 0.5, {"n": 1})
    assert list(graded.call_rewards.values()) == [0.25]
    assert graded.log == ["half of it"]
    assert graded.code == {"grader": "2"}
    (one,) = seen
    assert one.answer == "ok"
    assert [message.role for message in one.conversation] == ["user", "assistant"]
    assert one.sandbox is None
    assert one.model is None
    assert len(bench.fakes.gateway.sessions) == 1  # the attempt's own: no model runs


async def test_a_long_answer_is_whole(bench: AttemptBench) -> None:
    async def talks(episode: Episode) -> AgentResult:
        return AgentResult(answer="x" * 9000)

    async def length(grading: Grading) -> Grade:
        return Grade(reward=float(len(grading.answer or "")))

    bench.fakes.agents.plays["tool"] = talks
    attempt = await bench.play()
    assert (await regraded(bench, by(bench, length), attempt)).reward == 9000.0
    kept = bench.fakes.payloads.kept["run/a"]
    kept.end = None  # as it was stored before answers were kept whole
    graded = await regraded(bench, by(bench, length), attempt)
    assert graded.state is RegradingState.IMPOSSIBLE
    assert graded.note == "only the first 4000 characters of the answer were kept"


async def test_files_that_were_kept_are_in_a_fresh_sandbox(bench: AttemptBench) -> None:
    async def writes(episode: Episode) -> AgentResult:
        await episode.tools.call("write", '{"path": "made", "text": "by the agent"}')
        return AgentResult(answer="ok")

    async def reads(grading: Grading) -> Grade:
        assert grading.sandbox is not None
        return Grade(reward=float(await grading.sandbox.read_file("made") == b"by the agent"))

    bench.fakes.agents.plays["tool"] = writes
    attempt = await bench.play(run=RunSpec(policy="p", keep_files=WORK))
    task = by(bench, reads, carry=("/workspace/made",))
    assert (await regraded(bench, task, attempt)).reward == 1.0
    assert len(bench.fakes.runtime.made) == 2
    assert (await regraded(bench, by(bench, reads, carry=("/workspace",)), attempt)).reward == 1.0


async def test_files_that_were_not_kept_are_named(bench: AttemptBench) -> None:
    async def never(grading: Grading) -> Grade:
        raise AssertionError

    attempt = await bench.play(run=RunSpec(policy="p", keep_files=("/workspace/kept",)))
    graded = await regraded(bench, by(bench, never, carry=("/workspace/kept/x", "/tmp/y")), attempt)
    assert graded.state is RegradingState.IMPOSSIBLE
    assert graded.note is not None
    assert "wants /tmp/y of the run's sandbox" in graded.note
    assert graded.failure is None


async def test_a_payload_that_is_gone_is_said(bench: AttemptBench) -> None:
    attempt = await bench.play()
    task = by(bench, None)
    bench.fakes.payloads.kept.clear()
    assert (await regraded(bench, task, attempt)).state is RegradingState.IMPOSSIBLE
    bare = attempt.model_copy(update={"payload": None})
    graded = await regraded(bench, task, bare)
    assert (graded.state, graded.note) == (RegradingState.IMPOSSIBLE, "nothing was kept of the attempt")


async def test_a_grader_that_raises_or_hangs_fails_it_and_frees_all(bench: AttemptBench) -> None:
    async def breaks(grading: Grading) -> Grade:
        raise ValueError("a bug")

    async def hangs(grading: Grading) -> Grade:
        await hang()
        raise AssertionError

    attempt = await bench.play()
    graded = await regraded(bench, by(bench, breaks, carry=()), attempt)
    assert graded.state is RegradingState.FAILED
    assert graded.failure is not None
    assert (graded.failure.kind, graded.failure.message) == (FailureKind.GRADER, "ValueError: a bug")
    assert "a bug" in graded.log[-1]
    running = asyncio.create_task(grading(bench, by(bench, hangs, carry=()), attempt).run())
    while not running.done():
        await bench.clock.advance(1.0)
    late = running.result()
    assert late.failure is not None
    assert late.failure.kind is FailureKind.GRADER
    assert "not done in time" in late.failure.message
    assert bench.free()
    assert all(sandbox.closed for sandbox in bench.fakes.runtime.made)


JUDGED = RunSpec(policy="p", routes={"judge": RouteSpec(policy="j", stages=("grade",))})
JUDGES = "run/reg-rol-1"
"""The record of what the one try asked."""


async def asks(grading: Grading) -> Grade:
    assert grading.model is not None
    reply = await grading.model.chat([Message(role="user", content="right?")], model="judge")
    return Grade(reward=0.5, detail={"said": reply.message.content})


async def test_a_grader_that_was_broken_since_is_its_own_fault(
    bench: AttemptBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def resolve(_: object) -> None:
        raise InvalidInput("'mine:it' can't be loaded", field="grader.name")

    attempt = await bench.play()
    monkeypatch.setattr(bench.fakes.graders, "resolve", resolve)
    graded = await regraded(bench, Task(instruction="act", grader=GraderSpec(name="mine:it")), attempt)
    assert graded.failure is not None
    assert graded.failure.kind is FailureKind.GRADER


async def test_a_judge_is_asked_in_a_session_of_the_gradings_own(bench: AttemptBench) -> None:
    attempt = await bench.play(run=JUDGED)
    graded = await regraded(bench, by(bench, asks), attempt, JUDGED)
    assert (graded.reward, graded.detail) == (0.5, {"said": "ok"})
    *_, asked = bench.fakes.gateway.sessions
    assert (asked.spec.stage, asked.spec.attempt_id, asked.closed) == ("grade", "reg-rol-1", True)
    assert set(bench.fakes.payloads.left) == {JUDGES}  # left to the server, which counts it
    assert set(bench.fakes.payloads.kept) == {"run/a"}


async def test_a_judge_that_fails_is_the_graders_failure(bench: AttemptBench) -> None:
    attempt = await bench.play(run=JUDGED)

    async def swallows(grading: Grading) -> Grade:
        try:
            return await asks(grading)
        except Exception:
            return Grade(reward=0.0)

    bench.fakes.hooks.chat = raising(BackendUnavailable("gone", operation="pool.generate"))
    for grader in (asks, swallows):
        graded = await regraded(bench, by(bench, grader), attempt, JUDGED)
        assert (graded.state, graded.reward) == (RegradingState.FAILED, None)
        assert graded.failure is not None
        assert (graded.failure.kind, graded.failure.retryable) == (FailureKind.GRADER, True)
        assert "gone" in graded.failure.message


async def test_a_judge_that_is_cut_off_leaves_nothing_behind(bench: AttemptBench) -> None:
    attempt = await bench.play(run=JUDGED)
    bench.fakes.hooks.chat = hang
    for ending in ("limit", "cancel"):
        running = asyncio.create_task(grading(bench, by(bench, asks), attempt, JUDGED).run())
        if ending == "cancel":
            await bench.clock.advance(1.0)
            running.cancel()
        while not running.done():
            await bench.clock.advance(1.0)
        assert running.cancelled() == (ending == "cancel")
        if ending == "limit":
            failure = running.result().failure
            assert failure is not None
            assert "not done in time" in failure.message
        assert bench.free()
        assert bench.fakes.leftovers == []
        assert set(bench.fakes.payloads.left) == {JUDGES}
