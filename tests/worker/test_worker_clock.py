"""Budgets in active time, and the ceiling that always holds."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from rollserve.errors import BackendUnavailable, LimitReached
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


# -- time given back
async def test_a_refund_moves_the_end_of_run_and_total(clock: FakeClock) -> None:
    ended: dict[str, float] = {}

    async def body(active: ActiveTimer) -> None:
        try:
            async with active.limit("run_s", 10) as scope:
                refund = active.refundable()
                await clock.sleep(8)
                refund()
                assert active.active_s == pytest.approx(0)
                await asyncio.Event().wait()
        except LimitReached as error:
            assert scope.used_s == pytest.approx(min(10, active.total_s))
            ended[error.limit] = clock.monotonic()

    tasks = [asyncio.create_task(body(timer(clock, total_s=total_s))) for total_s in (100, 9)]
    await clock.advance(30)
    await asyncio.gather(*tasks)
    assert ended == pytest.approx({"total_s": 17, "run_s": 18})
    assert clock.timers == 0


async def test_refunds_that_overlap_are_given_once(clock: FakeClock) -> None:
    active = timer(clock)

    async def body() -> None:
        async with active.limit("run_s", 90) as scope:
            await clock.sleep(1)
            long = active.refundable()
            await clock.sleep(2)
            first = active.refundable()
            await clock.sleep(3)
            first()
            assert active.active_s == pytest.approx(3)
            await clock.sleep(4)
            late = active.refundable()
            await clock.sleep(5)
            late()
            late()
            assert active.active_s == pytest.approx(7)
            long()
            assert active.active_s == pytest.approx(1)
            await clock.sleep(6)
        assert scope.used_s == pytest.approx(7)

    task = asyncio.create_task(body())
    await clock.advance(30)
    await task
    assert active.active_s == pytest.approx(7)


async def test_what_was_not_charged_is_not_given_back(clock: FakeClock) -> None:
    active = timer(clock)

    async def body() -> None:
        async with active.limit("run_s", 90):
            await clock.sleep(5)
            refund = active.refundable()
            with active.pause():
                await clock.sleep(50)
            await clock.sleep(2)
            refund()

    task = asyncio.create_task(body())
    await clock.advance(60)
    await task
    assert active.active_s == pytest.approx(5)


async def test_the_ceiling_gives_nothing_back(clock: FakeClock) -> None:
    active = timer(clock, wall_s=30)

    async def body() -> str:
        try:
            async with active.limit("run_s", 20):
                while True:
                    refund = active.refundable()
                    await clock.sleep(5)
                    refund()
        except LimitReached as error:
            return error.limit

    task = asyncio.create_task(body())
    await clock.advance(60)
    assert await task == "wall_s"
    assert clock.timers == 0


# -- whose time it was
async def test_a_judge_is_asked_while_the_body_goes_on_and_charged_to_nothing(clock: FakeClock) -> None:
    active = timer(clock)
    asked: list[float] = []
    ended: list[float] = []

    async def judge() -> None:
        asked.append(clock.monotonic())
        await clock.sleep(5)

    async def body() -> None:
        with pytest.raises(LimitReached) as caught:
            async with active.limit("run_s", 10, judge=judge) as scope:
                await asyncio.Event().wait()
        assert caught.value.limit == "run_s"
        assert scope.used_s == pytest.approx(10)
        ended.append(clock.monotonic())

    task = asyncio.create_task(body())
    await clock.advance(14.9)
    assert not task.done()
    await clock.advance(1)
    await task
    assert (asked, ended) == ([10.0], [15.0])
    assert active.active_s == pytest.approx(10)
    assert clock.timers == 0


async def test_a_verdict_is_raised_instead_of_the_limit(clock: FakeClock) -> None:
    verdict = BackendUnavailable("b1 was silent")

    async def judge() -> BackendUnavailable:
        return verdict

    async def body() -> None:
        with pytest.raises(BackendUnavailable) as caught:
            async with timer(clock).limit("run_s", 10, judge=judge):
                await asyncio.Event().wait()
        assert caught.value is verdict

    task = asyncio.create_task(body())
    await clock.advance(11)
    await task


async def test_a_body_that_ends_while_the_judge_thinks_has_ended(clock: FakeClock) -> None:
    thinking: list[str] = []

    async def judge() -> None:
        try:
            await clock.sleep(5)
        except asyncio.CancelledError:
            thinking.append("stopped")
            raise

    async def body() -> str:
        async with timer(clock).limit("run_s", 10, judge=judge):
            await clock.sleep(12)
        return "done"

    task = asyncio.create_task(body())
    await clock.advance(20)
    assert await task == "done"
    assert thinking == ["stopped"]
    assert clock.timers == 0


async def test_a_refund_while_the_judge_thinks_lets_the_body_go_on(clock: FakeClock) -> None:
    active = timer(clock)
    asked: list[float] = []
    ended: list[float] = []

    async def judge() -> None:
        asked.append(clock.monotonic())
        await clock.sleep(2)

    async def body() -> None:
        with pytest.raises(LimitReached):
            async with active.limit("run_s", 10, judge=judge):
                await clock.sleep(4)
                refund = active.refundable()
                await clock.sleep(7)
                refund()
                await asyncio.Event().wait()
        ended.append(clock.monotonic())

    task = asyncio.create_task(body())
    await clock.advance(40)
    await task
    assert asked == [10.0, pytest.approx(18.0)]
    assert ended == [pytest.approx(20.0)]


async def test_the_ceiling_waits_for_no_judge(clock: FakeClock) -> None:
    async def judge() -> None:
        await asyncio.Event().wait()

    async def body() -> str:
        try:
            async with timer(clock, wall_s=15).limit("run_s", 10, judge=judge):
                await asyncio.Event().wait()
        except LimitReached as error:
            return error.limit
        return ""

    task = asyncio.create_task(body())
    await clock.advance(16)
    assert await task == "wall_s"
    assert clock.timers == 0


async def test_a_cancel_while_the_judge_thinks_is_a_cancel(clock: FakeClock) -> None:
    async def judge() -> None:
        await asyncio.Event().wait()

    async def body() -> None:
        async with timer(clock).limit("run_s", 10, judge=judge):
            await asyncio.Event().wait()

    task = asyncio.create_task(body())
    await clock.advance(11)
    task.cancel()
    await clock.settle()
    assert task.cancelled()
    assert clock.timers == 0


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
