"""The grading sandbox, which is started while the agent runs."""

from __future__ import annotations

import asyncio

import pytest

from rollserve.errors import SandboxError
from rollserve.testing.attempt_bench import AttemptBench as Bench
from rollserve.testing.fakes_worker import hang


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
