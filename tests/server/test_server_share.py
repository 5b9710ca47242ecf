"""Who starts first: priority between runs, fair share among equals, pause of one and no other."""

from __future__ import annotations

from collections import Counter

from rollserve.records.run import Quota, Run, RunSpec
from rollserve.testing.fakes_server import FakeExecutor, ended
from rollserve.testing.server_room import MakeRoom, Room


async def started_by_run(room: Room, count: int) -> list[str]:
    """The runs of the first ``count`` starts, in order, as workers join one place at a time."""
    while len(room.executor.history) < count:
        before = len(room.executor.history)
        room.executor.join(capacity=1)
        await room.started(before + 1)
    return [start.run_id for start in room.executor.history[:count]]


async def another(room: Room, run: Run, **settings: object) -> Run:
    return await room.core.runs.open(RunSpec.model_validate({"policy": run.spec.policy, **settings}))


async def test_higher_priority_first_and_evaluation_before_training(make_room: MakeRoom) -> None:
    async with make_room(FakeExecutor(workers=0)) as room:
        low = await room.run(priority=-1)
        training = await another(room, low)
        evaluation = await another(room, low, purpose="evaluation")
        urgent = await another(room, low, priority=1)
        for run in (low, training, evaluation, urgent):
            await room.submit(run, rollouts=2)
        order = [urgent, evaluation, training, low]
        assert await started_by_run(room, 8) == [run.id for run in order for _ in range(2)]


async def test_equals_share_by_what_they_have_running(make_room: MakeRoom) -> None:
    async with make_room(FakeExecutor(workers=0)) as room:
        early = await room.run()
        await room.submit(early, rollouts=50)
        assert await started_by_run(room, 4) == [early.id] * 4
        late = await another(room, early)
        await room.submit(late, rollouts=50)
        assert Counter((await started_by_run(room, 8))[4:]) == {late.id: 4}
        assert Counter((await started_by_run(room, 16))[8:]) == {early.id: 4, late.id: 4}
        for start in room.executor.history[:4]:  # the early run's first end: it has fewer now
            room.executor.end(start.attempt_id, ended(start))
        await room.started(20)
        assert Counter(start.run_id for start in room.executor.history[16:20]) == {early.id: 4}


async def test_many_places_at_once_are_shared_in_one_step(make_room: MakeRoom) -> None:
    async with make_room(FakeExecutor(workers=0)) as room:
        first = await room.run()
        runs = [first, await another(room, first), await another(room, first)]
        for run in runs:
            await room.submit(run, groups=5, rollouts=8)
        room.executor.join(capacity=30)
        await room.started(30)
        counts = Counter(start.run_id for start in room.executor.history)
        assert counts == {run.id: 10 for run in runs}


async def test_what_a_run_may_not_take_goes_to_lower_ranks(make_room: MakeRoom) -> None:
    async with make_room(FakeExecutor(workers=0)) as room:
        low = await room.run()
        high = await another(room, low, priority=5, quota=Quota(max_running_rollouts=2))
        await room.submit(low, rollouts=8)
        await room.submit(high, rollouts=8)
        room.executor.join(capacity=6)
        await room.started(6)
        assert Counter(start.run_id for start in room.executor.history) == {high.id: 2, low.id: 4}


async def test_pausing_a_run_pauses_no_other(make_room: MakeRoom) -> None:
    async with make_room(FakeExecutor(workers=0)) as room:
        one = await room.run(priority=5)
        two = await another(room, one)
        await room.core.runs.pause(one.id)
        await room.submit(one, rollouts=2)
        await room.submit(two, rollouts=2)
        assert await started_by_run(room, 2) == [two.id] * 2
        await room.core.runs.resume(one.id)
        assert await started_by_run(room, 4) == [two.id] * 2 + [one.id] * 2


async def test_the_rank_survives_a_restart(make_room: MakeRoom) -> None:
    async with make_room(FakeExecutor(workers=0)) as room:
        low = await room.run()
        high = await another(room, low, priority=1)
        await room.submit(low, rollouts=2)
        await room.submit(high, rollouts=2)
    async with make_room(FakeExecutor(workers=0)) as room:
        assert await started_by_run(room, 4) == [high.id] * 2 + [low.id] * 2
