"""What an attempt holds is freed with it, however it ends, and not when the collector comes by."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable

import pytest

from rollserve.agent.base import AgentResult, Episode
from rollserve.errors import FailureKind, LimitReached
from rollserve.grader.base import Grade, Grading
from rollserve.records.rollout import RolloutState
from rollserve.rollouts.clock import ActiveTimer
from rollserve.testing.attempt_bench import AttemptBench as Bench
from rollserve.testing.clock import FakeClock
from rollserve.testing.fakes_worker import hang


def plain(bench: Bench) -> None:
    """As the fakes do: graded."""


def crashing(bench: Bench) -> None:
    async def crash(episode: Episode) -> AgentResult:
        raise ValueError(episode.task.instruction)

    bench.fakes.agents.plays["tool"] = crash


def limited(bench: Bench) -> None:
    async def stop(episode: Episode) -> AgentResult:
        raise LimitReached("max_turns", episode.task.instruction)

    bench.fakes.agents.plays["tool"] = stop


def ungraded(bench: Bench) -> None:
    async def crash(grading: Grading) -> Grade:
        raise ValueError(grading.answer)

    bench.fakes.graders.judges["exact"] = crash


@pytest.mark.parametrize(
    ("prepare", "kind"),
    [
        (plain, None),
        (crashing, FailureKind.AGENT),
        (limited, None),
        (ungraded, FailureKind.GRADER),
    ],
)
@pytest.mark.usefixtures("no_collector")
async def test_an_ended_attempt_is_freed_without_the_collector(
    bench: Bench, prepare: Callable[[Bench], None], kind: FailureKind | None
) -> None:
    prepare(bench)
    runner = bench.runner()
    held = weakref.ref(runner)
    attempt = await bench.spawn(runner)
    assert attempt is not None
    assert (attempt.failure.kind if attempt.failure else None) == kind
    del runner
    bench.tasks.clear()
    await asyncio.sleep(0)
    assert held() is None


@pytest.mark.usefixtures("no_collector")
async def test_a_cancelled_attempt_is_freed_without_the_collector(bench: Bench) -> None:
    bench.fakes.hooks.chat = hang
    runner = bench.runner()
    held = weakref.ref(runner)
    running = bench.spawn(runner)
    while not bench.fakes.gateway.generating:
        await asyncio.sleep(0)
    runner.cancel("enough")
    attempt = await running
    assert attempt is not None
    assert attempt.outcome is RolloutState.CANCELLED
    del runner, running
    bench.tasks.clear()
    await asyncio.sleep(0)
    assert held() is None


@pytest.mark.usefixtures("no_collector")
async def test_a_timer_is_freed_without_the_collector() -> None:
    timer = ActiveTimer(FakeClock(), total_s=10, wall_s=10)
    async with timer.limit("run_s", 5):
        with timer.pause():
            assert timer.paused
    held = weakref.ref(timer)
    del timer
    assert held() is None
