"""Graders that ask models: by routes of the run, in a session of their own."""

from __future__ import annotations

from rollserve.errors import BackendUnavailable, FailureKind
from rollserve.grader.base import Grade, Grading
from rollserve.records.call import Message
from rollserve.records.rollout import RolloutState
from rollserve.records.run import RouteSpec, RunSpec
from rollserve.testing.attempt_bench import AttemptBench as Bench

from .conftest import raising

QUESTION = [Message(role="user", content="right?")]
RUN = RunSpec(
    policy="p",
    routes={"judge": RouteSpec(policy="j", stages=("grade",)), "user": RouteSpec(policy="u")},
    failure_rewards={"limit": 0.0},
)


async def asks(grading: Grading) -> Grade:
    assert grading.model is not None
    reply = await grading.model.chat(QUESTION, model="judge")
    return Grade(reward=1.0, detail={"said": reply.message.content})


async def swallows(grading: Grading) -> Grade:
    assert grading.model is not None
    try:
        return await asks(grading)
    except Exception:
        return Grade(reward=0.0)


async def test_a_judge_is_asked_in_a_session_for_graders(bench: Bench) -> None:
    bench.fakes.graders.judges["asks"] = asks
    attempt = await bench.play(grader="asks", run=RUN)
    assert (attempt.reward, attempt.detail["grader"]) == (1.0, {"said": "ok"})
    agents, graders = bench.fakes.gateway.sessions
    assert (agents.spec.stage, graders.spec.stage) == ("run", "grade")
    assert agents.closed
    assert graders.closed
    assert attempt.counts["sampled_tokens"] == 6  # the judge's are the attempt's
    assert bench.fakes.leftovers == []


async def test_without_a_route_for_graders_there_is_no_model(bench: Bench) -> None:
    async def looks(grading: Grading) -> Grade:
        return Grade(reward=float(grading.model is None))

    bench.fakes.graders.judges["looks"] = looks
    attempt = await bench.play(grader="looks", run=RunSpec(policy="p", routes={"u": RouteSpec(policy="u")}))
    assert attempt.reward == 1.0
    assert len(bench.fakes.gateway.sessions) == 1


async def test_a_judge_that_fails_is_never_a_zero(bench: Bench) -> None:
    for name, grader in (("asks", asks), ("swallows", swallows)):
        bench.fakes.graders.judges[name] = grader

        async def then_fail(grading: Grading, name: str = name) -> Grade:
            bench.fakes.hooks.chat = raising(BackendUnavailable("gone", operation="pool.generate"))
            return await {"asks": asks, "swallows": swallows}[name](grading)

        async def works() -> None:
            return

        bench.fakes.hooks.chat = works
        bench.fakes.graders.judges["then_fail"] = then_fail
        attempt = await bench.play(name, grader="then_fail", run=RUN)
        assert (attempt.outcome, attempt.reward) == (RolloutState.FAILED, None)
        assert attempt.failure is not None
        assert attempt.failure.kind is FailureKind.GRADER
        assert "gone" in attempt.failure.message
    assert bench.fakes.leftovers == []


async def test_a_judge_that_never_answers_is_no_limit_of_the_agents(bench: Bench) -> None:
    async def never_judged(grading: Grading) -> Grade:
        async def waits() -> None:
            with bench.fakes.gateway.sessions[-1].spec.clock.pause():  # as for a backend that is not there
                await bench.clock.sleep(1e6)

        bench.fakes.hooks.chat = waits
        return await asks(grading)

    bench.fakes.graders.judges["never"] = never_judged
    task = bench.spawn(bench.runner(grader="never", run=RUN, limits={"wall_s": 60}))
    attempt = await bench.until(task)
    assert attempt.failure is not None
    assert (attempt.failure.kind, attempt.reward) == (FailureKind.GRADER, None)
    assert "wall" in attempt.failure.message
