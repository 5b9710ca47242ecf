"""What goes wrong in an attempt: whose fault it is, by stage and kind."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from rollserve.agent.base import AgentResult, Episode
from rollserve.errors import AgentFailure, BackendUnavailable, FailureKind, InvalidInput, SandboxError
from rollserve.grader.base import Grade, Grading
from rollserve.records.rollout import RolloutState
from rollserve.records.run import RunSpec
from rollserve.testing.attempt_bench import AttemptBench as Bench
from rollserve.testing.fakes_worker import hang

from .conftest import raising


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


@pytest.mark.parametrize(("part", "kind"), [("agents", FailureKind.AGENT), ("graders", FailureKind.GRADER)])
async def test_user_code_that_was_broken_since_is_its_own_fault(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, part: str, kind: FailureKind
) -> None:
    async def resolve(_: object) -> None:
        raise InvalidInput("'mine:it' can't be loaded: SyntaxError", field="x.name")

    monkeypatch.setattr(getattr(bench.fakes, part), "resolve", resolve)
    attempt = await bench.play()
    assert attempt.failure is not None
    assert attempt.failure.kind is kind
    assert attempt.failure.message == "x.name: 'mine:it' can't be loaded: SyntaxError"
    assert "SyntaxError" in bench.log()
    assert bench.fakes.runtime.made == []


async def test_a_tool_that_was_broken_since_is_the_agents_fault(bench: Bench) -> None:
    bench.fakes.hooks.open_tools = raising(InvalidInput("no module named 'mine'", field="tools.0"))
    attempt = await bench.play()
    assert attempt.failure is not None
    assert attempt.failure.kind is FailureKind.AGENT
    assert bench.fakes.leftovers == []


async def test_a_failure_on_purpose_is_told_once(bench: Bench) -> None:
    """Its message has the traceback of the user's code; ours would only hide it."""

    async def fail(episode: Episode) -> AgentResult:
        raise AgentFailure("ValueError: no plan\nTraceback (most recent call last):\n  in plan()")

    bench.fakes.agents.plays["fail"] = fail
    attempt = await bench.play(agent="fail")
    assert attempt.failure is not None
    assert attempt.failure.message.endswith("in plan()")
    assert bench.log().count("Traceback") == 1
    assert bench.log().endswith("ended: ValueError: no plan")


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
    assert bench.fakes.payloads.kept["run/a"].artifacts == {"trace": b"t"}
    assert bench.fakes.leftovers == []


async def test_a_cancelled_error_of_the_agents_own_making_is_a_crash(bench: Bench) -> None:
    async def crash(episode: Episode) -> AgentResult:
        raise asyncio.CancelledError

    bench.fakes.agents.plays["crash"] = crash
    attempt = await bench.play(agent="crash")
    assert attempt.failure is not None
    assert attempt.failure.kind is FailureKind.AGENT


async def test_an_agent_must_return_a_result(bench: Bench) -> None:
    async def forgetful(episode: Episode) -> Any:
        """What a user's agent may do."""
        return None

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


async def test_a_result_without_its_payload_is_none(bench: Bench) -> None:
    bench.fakes.payloads.before_seal = raising(OSError("disk full"))
    attempt = await bench.play()
    assert attempt.outcome is RolloutState.FAILED
    assert attempt.reward is None
    assert attempt.payload is None
    assert attempt.failure is not None
    assert attempt.failure.operation == "payload.seal"
    assert attempt.failure.kind is FailureKind.INFRASTRUCTURE


async def test_sealing_has_a_deadline(bench: Bench) -> None:
    bench.fakes.payloads.before_seal = hang
    attempt = await bench.until(bench.spawn(bench.runner()))
    assert attempt.failure is not None
    assert attempt.failure.operation == "payload.seal"


async def test_a_failed_seal_does_not_mask_an_earlier_failure(bench: Bench) -> None:
    bench.fakes.payloads.before_seal = raising(OSError("disk full"))
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
