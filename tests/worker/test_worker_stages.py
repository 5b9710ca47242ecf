"""Slots by stage, and the bounded ready buffer between init and run."""

from __future__ import annotations

import asyncio
import random

import pytest

from rollserve.rollouts.stages import Place, StagePools, StageSlots
from rollserve.testing.clock import FakeClock


def pools(*, init: int = 1, ready: int = 1, run: int = 1, grade: int = 1) -> StagePools:
    return StagePools(StageSlots(init=init, ready=ready, run=run, grade=grade))


async def admitted(place: Place) -> bool:
    task = asyncio.create_task(place.to_init())
    await FakeClock().settle()
    if task.done():
        return True
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return False


async def test_init_does_not_start_while_the_buffer_is_full() -> None:
    stages = pools(init=4, ready=1, run=1)
    places = [stages.place() for _ in range(2)]
    for place in places:
        await place.to_init()
        place.to_ready()
    await places[0].to_run()
    third = stages.place()
    waiting = asyncio.create_task(third.to_init())
    await FakeClock().settle()
    assert not waiting.done()
    assert stages.occupancy() == {
        "queued": 1,
        "init": 0,
        "ready": 1,
        "run": 1,
        "grade": 0,
        "grade_wait": 0,
    }
    places[0].release()
    await asyncio.wait_for(waiting, 10)


async def test_free_run_slots_count_as_room() -> None:
    stages = pools(init=4, ready=0, run=3)
    assert [await admitted(stages.place()) for _ in range(4)] == [True, True, True, False]


async def test_waits_are_first_come_first_served() -> None:
    stages = pools(init=1, ready=100)
    first = stages.place()
    await first.to_init()
    order: list[int] = []

    async def enter(number: int) -> None:
        place = stages.place()
        await place.to_init()
        order.append(number)
        place.release()

    tasks = [asyncio.create_task(enter(number)) for number in range(10)]
    await FakeClock().settle()
    first.release()
    await asyncio.wait_for(asyncio.gather(*tasks), 10)
    assert order == list(range(10))


@pytest.mark.parametrize("granted", [False, True])
async def test_a_cancelled_wait_takes_nothing(granted: bool) -> None:
    stages = pools()
    first = stages.place()
    await first.to_grade()
    second = asyncio.create_task(stages.place().to_grade())
    third = asyncio.create_task(stages.place().to_grade())
    await FakeClock().settle()
    if granted:
        first.release()  # grants to the second, which is cancelled before it can wake
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    if not granted:
        first.release()
    await asyncio.wait_for(third, 10)
    assert stages.occupancy()["grade"] == 1


async def test_a_cancelled_wait_for_run_stays_in_the_buffer() -> None:
    stages = pools()
    runner, waiter = stages.place(), stages.place()
    await runner.to_init()
    runner.to_ready()
    await runner.to_run()
    await waiter.to_init()
    waiter.to_ready()
    task = asyncio.create_task(waiter.to_run())
    await FakeClock().settle()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert stages.occupancy()["ready"] == 1
    waiter.release()
    assert stages.occupancy()["ready"] == 0


async def test_the_invariant_holds_whatever_happens() -> None:
    stages = pools(init=3, ready=2, run=4, grade=2)
    chance = random.Random(7)

    def check() -> None:
        seen = stages.occupancy()
        assert seen["init"] <= 3
        assert seen["run"] <= 4
        assert seen["grade"] <= 2
        assert seen["ready"] <= 2 + 4 - seen["run"]

    async def attempt() -> None:
        place = stages.place()
        try:
            await place.to_init()
            check()
            await asyncio.sleep(chance.random() * 0.002)
            place.to_ready()
            await place.to_run()
            check()
            await asyncio.sleep(chance.random() * 0.004)
            place.release()
            await place.to_grade()
            check()
            await asyncio.sleep(chance.random() * 0.001)
        finally:
            place.release()

    tasks = [asyncio.create_task(attempt()) for _ in range(300)]
    for task in chance.sample(tasks, 100):
        asyncio.get_running_loop().call_later(chance.random() * 0.05, task.cancel)
    done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
    assert all(result is None or isinstance(result, asyncio.CancelledError) for result in done)
    assert set(stages.occupancy().values()) == {0}
