"""Budgets in active time, and the ceiling that always holds."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from rollserve.errors import LimitReached
from rollserve.rollouts.clock import ActiveTimer, Deadline, SystemClock
from rollserve.testing.clock import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def timer(clock: FakeClock, *, total_s: float = 100, wall_s: float = 1000) -> ActiveTimer:
    return ActiveTimer(clock, total_s=total_s, wall_s=wall_s)


async def test_the_budget_cancels_the_body_at_its_end(clock: FakeClock) -> None:
    ended: list[float] = []

    async def body() -> None:
        with pytest.raises(LimitReached) as caught:
            async with timer(clock).limit("run_s", 10):
                await asyncio.Event().wait()
        assert caught.value.limit == "run_s"
        ended.append(clock.monotonic())

    task = asyncio.create_task(body())
    await clock.advance(9.9)
    assert not task.done()
    await clock.advance(0.2)
    await task
    assert ended == [10.0]


async def test_pauses_nest_overlap_and_cost_nothing(clock: FakeClock) -> None:
    active = timer(clock)

    async def body() -> None:
        async with active.limit("run_s", 10) as scope:
            await clock.sleep(3)
            with active.pause():
                await clock.sleep(50)
                with active.pause():
                    await clock.sleep(50)
                await clock.sleep(50)
            await clock.sleep(4)
        assert scope.used_s == pytest.approx(7)

    task = asyncio.create_task(body())
    await clock.advance(200)
    await task
    assert active.active_s == pytest.approx(7)


async def test_a_paused_budget_goes_on_where_it_stopped(clock: FakeClock) -> None:
    active = timer(clock)
    ended: list[float] = []

    async def body() -> None:
        with pytest.raises(LimitReached):
            async with active.limit("run_s", 10):
                await clock.sleep(6)
                with active.pause():
                    await clock.sleep(100)
                await asyncio.Event().wait()
        ended.append(clock.monotonic())

    task = asyncio.create_task(body())
    await clock.advance(200)
    await task
    assert ended == [pytest.approx(110.0)]


async def test_waiting_wakes_nobody(clock: FakeClock) -> None:
    """One timer a scope: no polling while a pause lasts."""
    active = timer(clock)

    async def body() -> None:
        async with active.limit("run_s", 10):
            with active.pause():
                await clock.sleep(500)

    task = asyncio.create_task(body())
    await clock.advance(400)
    assert clock.timers == 2
    await clock.advance(200)
    await task
    assert clock.timers == 0


async def test_total_runs_out_across_scopes(clock: FakeClock) -> None:
    active = timer(clock, total_s=15)

    async def body() -> str:
        async with active.limit("init_s", 10):
            await clock.sleep(9)
        await clock.sleep(500)
        try:
            async with active.limit("run_s", 10):
                await clock.sleep(9)
        except LimitReached as error:
            return error.limit
        return ""

    task = asyncio.create_task(body())
    await clock.advance(600)
    assert await task == "total_s"
    assert active.active_s == pytest.approx(15)


async def test_grading_is_not_within_the_total(clock: FakeClock) -> None:
    active = timer(clock, total_s=5)

    async def body() -> None:
        with pytest.raises(LimitReached):
            async with active.limit("run_s", 10):
                await clock.sleep(9)
        async with active.limit("grade_s", 10, within_total=False):
            await clock.sleep(9)

    task = asyncio.create_task(body())
    await clock.advance(30)
    await task


async def test_the_ceiling_holds_in_pauses_and_waits(clock: FakeClock) -> None:
    reached: list[tuple[str, float]] = []

    async def paused() -> None:
        active = timer(clock, wall_s=30)
        try:
            async with active.limit("run_s", 10):
                with active.pause():
                    await asyncio.Event().wait()
        except LimitReached as error:
            reached.append((error.limit, clock.monotonic()))

    async def waiting() -> None:
        try:
            async with timer(clock, wall_s=40).ceiling():
                await asyncio.Event().wait()
        except LimitReached as error:
            reached.append((error.limit, clock.monotonic()))

    tasks = [asyncio.create_task(paused()), asyncio.create_task(waiting())]
    await clock.advance(100)
    await asyncio.gather(*tasks)
    assert reached == [("wall_s", 30.0), ("wall_s", 40.0)]


async def test_a_used_up_budget_is_refused_at_the_door(clock: FakeClock) -> None:
    active = timer(clock)
    entered = False
    with pytest.raises(LimitReached):
        async with active.limit("run_s", 0):
            entered = True
    assert not entered


async def test_a_cancel_from_outside_is_not_taken_for_a_limit(clock: FakeClock) -> None:
    async def body() -> None:
        async with timer(clock).limit("run_s", 10):
            await asyncio.Event().wait()

    task = asyncio.create_task(body())
    await clock.settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert clock.timers == 0


async def test_a_cancel_during_a_limits_own_wins(clock: FakeClock) -> None:
    async def body() -> None:
        async with timer(clock).limit("run_s", 10):
            try:
                await asyncio.Event().wait()
            finally:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()

    task = asyncio.create_task(body())
    await clock.advance(11)
    assert not task.done()
    task.cancel()
    await clock.settle()
    assert task.cancelled()


async def test_deadline(clock: FakeClock) -> None:
    async def body() -> None:
        async with Deadline(clock, 5):
            await clock.sleep(4)
        with pytest.raises(TimeoutError):
            async with Deadline(clock, 5):
                await clock.sleep(6)

    task = asyncio.create_task(body())
    await clock.advance(20)
    await task


async def test_the_system_clock_calls_back_and_sleeps() -> None:
    clock = SystemClock()
    called = asyncio.Event()
    clock.call_later(0, called.set)
    await asyncio.wait_for(called.wait(), 10)
    before = clock.monotonic()
    await clock.sleep(0.001)
    assert clock.monotonic() > before
    assert clock.now() > 1_600_000_000
