from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from rollserve.config import ApiSettings, Settings
from rollserve.errors import Conflict, FailureKind, LeaseLost, NotFound, QueueFull, StaleEpoch
from rollserve.records.run import Run
from rollserve.rollouts import delivery
from rollserve.rollouts.delivery import Delivered, Wanted
from rollserve.store.payload import AttemptPayload
from rollserve.testing.clock import FakeClock
from rollserve.testing.fake_payloads import FakePayloads
from rollserve.testing.fakes_server import FakeExecutor, a_call, completes, ended, failed, fails
from rollserve.testing.server_room import MakeRoom, Room

NOW = Wanted(trainer="t", max_groups=100)
SOON = Wanted(trainer="t", max_groups=100, wait_s=20)


@pytest.fixture
async def room(make_room: MakeRoom) -> AsyncIterator[Room]:
    """Every attempt completes at once, with a call of 4 prompt and 3 sampled tokens."""
    payloads = FakePayloads()
    async with make_room(FakeExecutor(play=completes(payloads)), payloads=payloads) as room:
        yield room


async def finished(room: Room, groups: int = 1, rollouts: int = 1) -> Run:
    run = await room.run()
    await room.submit(run, groups=groups, rollouts=rollouts)
    await all_finished(room, run, groups)
    return run


async def all_finished(room: Room, run: Run, groups: int) -> None:
    async def met() -> bool:
        return (await room.core.runs.counts(run.id))["groups_finished"] == groups

    await room.until(met)


def ids(delivered: Delivered) -> list[str]:
    return [group.group.id for group in delivered.groups]


async def test_a_group_comes_with_its_rollouts_and_samples(room: Room) -> None:
    run = await finished(room, rollouts=3)
    await room.core.policies.set_version("pol", 7, None)
    delivered = await room.core.deliveries.lease(run.id, NOW)
    [group] = delivered.groups
    assert [rollout.rollout.index for rollout in group.rollouts] == [0, 1, 2]
    [sample] = group.rollouts[2].samples
    assert sample.ids.tolist() == [0, 1, 2, 3, 100, 101, 102]
    assert sample.loss_mask.tolist() == [False] * 4 + [True] * 3
    assert np.allclose(sample.rewards, [0, 0, 0, 0, 0, 0, 1])
    assert delivered.policy_version == 7


async def test_a_request_waits_for_the_first_group(room: Room) -> None:
    run = await room.run()
    waiting = asyncio.create_task(room.core.deliveries.lease(run.id, SOON))
    await room.until(lambda: room.core.deliveries.waiting == 1)
    [group] = await room.submit(run)
    assert ids(await waiting) == [group.id]
    assert room.core.deliveries.waiting == 0


async def test_nothing_in_time_is_an_answer_without_lease(room: Room) -> None:
    run = await room.run()
    delivered = await room.core.deliveries.lease(run.id, Wanted(trainer="t", wait_s=0.01))
    assert (delivered.lease, delivered.groups) == (None, [])


async def test_waiting_requests_are_answered_when_the_server_stops(room: Room) -> None:
    run = await room.run()
    waiting = asyncio.create_task(room.core.deliveries.lease(run.id, SOON))
    await room.until(lambda: room.core.deliveries.waiting == 1)
    room.core.begin_stop()
    assert (await waiting).lease is None


async def test_a_request_that_is_cancelled_takes_nothing(room: Room) -> None:
    run = await room.run()
    reading = asyncio.Event()
    at_once = room.payloads.before_read

    async def slow() -> None:
        reading.set()
        await asyncio.sleep(60)

    room.payloads.before_read = slow
    waiting = asyncio.create_task(room.core.deliveries.lease(run.id, SOON))
    [group] = await room.submit(run)
    await reading.wait()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    room.payloads.before_read = at_once
    assert ids(await room.core.deliveries.lease(run.id, NOW)) == [group.id]


async def test_too_many_waiting_trainers_are_told_at_once(make_room: MakeRoom) -> None:
    settings = Settings(api=ApiSettings(max_waiting_leases=1))
    async with make_room(FakeExecutor(), settings=settings) as room:
        run = await room.run()
        waiting = asyncio.create_task(room.core.deliveries.lease(run.id, SOON))
        await room.until(lambda: room.core.deliveries.waiting == 1)
        with pytest.raises(QueueFull):
            await room.core.deliveries.lease(run.id, SOON)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_ack_commit_and_rewind(room: Room) -> None:
    run = await finished(room, groups=3)
    deliveries = room.core.deliveries
    one = Wanted(trainer="t", max_groups=1)
    await room.core.policies.set_version("pol", 1, None)
    first = await deliveries.lease(run.id, one)
    assert first.lease is not None
    await deliveries.ack(first.lease.id)
    await deliveries.ack(first.lease.id)
    checkpoint = await deliveries.commit(run.id, "t", first.lease.epoch, name="c1", cursor="17")
    assert (checkpoint.policy_version, checkpoint.cursor) == (1, "17")
    await room.core.policies.set_version("pol", 2, None)
    second = await deliveries.lease(run.id, one)
    assert second.lease is not None
    await deliveries.ack(second.lease.id)
    third = await deliveries.lease(run.id, one)
    assert third.lease is not None
    views = len(room.executor.views)

    epoch, version, back = await deliveries.rewind(run.id, "t", "c1")
    assert (epoch, version, back) == (first.lease.epoch + 1, 1, checkpoint)
    assert room.executor.views[views].policy().version == 1
    with pytest.raises((LeaseLost, StaleEpoch)):
        await deliveries.ack(third.lease.id)
    with pytest.raises(StaleEpoch):
        await deliveries.lease(run.id, Wanted(trainer="t", epoch=first.lease.epoch))
    again = await deliveries.lease(run.id, NOW)
    assert ids(again) == [*ids(second), *ids(third)]
    assert (await deliveries.checkpoints(run.id, "t")).items == [checkpoint]


async def test_a_checkpoint_that_never_was(room: Room) -> None:
    run = await finished(room)
    with pytest.raises(NotFound):
        await room.core.deliveries.rewind(run.id, "t", "nope")
    with pytest.raises(LeaseLost):
        await room.core.deliveries.ack("lea_never")


async def test_what_is_given_back_wakes_those_who_wait(room: Room) -> None:
    run = await finished(room)
    first = await room.core.deliveries.lease(run.id, NOW)
    waiting = asyncio.create_task(room.core.deliveries.lease(run.id, SOON))
    await room.until(lambda: room.core.deliveries.waiting == 1)
    assert first.lease is not None
    await room.core.deliveries.nack(first.lease.id)
    assert ids(await waiting) == ids(first)


async def test_an_expired_lease_gives_back_by_itself(make_room: MakeRoom) -> None:
    clock, payloads = FakeClock(), FakePayloads()
    executor = FakeExecutor(play=completes(payloads))
    async with make_room(executor, payloads=payloads, clock=clock) as room:
        run = await finished(room)
        first = await room.core.deliveries.lease(run.id, Wanted(trainer="t", ttl_s=30))
        assert first.lease is not None
        await clock.advance(20)
        await room.core.deliveries.renew(first.lease.id, 30)
        await clock.advance(20)
        assert (await room.core.deliveries.lease(run.id, NOW)).lease is None
        waiting = asyncio.create_task(room.core.deliveries.lease(run.id, SOON))
        await room.until(lambda: room.core.deliveries.waiting == 1)

        async def answered() -> bool:
            await clock.advance(2)
            return waiting.done()

        await room.until(answered)
        assert ids(await waiting) == ids(first)
        with pytest.raises(LeaseLost):
            await room.core.deliveries.ack(first.lease.id)


async def test_an_unreadable_payload_costs_its_samples_and_not_the_group(room: Room) -> None:
    run = await finished(room, rollouts=2)
    room.payloads.unreadable.add(next(iter(room.payloads.kept)))
    [group] = (await room.core.deliveries.lease(run.id, NOW)).groups
    assert sorted(len(rollout.samples) for rollout in group.rollouts) == [0, 1]
    [note] = [rollout.note for rollout in group.rollouts if not rollout.samples]
    assert note is not None
    assert "bad block" in note


async def test_failed_rollouts_have_no_samples_unless_their_failure_has_a_reward(room: Room) -> None:
    run = await room.run(failure_rewards={"agent": -1.0})
    for kind in (FailureKind.AGENT, FailureKind.LIMIT):
        room.executor.play = None
        before = len(room.executor.history)
        await room.submit(run)
        await room.started(before + 1)
        start = room.executor.history[-1]
        ref = room.payloads.keep(start.attempt_id, AttemptPayload(calls=[a_call()]))
        room.executor.end(start.attempt_id, ended(start, failure=failed(kind), payload=ref))
    await all_finished(room, run, 2)
    crashed, limited = (await room.core.deliveries.lease(run.id, NOW)).groups
    assert [(len(r.samples), r.rollout.reward) for r in crashed.rollouts] == [(1, -1.0)]
    assert [(len(r.samples), r.rollout.reward) for r in limited.rollouts] == [(0, None)]
    assert limited.rollouts[0].note is None


async def test_an_answer_is_bounded_and_the_rest_comes_next(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await finished(room, groups=5)
    monkeypatch.setattr(delivery, "MAX_ANSWER_BYTES", 300)  # a group is 7 tokens of 17 bytes
    first = await room.core.deliveries.lease(run.id, NOW)
    assert first.lease is not None
    assert len(first.groups) == 2
    assert first.lease.group_ids == ids(first)
    second = await room.core.deliveries.lease(run.id, NOW)
    monkeypatch.setattr(delivery, "MAX_ANSWER_BYTES", 1)
    third = await room.core.deliveries.lease(run.id, NOW)
    assert [len(second.groups), len(third.groups)] == [2, 1]
    assert len({*ids(first), *ids(second), *ids(third)}) == 5


async def test_two_trainers_each_get_the_whole_log(room: Room) -> None:
    run = await finished(room, groups=2)
    one = await room.core.deliveries.lease(run.id, NOW)
    two = await room.core.deliveries.lease(run.id, Wanted(trainer="other"))
    assert ids(one) == ids(two)


async def test_concurrent_requests_of_a_trainer_share_the_log(room: Room) -> None:
    run = await finished(room, groups=40)
    wanted = Wanted(trainer="t", max_groups=3)
    answers = await asyncio.gather(*(room.core.deliveries.lease(run.id, wanted) for _ in range(20)))
    taken = [group for answer in answers for group in ids(answer)]
    assert len(taken) == len(set(taken)) == 40


async def test_a_committed_name_is_not_used_twice(room: Room) -> None:
    run = await finished(room, groups=2)
    one = Wanted(trainer="t", max_groups=1)
    for _ in range(2):
        leased = await room.core.deliveries.lease(run.id, one)
        assert leased.lease is not None
        await room.core.deliveries.ack(leased.lease.id)
        if not (await room.core.deliveries.checkpoints(run.id, "t")).items:
            await room.core.deliveries.commit(run.id, "t", 0, name="c", cursor=None)
    with pytest.raises(Conflict):
        await room.core.deliveries.commit(run.id, "t", 0, name="c", cursor=None)


async def test_a_group_of_failures_is_delivered_too(room: Room) -> None:
    room.executor.play = fails(failed(FailureKind.AGENT))
    run = await finished(room)
    [group] = (await room.core.deliveries.lease(run.id, NOW)).groups
    assert group.rollouts[0].rollout.failure is not None
