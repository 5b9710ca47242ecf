"""In which order, and how much at once, groups are handed over."""

from __future__ import annotations

import asyncio

from rollserve.records.control import DeliveryRule, FilterRule, GroupRule
from rollserve.records.rollout import GroupState
from rollserve.records.run import Run
from rollserve.rollouts.delivery import Wanted
from rollserve.testing.clock import FakeClock
from rollserve.testing.fakes_server import FakeExecutor, ended
from rollserve.testing.server_room import MakeRoom, Room

SUBMIT = DeliveryRule(order="submit", max_wait_s=60)


async def all_leased(room: Room, run: Run, **wanted: int) -> list[str]:
    delivered = await room.core.deliveries.lease(run.id, Wanted(trainer="t", **{"max_groups": 99} | wanted))
    return [group.group.id for group in delivered.groups]


async def end(room: Room, *indexes: int, reward: float = 1.0, sampled: int = 0) -> None:
    before = len(room.executor.acks)
    for index in indexes:
        start = room.executor.history[index]
        done = ended(start, reward=reward).model_copy(update={"counts": {"sampled_tokens": sampled}})
        room.executor.end(start.attempt_id, done)
    await room.until(lambda: len(room.executor.acks) == before + len(indexes))


async def test_ready_is_the_order_in_which_they_finish(room: Room) -> None:
    run = await room.run()
    groups = await room.submit(run, groups=4)
    await room.started(4)
    for index in (2, 0, 3, 1):
        await end(room, index)
    assert await all_leased(room, run) == [groups[index].id for index in (2, 0, 3, 1)]


async def test_submit_waits_for_earlier_ones(room: Room) -> None:
    run = await room.run(delivery=SUBMIT)
    groups = await room.submit(run, groups=4)
    await room.started(4)
    await end(room, 2, 1)
    assert await all_leased(room, run) == []
    assert (await room.core.groups.get(groups[1].id)).state is GroupState.HELD
    await end(room, 0)
    assert await all_leased(room, run) == [group.id for group in groups[:3]]
    await end(room, 3)
    assert await all_leased(room, run) == [groups[3].id]


async def test_it_does_not_wait_longer_than_it_may_nor_after_a_restart(make_room: MakeRoom) -> None:
    clock = FakeClock()
    async with make_room(FakeExecutor(), clock=clock) as room:
        run = await room.run(delivery=SUBMIT)
        groups = await room.submit(run, groups=3)
        await room.started(3)
        await end(room, 1)
        await clock.advance(30)
        await end(room, 2)
    async with make_room(FakeExecutor(), clock=clock) as room:
        await room.started(1)
        assert await all_leased(room, run) == []
        await clock.advance(31)

        async def released() -> bool:
            return (await room.core.groups.get(groups[1].id)).state is GroupState.FINISHED

        await room.until(released)
        assert await all_leased(room, run) == [groups[1].id]
        await clock.advance(30)
        await room.until(lambda: room.core.tally.counts().get("groups_finished") == 2)
        assert await all_leased(room, run) == [groups[2].id]


async def test_a_group_that_leaves_or_is_cut_short_holds_nobody_up(make_room: MakeRoom) -> None:
    clock = FakeClock()
    async with make_room(FakeExecutor(), clock=clock) as room:
        run = await room.run(delivery=SUBMIT, filters=(FilterRule(name="too_hard"),))
        dull, good = await room.submit(run, groups=2)
        [slow] = await room.submit(run, rule=GroupRule(deadline_s=5))
        [last] = await room.submit(run)
        await room.started(4)
        await end(room, 1, 3)
        await end(room, 0, reward=0.0)
        await room.until(lambda: room.core.tally.counts().get("groups_finished") == 1)
        assert (await room.core.groups.get(dull.id)).state is GroupState.FILTERED
        assert await all_leased(room, run) == [good.id]
        await clock.advance(6)
        await room.until(lambda: room.core.tally.counts().get("groups_finished") == 3)
        assert await all_leased(room, run) == [slow.id, last.id]


async def test_a_waiting_trainer_hears_of_a_released_group(make_room: MakeRoom) -> None:
    clock = FakeClock()
    async with make_room(FakeExecutor(), clock=clock) as room:
        run = await room.run(delivery=SUBMIT)
        groups = await room.submit(run, groups=2)
        await room.started(2)
        await end(room, 1)
        wanted = Wanted(trainer="t", max_groups=9, wait_s=20)
        waiting = asyncio.create_task(room.core.deliveries.lease(run.id, wanted))
        await room.until(lambda: room.core.deliveries.waiting == 1)
        await clock.advance(61)
        assert [group.group.id for group in (await waiting).groups] == [groups[1].id]


async def test_a_batch_may_be_bounded_by_tokens(room: Room) -> None:
    run = await room.run()
    groups = await room.submit(run, groups=5)
    await room.started(5)
    for index, sampled in enumerate((40, 50, 30, 500, 10)):
        await end(room, index, sampled=sampled)
    ids = [group.id for group in groups]
    assert await all_leased(room, run, max_tokens=100) == ids[:2]
    assert await all_leased(room, run, max_tokens=100) == ids[2:3]
    assert await all_leased(room, run, max_tokens=100) == ids[3:4]  # one group always goes
    assert await all_leased(room, run, max_tokens=100) == ids[4:]
