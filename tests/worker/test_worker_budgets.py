"""An attempt's budgets: what burns them, and what comes of it when they are used up."""

from __future__ import annotations

import asyncio

import pytest

from rollserve.agent.base import AgentResult, Episode
from rollserve.errors import BackendUnavailable, ContextTooLong, FailureKind, LimitReached
from rollserve.gateway.base import Ending
from rollserve.grader.base import Grade, Grading
from rollserve.records.call import Message
from rollserve.records.rollout import RolloutState
from rollserve.records.task import Limits
from rollserve.testing.attempt_bench import AttemptBench as Bench
from rollserve.testing.fakes_worker import hang

from .conftest import judge_after, raising

ASK = [Message(role="user", content="hello")]


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
