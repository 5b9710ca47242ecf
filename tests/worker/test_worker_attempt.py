"""One attempt: its order, its ends, its budgets, its releases."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

import pytest

from rollserve.agent.base import AgentResult, Episode
from rollserve.errors import (
    BackendUnavailable,
    ContextTooLong,
    FailureKind,
    LimitReached,
    SandboxError,
)
from rollserve.gateway.base import Ending
from rollserve.grader.base import Grade, Grading
from rollserve.records.call import Message
from rollserve.records.rollout import RolloutState
from rollserve.records.run import RunSpec
from rollserve.records.task import Limits
from rollserve.rollouts.worker_ports import Bounds
from rollserve.testing.attempt_bench import AttemptBench as Bench
from rollserve.testing.fakes_worker import FakePorts, hang

ASK = [Message(role="user", content="hello")]


def raising(error: Exception) -> Callable[[], Awaitable[None]]:
    async def hook() -> None:
        raise error

    return hook


# -- the plain way
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
    kept = bench.fakes.payloads.sealed["run/a"].artifacts
    assert kept == {"one": b"x" * 10, "three": b"z" * 6}
    assert "artifact two:" in bench.log()
    assert "artifact gone:" in bench.log()
    assert "artifact four: left out" in bench.log()


async def test_call_rewards_are_recorded(bench: Bench) -> None:
    async def judge(grading: Grading) -> Grade:
        return Grade(reward=1, call_rewards={grading.call_ids[0]: 0.25})

    bench.fakes.graders.judges["judge"] = judge
    await bench.play(grader="judge")
    assert bench.fakes.payloads.sealed["run/a"].call_rewards == {"call-0": 0.25}


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


# -- failures, by stage and kind
@pytest.mark.parametrize("point", ["create", "open_session", "open_tools", "chat"])
@pytest.mark.parametrize(
    "error", [SandboxError("gone", operation="x"), BackendUnavailable("nobody", operation="y")]
)
async def test_infrastructure_failures(bench: Bench, point: str, error: SandboxError) -> None:
    setattr(bench.fakes.hooks, point, raising(error))
    attempt = await bench.play()
    assert attempt.outcome is RolloutState.FAILED
    assert attempt.reward is None
    assert attempt.failure is not None
    assert attempt.failure.kind is FailureKind.INFRASTRUCTURE
    assert attempt.failure.code == error.code
    assert attempt.failure.operation == error.operation
    assert attempt.payload == "run/a"
    assert bench.fakes.leftovers == []
    assert bench.free()


@pytest.mark.parametrize("point", ["create", "open_session", "open_tools"])
async def test_bugs_of_ours_are_infrastructure(bench: Bench, point: str) -> None:
    setattr(bench.fakes.hooks, point, raising(ZeroDivisionError("oops")))
    attempt = await bench.play()
    assert attempt.failure is not None
    assert attempt.failure.kind is FailureKind.INFRASTRUCTURE
    assert "ZeroDivisionError: oops" in attempt.failure.message
    assert "ZeroDivisionError" in bench.log()
    assert bench.fakes.leftovers == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"runtime": "fka"}, "unknown runtime 'fka'"),
        ({"agent": "tol"}, "did you mean 'tool'"),
        ({"grader": "exakt"}, "did you mean 'exact'"),
        ({"image": "missing"}, "no such image"),
    ],
)
async def test_what_is_unknown_here_fails_before_a_sandbox(
    bench: Bench, fields: dict[str, str], words: str
) -> None:
    attempt = await bench.play(**fields)
    assert attempt.failure is not None
    assert attempt.failure.kind is FailureKind.INFRASTRUCTURE
    assert words in attempt.failure.message
    assert bench.fakes.runtime.made == []


async def test_an_agents_crash_is_the_agents(bench: Bench) -> None:
    async def crash(episode: Episode) -> AgentResult:
        await episode.tools.call("write", '{"path": "trace", "text": "t"}')
        raise KeyError("plan")

    graded: list[Grading] = []
    bench.fakes.agents.plays["crash"] = crash
    attempt = await bench.play(agent="crash", artifacts=["trace"])
    assert attempt.outcome is RolloutState.FAILED
    assert attempt.failure is not None
    assert attempt.failure.kind is FailureKind.AGENT
    assert "KeyError: 'plan'" in attempt.failure.message
    assert attempt.reward is None
    assert not graded
    assert "in crash" in bench.log()
    assert bench.fakes.payloads.sealed["run/a"].artifacts == {"trace": b"t"}
    assert bench.fakes.leftovers == []


async def test_a_cancelled_error_of_the_agents_own_making_is_a_crash(bench: Bench) -> None:
    async def crash(episode: Episode) -> AgentResult:
        raise asyncio.CancelledError

    bench.fakes.agents.plays["crash"] = crash
    attempt = await bench.play(agent="crash")
    assert attempt.failure is not None
    assert attempt.failure.kind is FailureKind.AGENT


async def test_an_agent_must_return_a_result(bench: Bench) -> None:
    async def forgetful(episode: Episode) -> AgentResult:
        return None  # type: ignore[return-value]  # what a user's agent may do

    bench.fakes.agents.plays["forgetful"] = forgetful
    attempt = await bench.play(agent="forgetful")
    assert attempt.failure is not None
    assert "NoneType" in attempt.failure.message


@pytest.mark.parametrize(
    "judge",
    [
        pytest.param(lambda: 1 / 0, id="crash"),
        pytest.param(lambda: Grade(reward=math.nan), id="nan"),
        pytest.param(lambda: Grade(reward=1, call_rewards={"other": 1.0}), id="unknown-call"),
        pytest.param(lambda: "1.0", id="no-grade"),
    ],
)
async def test_a_graders_fault_is_never_a_reward(bench: Bench, judge: Callable[[], Grade]) -> None:
    async def grade(grading: Grading) -> Grade:
        return judge()

    bench.fakes.graders.judges["bad"] = grade
    bench.fakes.graders.carry = ()
    attempt = await bench.play(grader="bad")
    assert attempt.outcome is RolloutState.FAILED
    assert attempt.reward is None
    assert attempt.failure is not None
    assert attempt.failure.kind is FailureKind.GRADER
    assert attempt.detail["answer"] == "ok"
    assert bench.fakes.leftovers == []


async def test_a_grading_sandbox_that_fails_is_infrastructure(bench: Bench) -> None:
    bench.fakes.graders.carry = ()

    async def second_fails() -> None:
        if bench.fakes.runtime.made:
            raise SandboxError("no memory", operation="sandbox.start")

    bench.fakes.hooks.create = second_fails
    attempt = await bench.play()
    assert attempt.failure is not None
    assert attempt.failure.kind is FailureKind.INFRASTRUCTURE


@pytest.mark.parametrize(("rule", "failed"), [("fail", True), ("drop", False)])
async def test_inexact_calls_and_the_runs_rule(bench: Bench, rule: str, failed: bool) -> None:
    async def inexact() -> None:
        bench.fakes.gateway.sessions[0].counts["inexact"] += 1

    bench.fakes.hooks.chat = inexact
    run = RunSpec.model_validate({"policy": "p", "on_inexact": rule})
    attempt = await bench.play(run=run)
    assert (attempt.failure is not None) is failed
    if attempt.failure is not None:
        assert attempt.failure.code == "inexact"
        assert attempt.reward is None


@pytest.mark.parametrize(("rule", "failed"), [("fail", True), ("exact", False)])
async def test_rewritten_turns_and_the_runs_rule(bench: Bench, rule: str, failed: bool) -> None:
    """Also where the agent got over the refusal."""

    async def rewritten() -> None:
        bench.fakes.gateway.sessions[0].counts["rewritten"] = 1

    bench.fakes.hooks.chat = rewritten
    run = RunSpec.model_validate({"policy": "p", "rewrites": rule})
    attempt = await bench.play(run=run)
    assert (attempt.failure is not None) is failed
    if attempt.failure is not None:
        assert attempt.failure.code == "inexact"
        assert "rewrote" in attempt.failure.message


# -- budgets
async def test_run_s_truncates_and_is_graded(bench: Bench, tight: Limits) -> None:
    async def slow(episode: Episode) -> AgentResult:
        await episode.model.chat(ASK)
        await asyncio.Event().wait()
        return AgentResult()

    async def judge(grading: Grading) -> Grade:
        return Grade(reward=float(len(grading.conversation)))

    bench.fakes.agents.plays["slow"] = slow
    bench.fakes.graders.judges["judge"] = judge
    attempt = await bench.until(bench.spawn(bench.runner(agent="slow", grader="judge", limits=tight)))
    assert attempt.outcome is RolloutState.COMPLETED
    assert attempt.truncated_by == "run_s"
    assert attempt.reward == 2.0
    assert attempt.timings["run"] == pytest.approx(20)


async def test_time_lost_on_a_backend_is_no_limit(bench: Bench, tight: Limits) -> None:
    bench.fakes.hooks.chat = hang
    generating: list[bool] = []

    async def silent() -> None:
        generating.append(bool(bench.fakes.gateway.generating))
        bench.fakes.gateway.sessions[0].stall = BackendUnavailable("backend b1 was silent for 20 s")

    bench.fakes.hooks.stalled = silent
    attempt = await bench.until(bench.spawn(bench.runner(limits=tight)))
    assert generating == [True], "asked while the call is out"
    assert attempt.outcome is RolloutState.FAILED
    assert attempt.reward is None
    assert attempt.truncated_by is None
    assert attempt.failure is not None
    assert attempt.failure.kind is FailureKind.INFRASTRUCTURE
    assert attempt.failure.code == "backend_unavailable"
    assert "b1 was silent for 20 s" in attempt.failure.message
    assert bench.fakes.leftovers == []
    assert bench.free()
    assert bench.clock.timers == 0


@pytest.mark.parametrize("question", ["hangs", "breaks"])
async def test_a_question_without_an_answer_leaves_the_limit(
    bench: Bench, tight: Limits, question: str
) -> None:
    bench.fakes.hooks.chat = hang
    bench.fakes.hooks.stalled = hang if question == "hangs" else raising(ZeroDivisionError("oops"))
    attempt = await bench.until(bench.spawn(bench.runner(limits=tight)))
    assert attempt.truncated_by == "run_s"
    assert attempt.timings["run"] == pytest.approx(20)
    assert "whose time it was can't be told" in bench.log()
    assert bench.clock.monotonic() < 40
    assert bench.fakes.leftovers == []


async def test_lost_tries_do_not_burn_the_run(bench: Bench, tight: Limits) -> None:
    async def lost_once() -> None:
        refund = bench.fakes.gateway.sessions[0].spec.clock.refundable()
        await bench.clock.sleep(15)
        refund()
        await bench.clock.sleep(15)

    bench.fakes.hooks.chat = lost_once
    attempt = await bench.until(bench.spawn(bench.runner(limits=tight)))
    assert attempt.truncated_by is None
    assert attempt.timings["run"] == pytest.approx(15)


@pytest.mark.parametrize("ending", list(Ending))
async def test_the_session_is_told_why_it_ends(bench: Bench, ending: Ending) -> None:
    runner = bench.runner()
    if ending is not Ending.ENDED:
        bench.fakes.hooks.chat = hang
    task = bench.spawn(runner)
    await bench.clock.settle()
    if ending is Ending.CANCELLED:
        runner.cancel("stale")
    if ending is Ending.STOPPING:
        runner.abandon()
    await bench.clock.settle()
    await asyncio.wait_for(task, 10)
    assert bench.fakes.gateway.sessions[0].ending is ending


async def test_total_s_truncates_too_and_grading_has_its_own(bench: Bench) -> None:
    limits = Limits(init_s=10, run_s=20, total_s=15, grade_s=5)
    bench.fakes.hooks.create = lambda: bench.clock.sleep(5)
    bench.fakes.hooks.chat = hang
    bench.fakes.graders.judges["slow"] = judge_after(bench, 4)
    attempt = await bench.until(bench.spawn(bench.runner(grader="slow", limits=limits)))
    assert attempt.truncated_by == "total_s"
    assert attempt.reward == 0.0
    assert attempt.timings == pytest.approx({"init": 5, "run": 10, "grade": 4})
    assert bench.fakes.gateway.generating == set()


def judge_after(bench: Bench, seconds: float) -> Callable[[Grading], Awaitable[Grade]]:
    async def judge(grading: Grading) -> Grade:
        await bench.clock.sleep(seconds)
        return Grade(reward=0.0)

    return judge


@pytest.mark.parametrize(
    ("play_error", "mark"),
    [
        (LimitReached("max_turns", "64 turns"), "max_turns"),
        (ContextTooLong("too long"), "context_tokens"),
    ],
)
async def test_limits_the_agent_ran_into_mark_its_work(
    bench: Bench, play_error: Exception, mark: str
) -> None:
    async def play(episode: Episode) -> AgentResult:
        raise play_error

    bench.fakes.agents.plays["limited"] = play
    attempt = await bench.play(agent="limited")
    assert attempt.truncated_by == mark
    assert attempt.reward == 0.0


async def test_an_agent_may_say_what_limited_it(bench: Bench) -> None:
    async def play(episode: Episode) -> AgentResult:
        return AgentResult(answer="ok", truncated_by="max_sampled_tokens")

    bench.fakes.agents.plays["limited"] = play
    attempt = await bench.play(agent="limited")
    assert (attempt.reward, attempt.truncated_by) == (1.0, "max_sampled_tokens")


async def test_pauses_do_not_burn_the_run(bench: Bench, tight: Limits) -> None:
    async def queued() -> None:
        with bench.fakes.gateway.sessions[0].spec.clock.pause():
            await bench.clock.sleep(500)
        await bench.clock.sleep(15)

    bench.fakes.hooks.chat = queued
    attempt = await bench.until(bench.spawn(bench.runner(limits=tight)))
    assert attempt.truncated_by is None
    assert attempt.timings["run"] == pytest.approx(15)


async def test_waits_for_slots_do_not_burn_anything(bench: Bench, tight: Limits) -> None:
    blocker = bench.pools.place()
    blockers = [bench.pools.place() for _ in range(3)]
    for place in [blocker, *blockers]:
        await place.to_init()
        place.to_ready()
        await place.to_run()
    task = bench.spawn(bench.runner(limits=tight))
    await bench.clock.advance(500)
    assert bench.pools.occupancy()["ready"] == 1
    blocker.release()
    attempt = await bench.until(task)
    assert attempt.reward == 1.0
    assert sum(attempt.timings.values()) == 0


@pytest.mark.parametrize("point", ["create", "open_session", "open_tools"])
async def test_init_s_bounds_all_of_init(bench: Bench, tight: Limits, point: str) -> None:
    setattr(bench.fakes.hooks, point, hang)
    attempt = await bench.until(bench.spawn(bench.runner(limits=tight)))
    assert attempt.failure is not None
    assert attempt.failure.kind is FailureKind.INFRASTRUCTURE
    assert "init_s=10" in attempt.failure.message
    assert bench.fakes.leftovers == []
    assert bench.free()


async def test_init_s_is_shared_by_its_steps(bench: Bench, tight: Limits) -> None:
    bench.fakes.hooks.create = lambda: bench.clock.sleep(6)
    bench.fakes.hooks.open_tools = lambda: bench.clock.sleep(6)
    attempt = await bench.until(bench.spawn(bench.runner(limits=tight)))
    assert attempt.failure is not None
    assert attempt.failure.kind is FailureKind.INFRASTRUCTURE
    assert attempt.timings["init"] == pytest.approx(10)


async def test_grade_s_is_the_graders_failure(bench: Bench, tight: Limits) -> None:
    bench.fakes.graders.judges["slow"] = judge_after(bench, 6)
    bench.fakes.graders.carry = ()
    attempt = await bench.until(bench.spawn(bench.runner(grader="slow", limits=tight)))
    assert attempt.failure is not None
    assert attempt.failure.kind is FailureKind.GRADER
    assert "grade_s" in attempt.failure.message
    assert bench.fakes.leftovers == []


@pytest.mark.parametrize("where", ["queue", "run", "paused", "grade_queue", "grade"])
async def test_the_wall_ceiling_holds_everywhere(bench: Bench, where: str) -> None:
    limits = Limits(init_s=1e5, run_s=1e5, grade_s=1e5, total_s=1e5, wall_s=100)
    if where == "queue":
        for _ in range(2):
            await bench.pools.place().to_init()
    if where == "grade_queue":
        for _ in range(2):
            await bench.pools.place().to_grade()
    if where == "run":
        bench.fakes.hooks.chat = hang
    if where == "paused":
        bench.fakes.hooks.chat = lambda: paused_for_ever(bench)
    if where == "grade":
        bench.fakes.graders.judges["exact"] = judge_after(bench, 1e4)
    attempt = await bench.until(bench.spawn(bench.runner(limits=limits)), step_s=10)
    assert attempt.failure is not None
    assert attempt.failure.kind is FailureKind.LIMIT
    assert "wall_s=100" in attempt.failure.message
    assert attempt.reward is None
    assert attempt.truncated_by is None
    assert bench.clock.monotonic() <= 110
    assert bench.fakes.leftovers == []


async def paused_for_ever(bench: Bench) -> None:
    with bench.fakes.gateway.sessions[0].spec.clock.pause():
        await hang()


# -- cancels
@pytest.mark.parametrize("stage", ["queue", "create", "open_session", "ready", "run", "grade_wait", "grade"])
async def test_a_cancel_leaves_nothing_in_any_stage(bench: Bench, stage: str) -> None:
    bench.fakes.graders.carry = ()
    blockers = [bench.pools.place() for _ in range(4)]
    if stage == "queue":
        for place in blockers[:2]:
            await place.to_init()
    if stage == "ready":
        for place in blockers:
            await place.to_init()
            place.to_ready()
            await place.to_run()
    if stage == "grade_wait":
        for place in blockers[:2]:
            await place.to_grade()
    if stage in ("create", "open_session"):
        setattr(bench.fakes.hooks, stage, hang)
    if stage == "run":
        bench.fakes.hooks.chat = hang
    if stage == "grade":
        bench.fakes.graders.judges["exact"] = judge_after(bench, 1e6)
    runner = bench.runner()
    task = bench.spawn(runner)
    await bench.clock.settle()
    assert not task.done()
    runner.cancel("not wanted")
    runner.cancel("not wanted any more")
    attempt = await bench.until(task)
    assert attempt.outcome is RolloutState.CANCELLED
    assert attempt.failure is not None
    assert attempt.failure.kind is FailureKind.CANCELLED
    assert attempt.failure.message == "not wanted"
    assert attempt.reward is None
    assert attempt.payload == "run/a"
    assert bench.fakes.leftovers == []
    for place in blockers:
        place.release()
    assert bench.free()
    assert bench.clock.timers == 0


@pytest.mark.parametrize("point", ["close_tools", "close_session", "close_sandbox"])
async def test_a_cancel_does_not_cut_a_release_short(bench: Bench, point: str) -> None:
    releasing, go = asyncio.Event(), asyncio.Event()
    done: list[int] = []

    async def slow() -> None:
        releasing.set()
        await go.wait()
        done.append(1)

    setattr(bench.fakes.hooks, point, slow)
    runner = bench.runner()
    task = bench.spawn(runner)
    await asyncio.wait_for(releasing.wait(), 10)
    runner.cancel("not wanted")
    await bench.clock.settle()
    go.set()
    attempt = await bench.until(task)
    assert attempt.outcome is RolloutState.CANCELLED
    assert done == [1]
    assert "release_errors" not in attempt.detail
    assert bench.fakes.leftovers == []
    assert bench.free()


async def test_a_cancel_before_the_first_step(bench: Bench) -> None:
    runner = bench.runner()
    task = bench.spawn(runner)
    runner.cancel("early")
    attempt = await bench.until(task)
    assert attempt.outcome is RolloutState.CANCELLED
    assert bench.fakes.runtime.made == []


async def test_a_cancel_while_it_is_ending_changes_nothing(bench: Bench) -> None:
    sealing, go = asyncio.Event(), asyncio.Event()

    async def seal() -> None:
        sealing.set()
        await go.wait()

    bench.fakes.hooks.seal = seal
    runner = bench.runner()
    task = bench.spawn(runner)
    await asyncio.wait_for(sealing.wait(), 10)
    runner.cancel("late")
    go.set()
    attempt = await bench.until(task)
    assert attempt.outcome is RolloutState.COMPLETED


async def test_an_abandoned_attempt_cleans_up_and_says_nothing(bench: Bench) -> None:
    bench.fakes.hooks.chat = hang
    runner = bench.runner()
    task = bench.spawn(runner)
    await bench.clock.settle()
    runner.abandon()
    assert await asyncio.wait_for(task, 10) is None
    assert bench.fakes.leftovers == []
    assert bench.fakes.payloads.sealed == {}
    (left,) = bench.fakes.payloads.left.values()  # what it did is the server's to salvage
    assert left.log
    assert bench.free()


async def test_a_task_cancelled_from_elsewhere_cleans_up_and_passes_it_on(bench: Bench) -> None:
    bench.fakes.hooks.chat = hang
    task = bench.spawn(bench.runner())
    await bench.clock.settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.fakes.leftovers == []
    assert bench.free()


# -- releases
@pytest.mark.parametrize("point", ["close_tools", "close_session", "close_sandbox"])
async def test_a_release_that_fails_is_recorded_and_masks_nothing(bench: Bench, point: str) -> None:
    setattr(bench.fakes.hooks, point, raising(RuntimeError("stuck mount")))
    attempt = await bench.play()
    assert attempt.outcome is RolloutState.COMPLETED
    assert attempt.reward == 1.0
    assert any("stuck mount" in error for error in attempt.detail["release_errors"])
    assert "release failed" in bench.log()
    assert bench.counters["release_errors"] >= 1
    assert bench.free() is (point != "close_sandbox")


@pytest.mark.parametrize("point", ["close_tools", "close_session", "close_sandbox"])
async def test_a_release_that_hangs_meets_its_deadline(bench: Bench, point: str) -> None:
    setattr(bench.fakes.hooks, point, hang)
    attempt = await bench.until(bench.spawn(bench.runner()))
    assert attempt.reward == 1.0
    assert any("not done within" in error for error in attempt.detail["release_errors"])
    assert bench.free() is (point != "close_sandbox")


async def test_a_slot_is_taken_until_its_sandbox_is_confirmed_gone(bench: Bench) -> None:
    tries: list[int] = []

    async def flaky() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise OSError("busy")

    bench.fakes.hooks.close_sandbox = flaky
    attempt = await bench.play()
    assert len(attempt.detail["release_errors"]) == 1
    ((left, closed),) = bench.unclosed
    assert bench.fakes.leftovers == [f"sandbox {left[0].id}"]
    assert bench.pools.occupancy()["run"] == 1
    await left[0].close()
    closed()
    closed()
    assert bench.fakes.leftovers == []
    assert bench.free()


# -- the grading sandbox, ahead
class Made:
    """Sandboxes by the order they were asked for."""

    def __init__(self, bench: Bench, *, hangs_at: int = 0, fails_at: int = 0) -> None:
        self.asked = 0
        self._hangs_at, self._fails_at = hangs_at, fails_at
        self.gate = asyncio.Event()
        bench.fakes.hooks.create = self._create

    async def _create(self) -> None:
        self.asked += 1
        if self.asked == self._fails_at:
            raise SandboxError("no room", operation="sandbox.start")
        if self.asked == self._hangs_at:
            await self.gate.wait()


async def test_the_grading_sandbox_is_started_while_the_agent_runs(bench: Bench) -> None:
    bench.fakes.graders.carry = ("/workspace",)
    made = Made(bench)

    async def slow() -> None:
        await bench.clock.settle()
        bench.fakes.journal(f"asked {made.asked}")

    bench.fakes.hooks.chat = slow
    attempt = await bench.play()
    assert attempt.reward == 1.0
    assert made.asked == 2
    assert "asked 2" in bench.fakes.journal.entries
    assert bench.counters["sandbox_starts"] == 2
    assert bench.fakes.leftovers == []


@pytest.mark.parametrize("ends", ["cancel", "fail"])
@pytest.mark.parametrize("hangs_at", [0, 2], ids=["made", "being made"])
async def test_a_grading_sandbox_that_nobody_takes_is_gone(bench: Bench, ends: str, hangs_at: int) -> None:
    bench.fakes.graders.carry = ("/workspace",)
    made = Made(bench, hangs_at=hangs_at)

    async def stops() -> None:
        await bench.clock.settle()
        if ends == "fail":
            raise RuntimeError("the agent broke")
        await hang()

    bench.fakes.hooks.chat = stops
    runner = bench.runner()
    task = bench.spawn(runner)
    await bench.clock.settle()
    assert made.asked == 2
    if ends == "cancel":
        runner.cancel("enough")
    attempt = await asyncio.wait_for(task, 10)
    assert attempt is not None
    assert attempt.reward is None
    assert bench.fakes.leftovers == []
    assert bench.free()


async def test_a_grading_sandbox_that_is_late_is_waited_for(bench: Bench) -> None:
    bench.fakes.graders.carry = ("/workspace",)
    made = Made(bench, hangs_at=2)
    task = bench.spawn(bench.runner())
    await bench.clock.settle()
    assert not task.done()
    made.gate.set()
    attempt = await asyncio.wait_for(task, 10)
    assert attempt is not None
    assert attempt.reward == 1.0
    assert made.asked == 2


async def test_a_grading_sandbox_that_failed_ahead_is_started_anew(bench: Bench) -> None:
    bench.fakes.graders.carry = ("/workspace",)
    made = Made(bench, fails_at=2)
    attempt = await bench.play()
    assert attempt.reward == 1.0
    assert made.asked == 3
    assert "no sandbox ahead" in bench.log()
    assert bench.fakes.leftovers == []


async def test_a_result_without_its_payload_is_none(bench: Bench) -> None:
    bench.fakes.hooks.seal = raising(OSError("disk full"))
    attempt = await bench.play()
    assert attempt.outcome is RolloutState.FAILED
    assert attempt.reward is None
    assert attempt.payload is None
    assert attempt.failure is not None
    assert attempt.failure.operation == "payload.seal"
    assert attempt.failure.kind is FailureKind.INFRASTRUCTURE


async def test_sealing_has_a_deadline(bench: Bench) -> None:
    bench.fakes.hooks.seal = hang
    attempt = await bench.until(bench.spawn(bench.runner()))
    assert attempt.failure is not None
    assert attempt.failure.operation == "payload.seal"


async def test_a_failed_seal_does_not_mask_an_earlier_failure(bench: Bench) -> None:
    bench.fakes.hooks.seal = raising(OSError("disk full"))
    bench.fakes.hooks.create = raising(SandboxError("gone", operation="sandbox.start"))
    attempt = await bench.play()
    assert attempt.failure is not None
    assert attempt.failure.operation == "sandbox.start"
    assert any("payload.seal" in error for error in attempt.detail["release_errors"])


async def test_a_line_that_can_not_be_written_fails_nothing(bench: Bench) -> None:
    bench.fakes.payloads.log_error = OSError("disk full")
    attempt = await bench.play()
    assert attempt.reward == 1.0
    assert attempt.detail["release_errors"] == ["log: disk full"]


@pytest.mark.parametrize("failing", [False, True])
async def test_the_run_sandbox_can_be_kept(bench: Bench, failing: bool) -> None:
    if failing:
        bench.fakes.hooks.chat = raising(BackendUnavailable("nobody", operation="chat"))
    attempt = await bench.play(keep_s=60)
    assert [sandbox.id for sandbox in bench.kept] == ["a-1"]
    assert attempt.detail["kept_sandbox"] == "a-1"
    assert [sandbox.id for sandbox in bench.fakes.runtime.open] == ["a-1"]


# -- many
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
