from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from rollserve.grader.base import Grade, Grading
from rollserve.records.task import Limits
from rollserve.testing.attempt_bench import AttemptBench


@pytest.fixture
async def bench() -> AsyncIterator[AttemptBench]:
    bench = AttemptBench()
    yield bench
    for task in bench.tasks:
        task.cancel()
    await asyncio.gather(*bench.tasks, return_exceptions=True)


@pytest.fixture
def tight() -> Limits:
    return Limits(init_s=10, run_s=20, grade_s=5, total_s=100, wall_s=1000)


def raising(error: Exception) -> Callable[[], Awaitable[None]]:
    async def hook() -> None:
        raise error

    return hook


def judge_after(bench: AttemptBench, seconds: float) -> Callable[[Grading], Awaitable[Grade]]:
    async def judge(grading: Grading) -> Grade:
        await bench.clock.sleep(seconds)
        return Grade(reward=0.0)

    return judge
