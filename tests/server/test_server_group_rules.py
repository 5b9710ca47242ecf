"""Groups as objects: when they are over, whatever their slowest rollout does."""

from __future__ import annotations

import asyncio

import pytest

from rollserve.config import ApiSettings, Settings
from rollserve.errors import FailureKind, InvalidInput
from rollserve.executor.base import StartAttempt
from rollserve.records.control import GroupRule
from rollserve.records.rollout import Group, GroupState, Rollout, RolloutState
from rollserve.records.run import RetrySettings, Run
from rollserve.rollouts.delivery import Delivered, Wanted
from rollserve.store.payload import AttemptPayload
from rollserve.testing.clock import FakeClock
from rollserve.testing.fake_payloads import FakePayloads
from rollserve.testing.fakes_server import FakeExecutor, a_call, ended, failed
from rollserve.testing.server_room import MakeRoom, Room

SOON = Wanted(trainer="t", max_groups=100, wait_s=20)


def completes(room: Room, start: StartAttempt, reward: float = 1.0) -> None:
    ref = room.payloads.keep(start.attempt_id, AttemptPayload(calls=[a_call()]))
    attempt = ended(start, reward=reward, payload=ref)
    room.executor.end(start.attempt_id, attempt.model_copy(update={"counts": {"sampled_tokens": 3}}))


def crashes(room: Room, start: StartAttempt) -> None:
    room.executor.end(start.attempt_id, ended(start, failure=failed(FailureKind.AGENT, "crash")))


async def reached(room: Room, group: Group, state: GroupState) -> Group:
    async def met() -> bool:
        return (await room.core.groups.get(group.id)).state is state

    await room.until(met)
    return await room.core.groups.get(group.id)


async def codes(room: Room, group: Group) -> list[str | None]:
    rollouts = await room.core.groups.rollouts_of(group.id)
    return [rollout.failure.code if rollout.failure else None for rollout in rollouts]


async def lease(room: Room, run: Run) -> Delivered:
    return await room.core.deliveries.lease(run.id, SOON)


async def test_oversampled_rollouts_stop_once_enough_are_usable(room: Room) -> None:
    run = await room.run(groups=GroupRule(oversample=2))
    [group] = await room.submit(run, rollouts=3)
    await room.started(5)
    first, second, third, *rest = room.executor.history
    crashes(room, second)
    completes(room, first)
    completes(room, third)
    await room.until(lambda: len(room.executor.acks) == 3)
    assert (await room.core.groups.get(group.id)).state is GroupState.OPEN
    completes(room, rest[0])
    done = await reached(room, group, GroupState.FINISHED)
    assert (done.total, done.usable) == (5, 3)
    assert [cancel.attempt_id for cancel in room.executor.cancels] == [rest[1].attempt_id]
    assert await codes(room, group) == [None, "crash", None, None, "redundant"]
    [delivered] = (await lease(room, run)).groups
    assert [len(rollout.samples) for rollout in delivered.rollouts] == [1, 0, 1, 1, 0]


async def test_a_late_end_of_a_stopped_rollout_is_fenced_and_its_slot_comes_free(make_room: MakeRoom) -> None:
    async with make_room(FakeExecutor(capacity=2)) as room:
        run = await room.run(groups=GroupRule(oversample=1))
        [group] = await room.submit(run, rollouts=1)
        await room.started(2)
        winner, late = room.executor.history
        completes(room, winner, reward=0.5)
        await reached(room, group, GroupState.FINISHED)
        await room.submit(run, rollouts=1)
        await room.started(3)
        completes(room, late, reward=1.0)
        await room.started(4)
        [_, loser] = await room.core.groups.rollouts_of(group.id)
        assert (loser.state, loser.reward) == (RolloutState.CANCELLED, None)
        [history] = (await room.core.groups.attempts(loser.id)).items
        assert "fenced" in history.detail
        bins = (await room.core.runs.bins(run.id))["tokens"]
        assert (bins["redundant"].tokens, bins["waiting"].tokens) == (3, 3)


async def test_a_slow_sibling_cant_hold_a_group_past_its_deadline(make_room: MakeRoom) -> None:
    clock = FakeClock()
    async with make_room(FakeExecutor(capacity=4), clock=clock) as room:
        run = await room.run(groups=GroupRule(deadline_s=60))
        [group] = await room.submit(run, rollouts=3)
        await room.started(3)
        slow, fast, broken = room.executor.history
        completes(room, fast)
        crashes(room, broken)
        await room.until(lambda: len(room.executor.acks) == 2)
        await clock.advance(59)
        assert (await room.core.groups.get(group.id)).state is GroupState.OPEN
        await clock.advance(2)
        done = await reached(room, group, GroupState.FINISHED)
        assert (done.usable, done.num_rollouts) == (1, 3)
        assert await codes(room, group) == ["deadline", None, "crash"]
        assert [cancel.attempt_id for cancel in room.executor.cancels] == [slow.attempt_id]
        [delivered] = (await lease(room, run)).groups
        assert [len(rollout.samples) for rollout in delivered.rollouts] == [0, 1, 0]


async def test_a_deadline_counts_from_the_first_start_not_from_the_queue(make_room: MakeRoom) -> None:
    clock = FakeClock()
    async with make_room(FakeExecutor(workers=0), clock=clock) as room:
        run = await room.run(groups=GroupRule(deadline_s=60))
        [group] = await room.submit(run, rollouts=2)
        await clock.advance(600)
        room.executor.join(capacity=1)
        await room.started(1)
        started = await room.core.groups.get(group.id)
        assert started.deadline_at == pytest.approx(clock.now() + 60, abs=1)
        await clock.advance(61)
        await reached(room, group, GroupState.CANCELLED)
        assert await codes(room, group) == ["deadline", "deadline"]


async def test_a_deadline_holds_after_a_restart(make_room: MakeRoom) -> None:
    clock = FakeClock()
    async with make_room(FakeExecutor(), clock=clock) as room:
        run = await room.run(groups=GroupRule(deadline_s=60))
        [group] = await room.submit(run, rollouts=2)
        [other] = await room.submit(run, rollouts=1)
        await room.started(3)
        completes(room, room.executor.history[0])
        await room.until(lambda: room.executor.acks)
    async with make_room(FakeExecutor(), clock=clock) as room:
        await room.started(2)  # they run again, and hang
        await clock.advance(61)
        assert (await reached(room, group, GroupState.FINISHED)).usable == 1
        assert (await reached(room, other, GroupState.CANCELLED)).usable == 0
        assert len(room.executor.cancels) == 2


async def test_a_deadline_that_passed_while_the_server_was_down(make_room: MakeRoom) -> None:
    clock = FakeClock()
    async with make_room(FakeExecutor(), clock=clock) as room:
        run = await room.run(groups=GroupRule(deadline_s=60))
        [group] = await room.submit(run, rollouts=1)
        await room.started(1)
    await clock.advance(3600)
    async with make_room(FakeExecutor(workers=0), clock=clock) as room:
        await reached(room, group, GroupState.CANCELLED)


async def test_stragglers_are_cancelled_once_enough_are_usable(room: Room) -> None:
    run = await room.run(groups=GroupRule(min_usable=2, stragglers="cancel"))
    [group] = await room.submit(run, rollouts=4)
    await room.started(4)
    completes(room, room.executor.history[3])
    completes(room, room.executor.history[1])
    done = await reached(room, group, GroupState.FINISHED)
    assert (done.usable, done.num_rollouts) == (2, 4)
    assert await codes(room, group) == ["straggler", None, "straggler", None]


async def test_a_straggler_is_replaced_as_often_as_the_run_tries(make_room: MakeRoom) -> None:
    clock = FakeClock()
    async with make_room(FakeExecutor(), clock=clock) as room:
        run = await room.run(
            groups=GroupRule(stragglers="replace", straggler_s=30),
            retry=RetrySettings(max_attempts=2, backoff_s=0),
        )
        [group] = await room.submit(run, rollouts=2)
        await room.started(2)
        completes(room, room.executor.history[0])
        await room.until(lambda: room.executor.acks)
        await clock.advance(29)
        assert room.executor.cancels == []
        await clock.advance(6)
        await room.started(3)
        assert room.executor.history[2].rollout_id == room.executor.history[1].rollout_id
        assert [cancel.reason for cancel in room.executor.cancels] == ["straggler"]
        await clock.advance(120)
        assert len(room.executor.history) == 3
        completes(room, room.executor.history[2])
        await reached(room, group, GroupState.FINISHED)
        [first, second] = (await room.core.groups.attempts(room.executor.history[1].rollout_id)).items
        assert first.failure is not None
        assert (first.failure.code, second.reward) == ("straggler", 1.0)


async def test_stragglers_are_cancelled_after_a_restart_too(make_room: MakeRoom) -> None:
    payloads = FakePayloads()
    async with make_room(FakeExecutor(), payloads=payloads) as room:
        run = await room.run(groups=GroupRule(min_usable=2, stragglers="cancel"))
        [group] = await room.submit(run, rollouts=4)
        await room.started(4)
        completes(room, room.executor.history[3])
        await room.until(lambda: room.executor.acks)
    async with make_room(FakeExecutor(), payloads=payloads) as room:
        await room.started(3)
        completes(room, room.executor.history[1])
        assert (await reached(room, group, GroupState.FINISHED)).usable == 2
        assert await codes(room, group) == ["straggler", None, "straggler", None]
        assert len(room.executor.cancels) == 2


async def test_a_straggler_is_replaced_after_a_restart_too(make_room: MakeRoom) -> None:
    """From its new start: the time that the server was away is nobody's."""
    clock = FakeClock()
    rule = GroupRule(stragglers="replace", straggler_s=30)
    retry = RetrySettings(max_attempts=2, backoff_s=0)
    async with make_room(FakeExecutor(), clock=clock) as room:
        run = await room.run(groups=rule, retry=retry)
        [group] = await room.submit(run, rollouts=1)
        await room.started(1)
        await clock.advance(20)
    await clock.advance(600)
    async with make_room(FakeExecutor(), clock=clock) as room:
        await room.started(1)
        await clock.advance(20)
        assert room.executor.cancels == []
        await clock.advance(16)
        await room.started(2)
        assert [cancel.reason for cancel in room.executor.cancels] == ["straggler"]
        completes(room, room.executor.history[1])
        await reached(room, group, GroupState.FINISHED)
        history = (await room.core.groups.attempts(room.executor.history[1].rollout_id)).items
        assert [attempt.failure.code if attempt.failure else None for attempt in history] == [
            *("server_restart", "straggler", None)
        ]


async def test_who_waits_for_all_does_after_a_restart_too(make_room: MakeRoom) -> None:
    clock, payloads = FakeClock(), FakePayloads()
    async with make_room(FakeExecutor(), clock=clock, payloads=payloads) as room:
        run = await room.run(groups=GroupRule(min_usable=2))
        [group] = await room.submit(run, rollouts=3)
        await room.started(3)
        for start in room.executor.history[:2]:
            completes(room, start)
        await room.until(lambda: len(room.executor.acks) == 2)
    async with make_room(FakeExecutor(), clock=clock, payloads=payloads) as room:
        await room.started(1)
        await clock.advance(3600)
        assert (await room.core.groups.get(group.id)).state is GroupState.OPEN
        completes(room, room.executor.history[0])
        assert (await reached(room, group, GroupState.FINISHED)).usable == 3


async def test_a_sibling_whose_worker_dies_after_a_restart_holds_no_group(make_room: MakeRoom) -> None:
    clock = FakeClock()
    async with make_room(FakeExecutor(), clock=clock) as room:
        run = await room.run(groups=GroupRule(deadline_s=60))
        [group] = await room.submit(run, rollouts=2)
        await room.started(2)
        completes(room, room.executor.history[0])
        await room.until(lambda: room.executor.acks)
        await clock.advance(40)
    async with make_room(FakeExecutor(), clock=clock) as room:
        await room.started(1)
        room.executor.kill("w1", replace=False)
        await clock.advance(21)  # of the deadline that the first start had set
        assert (await reached(room, group, GroupState.FINISHED)).usable == 1
        assert await codes(room, group) == [None, "deadline"]


async def test_a_group_that_cant_have_enough_is_given_up(room: Room) -> None:
    run = await room.run(groups=GroupRule(min_usable=2))
    [group] = await room.submit(run, rollouts=3)
    await room.started(3)
    completes(room, room.executor.history[0])
    crashes(room, room.executor.history[1])
    await room.until(lambda: len(room.executor.acks) == 2)
    assert (await room.core.groups.get(group.id)).state is GroupState.OPEN
    await room.core.groups.cancel_rollout(room.executor.history[2].rollout_id)
    stopped = ended(room.executor.history[2], failure=failed(FailureKind.CANCELLED))
    room.executor.end(room.executor.history[2].attempt_id, stopped)
    await reached(room, group, GroupState.FAILED)
    [delivered] = (await lease(room, run)).groups
    assert [rollout.samples for rollout in delivered.rollouts] == [[], [], []]
    assert delivered.rollouts[0].note == "its group has 1 usable rollouts, of at least 2"


async def test_hopeless_siblings_are_stopped_at_once(room: Room) -> None:
    run = await room.run(groups=GroupRule(min_usable=3))
    [group] = await room.submit(run, rollouts=3)
    await room.started(3)
    crashes(room, room.executor.history[1])
    await reached(room, group, GroupState.FAILED)
    assert await codes(room, group) == ["hopeless", "crash", "hopeless"]
    assert len(room.executor.cancels) == 2


async def test_cancelling_one_of_a_group_stops_those_that_are_useless_without_it(
    make_room: MakeRoom,
) -> None:
    async with make_room(FakeExecutor(capacity=1)) as room:
        run = await room.run(groups=GroupRule(min_usable=2))
        [group] = await room.submit(run, rollouts=2)
        await room.started(1)
        queued: Rollout = (await room.core.groups.rollouts_of(group.id))[1]
        outcome = await room.core.groups.cancel_rollout(queued.id)
        assert (outcome.ended, outcome.stopping) == (1, 1)
        assert [c.attempt_id for c in room.executor.cancels] == [room.executor.history[0].attempt_id]
        await reached(room, group, GroupState.CANCELLED)


async def test_a_dead_worker_cant_hold_a_group(make_room: MakeRoom) -> None:
    clock = FakeClock()
    async with make_room(FakeExecutor(), clock=clock) as room:
        run = await room.run(groups=GroupRule(deadline_s=10))
        [group] = await room.submit(run, rollouts=2)
        await room.started(2)
        completes(room, room.executor.history[0])
        await room.until(lambda: room.executor.acks)
        room.executor.kill("w1", replace=False)
        await clock.advance(11)
        assert (await reached(room, group, GroupState.FINISHED)).usable == 1


async def test_a_group_may_have_a_rule_of_its_own(room: Room) -> None:
    run = await room.run(groups=GroupRule(oversample=1))
    [plain] = await room.submit(run, rollouts=1, rule=GroupRule())
    [more] = await room.submit(run, rollouts=1)
    assert [len(await room.core.groups.rollouts_of(group.id)) for group in (plain, more)] == [1, 2]


@pytest.mark.parametrize(
    ("rule", "field"),
    [
        (GroupRule(min_usable=5), "min_usable"),
        (GroupRule(stragglers="cancel"), "min_usable"),
        (GroupRule(stragglers="replace"), "straggler_s"),
        (GroupRule(straggler_s=5), "straggler_s"),
        (GroupRule(stragglers="replace", straggler_s=60, deadline_s=60), "straggler_s"),
        (GroupRule(oversample=7), "oversample"),
    ],
)
async def test_contradictions_are_refused_with_the_field(
    make_room: MakeRoom, rule: GroupRule, field: str
) -> None:
    settings = Settings(api=ApiSettings(max_rollouts_per_group=10))
    async with make_room(FakeExecutor(), settings=settings) as room:
        run = await room.run()
        with pytest.raises(InvalidInput) as caught:
            await room.submit(run, rollouts=4, rule=rule)
        assert caught.value.field == f"groups.0.rule.{field}"
        await asyncio.sleep(0)
        assert (await room.core.runs.counts(run.id))["groups_open"] == 0


async def test_replacing_needs_another_try(room: Room) -> None:
    rule = GroupRule(stragglers="replace", straggler_s=5)
    with pytest.raises(InvalidInput) as caught:
        await room.run(groups=rule, retry=RetrySettings(max_attempts=1))
    assert caught.value.field == "groups.stragglers"
