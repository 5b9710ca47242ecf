from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

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
