"""Staleness: paced at the start, enforced at the hand-over, reported."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest

from rollserve.errors import FailureKind, InvalidInput
from rollserve.executor.base import StartAttempt
from rollserve.records.call import Call, VersionSpan
from rollserve.records.control import GroupRule, StalenessRule
from rollserve.records.policy import PolicySpec
from rollserve.records.run import RouteSpec, Run
from rollserve.rollouts.delivery import Delivered, Wanted
from rollserve.store.payload import AttemptPayload
from rollserve.testing.fake_payloads import FakePayloads
from rollserve.testing.fakes_server import FakeExecutor, a_call, ended, failed
from rollserve.testing.server_room import MakeRoom, Room

NOW = Wanted(trainer="t", max_groups=100)


def call_at(*spans: VersionSpan) -> Call:
    call = a_call(sampled=spans[-1].end)
    return Call(**{name: getattr(call, name) for name in call.__struct_fields__} | {"versions": spans})


def span(start: int, end: int, version: int) -> VersionSpan:
    return VersionSpan(start, end, version, version)


@pytest.fixture
async def room(make_room: MakeRoom) -> AsyncIterator[Room]:
    async with make_room(FakeExecutor(capacity=64), payloads=FakePayloads()) as room:
        yield room


def finish(room: Room, start: StartAttempt, call: Call) -> None:
    ref = room.payloads.keep(start.attempt_id, AttemptPayload(calls=[call]))
    counts = {"sampled_tokens": len(call.sampled_ids) // 4}
    done = ended(start, payload=ref).model_copy(update={"counts": counts})
    room.executor.end(start.attempt_id, done)


async def rolled_out(room: Room, run: Run, *calls: Call) -> None:
    """A group with a rollout for each of these."""
    before, counts = len(room.executor.history), await room.core.runs.counts(run.id)
    await room.submit(run, rollouts=len(calls))
    await room.started(before + len(calls))
    for start, call in zip(room.executor.history[before:], calls, strict=True):
        finish(room, start, call)
    await finished(room, run, counts["groups_finished"] + 1)


async def finished(room: Room, run: Run, groups: int) -> None:
    async def met() -> bool:
        return (await room.core.runs.counts(run.id))["groups_finished"] >= groups

    await room.until(met)


async def take(room: Room, run: Run) -> Delivered:
    delivered = await room.core.deliveries.lease(run.id, NOW)
    if delivered.lease is not None:
        await room.core.deliveries.ack(delivered.lease.id)
    return delivered


async def tokens(room: Room, run: Run) -> dict[str, int]:
    bins = (await room.core.runs.bins(run.id)).get("tokens", {})
    return {name: found.tokens for name, found in bins.items()}


# -- delivery enforces


OLD, NEW = call_at(span(0, 4, 1)), call_at(span(0, 4, 5))
SPANS = call_at(span(0, 3, 1), span(3, 8, 4))


async def test_it_counts_from_the_oldest_token_and_queue_time_is_in_it(room: Room) -> None:
    run = await room.run()
    await room.core.policies.set_version("pol", 4, None)
    await rolled_out(room, run, SPANS, NEW)
    await room.core.policies.set_version("pol", 6, None)
    [group] = (await take(room, run)).groups
    assert [rollout.staleness for rollout in group.rollouts] == [5, 1]
    assert not any(rollout.stale for rollout in group.rollouts)
    staleness = (await room.core.runs.bins(run.id))["staleness"]
    assert {versions: found.tokens for versions, found in staleness.items()} == {"1": 4, "5": 8}


async def test_drop_leaves_out_the_samples_of_old_rollouts(room: Room) -> None:
    run = await room.run(staleness=StalenessRule(max_staleness=2))
    await rolled_out(room, run, OLD, NEW, SPANS)
    await room.core.policies.set_version("pol", 6, None)
    [group] = (await take(room, run)).groups
    assert [len(rollout.samples) for rollout in group.rollouts] == [0, 1, 0]
    assert group.rollouts[0].note == "too old: 5 versions behind, of at most 2"
    assert group.rollouts[2].tokens is not None
    assert group.rollouts[2].tokens.left_out == {"too_old": 8}
    assert await tokens(room, run) == {"delivered": 4, "stale": 12}
    lengths = (await room.core.runs.bins(run.id))["stale_length"]
    assert {name: found.count for name, found in lengths.items()} == {"4-7": 1, "8-15": 1}


async def test_a_trained_route_is_as_old_as_by_its_own_policy(room: Room) -> None:
    await room.core.policies.create(PolicySpec(name="other", model="o", tokenizer="tiny"))
    routes = {"pupil": RouteSpec(policy="other", train=True)}
    run = await room.run(routes=routes, staleness=StalenessRule(max_staleness=2))
    pupils = [msgspec.structs.replace(each, policy="other", route="pupil") for each in (OLD, NEW)]
    await rolled_out(room, run, *pupils)
    await room.core.policies.set_version("pol", 90, None)
    await room.core.policies.set_version("other", 6, None)
    [group] = (await take(room, run)).groups
    assert [rollout.staleness for rollout in group.rollouts] == [5, 1]
    assert [[sample.policy for sample in each.samples] for each in group.rollouts] == [[], ["other"]]


async def test_mask_trains_only_what_is_fresh(room: Room) -> None:
    run = await room.run(staleness=StalenessRule(max_staleness=2, on_stale="mask"))
    await rolled_out(room, run, SPANS)
    await room.core.policies.set_version("pol", 6, None)
    [group] = (await take(room, run)).groups
    [sample] = group.rollouts[0].samples
    assert sample.loss_mask.tolist() == [False] * 4 + [False] * 3 + [True] * 5
    assert await tokens(room, run) == {"delivered": 5, "masked": 3}
    assert (group.rollouts[0].stale, group.rollouts[0].staleness) == (True, 5)


async def test_mark_hands_over_everything_and_says_so(room: Room) -> None:
    run = await room.run(staleness=StalenessRule(max_staleness=2, on_stale="mark"))
    await rolled_out(room, run, OLD, NEW)
    await room.core.policies.set_version("pol", 6, None)
    [group] = (await take(room, run)).groups
    assert [(len(r.samples), r.stale) for r in group.rollouts] == [(1, True), (1, False)]
    assert await tokens(room, run) == {"delivered": 8}


async def test_withhold_passes_over_a_group_until_a_rewind_makes_it_fresh(room: Room) -> None:
    run = await room.run(staleness=StalenessRule(max_staleness=2, on_stale="withhold"))
    await room.core.policies.set_version("pol", 1, None)
    await room.core.deliveries.lease(run.id, NOW)
    await room.core.deliveries.commit(run.id, "t", 0, name="one", cursor=None)
    await rolled_out(room, run, OLD, NEW)
    await rolled_out(room, run, NEW)
    await room.core.policies.set_version("pol", 6, None)
    [fresh] = (await take(room, run)).groups
    assert len(fresh.rollouts) == 1
    assert await tokens(room, run) == {"delivered": 4, "stale": 8}
    assert (await room.core.runs.counts(run.id))["groups_undelivered"] == 0
    assert (await room.core.deliveries.lease(run.id, NOW)).lease is None
    _, version, _ = await room.core.deliveries.rewind(run.id, "t", "one")
    assert version == 1
    assert await tokens(room, run) == {"waiting": 12}
    assert [len(group.rollouts) for group in (await take(room, run)).groups] == [2, 1]
    assert await tokens(room, run) == {"delivered": 12}


async def test_a_request_waits_on_when_all_it_found_is_too_old(room: Room) -> None:
    run = await room.run(staleness=StalenessRule(max_staleness=0, on_stale="withhold"))
    await rolled_out(room, run, OLD)
    await room.core.policies.set_version("pol", 5, None)
    waiting = asyncio.create_task(
        room.core.deliveries.lease(run.id, Wanted(trainer="t", max_groups=9, wait_s=20))
    )
    await room.until(lambda: room.core.tally.counts().get("groups_withheld") == 1)
    await rolled_out(room, run, NEW)
    [group] = (await waiting).groups
    assert group.rollouts[0].staleness == 0


async def test_what_was_given_back_unacked_counts_once(room: Room) -> None:
    run = await room.run(staleness=StalenessRule(max_staleness=2))
    await rolled_out(room, run, OLD)
    await room.core.policies.set_version("pol", 6, None)
    for _ in range(2):
        lease = (await room.core.deliveries.lease(run.id, NOW)).lease
        assert lease is not None
        await room.core.deliveries.nack(lease.id)
    await take(room, run)
    assert await tokens(room, run) == {"stale": 4}


# -- admission paces


PACED = StalenessRule(max_staleness=1, groups_per_version=2)


async def settled(room: Room, starts: int) -> None:
    """No more than so many starts come."""
    await room.started(starts)
    await asyncio.sleep(0.03)
    assert len(room.executor.history) == starts


def all_of(call: Callable[[], Call], room: Room, first: int) -> None:
    for start in room.executor.history[first:]:
        finish(room, start, call())


async def test_work_starts_only_while_it_can_be_fresh_enough(room: Room) -> None:
    run = await room.run(staleness=PACED)
    await room.submit(run, groups=20, rollouts=2)
    await settled(room, 8)  # two versions' worth: four groups
    all_of(a_call, room, 0)
    await finished(room, run, 4)
    await settled(room, 8)  # finished ones count until the version moves on
    await room.core.policies.set_version("pol", 1, None)
    await settled(room, 12)
    await room.core.policies.set_version("pol", 3, None)
    await settled(room, 20)


async def test_it_counts_from_the_version_at_which_the_run_was_opened(room: Room) -> None:
    await room.run()
    await room.core.policies.set_version("pol", 40, None)
    run = await room.run(staleness=PACED)
    assert run.base_version == 40
    await room.submit(run, groups=20)
    await settled(room, 4)


async def test_groups_that_failed_or_were_cancelled_make_room(room: Room) -> None:
    run = await room.run(staleness=PACED, groups=GroupRule(min_usable=1))
    groups = await room.submit(run, groups=20)
    await settled(room, 4)
    first, second = room.executor.history[:2]
    room.executor.end(first.attempt_id, ended(first, failure=failed(FailureKind.AGENT)))
    await settled(room, 5)
    await room.core.groups.cancel_group(groups[1].id)
    stopped = ended(second, failure=failed(FailureKind.CANCELLED))
    room.executor.end(second.attempt_id, stopped)
    await settled(room, 6)


async def test_groups_dropped_as_too_old_make_room(room: Room) -> None:
    run = await room.run(staleness=StalenessRule(max_staleness=0, groups_per_version=2, on_stale="withhold"))
    await room.submit(run, groups=20)
    await settled(room, 2)
    await room.core.policies.set_version("pol", 2, None)  # the trainer took groups of elsewhere
    await settled(room, 6)
    all_of(lambda: OLD, room, 0)
    await finished(room, run, 6)
    assert (await take(room, run)).groups == []
    await settled(room, 12)


async def test_a_retry_of_a_started_group_is_never_paced(room: Room) -> None:
    run = await room.run(staleness=StalenessRule(max_staleness=0, groups_per_version=1))
    await room.submit(run, groups=3, rollouts=2)
    await settled(room, 2)
    room.executor.kill("w1")
    await settled(room, 4)
    assert {start.group_id for start in room.executor.history} == {room.executor.history[0].group_id}


async def test_a_rewind_counts_anew_from_its_version(room: Room) -> None:
    run = await room.run(staleness=PACED)
    await room.submit(run, groups=30)
    await settled(room, 4)
    all_of(a_call, room, 0)
    await finished(room, run, 4)
    one = Wanted(trainer="t", max_groups=2)
    lease = (await room.core.deliveries.lease(run.id, one)).lease
    assert lease is not None
    await room.core.deliveries.ack(lease.id)
    await room.core.policies.set_version("pol", 1, None)
    await settled(room, 6)
    await room.core.deliveries.commit(run.id, "t", 0, name="one", cursor=None)
    all_of(a_call, room, 4)
    await finished(room, run, 6)
    await room.core.policies.set_version("pol", 5, None)
    await settled(room, 14)
    await room.core.deliveries.rewind(run.id, "t", "one")
    assert (await room.core.runs.get(run.id)).base_version == 1
    counts = await room.core.runs.counts(run.id)
    assert (counts["groups_good"], counts["groups_started"]) == (4, 8)  # two are in the checkpoint
    await settled(room, 14)
    await room.core.policies.set_version("pol", 5, None)  # 4 + (5 - 1) * 2 = 12 may have been started
    await settled(room, 14)
    await room.core.policies.set_version("pol", 6, None)
    await settled(room, 16)


async def test_another_runs_rewind_takes_nothing_away(room: Room) -> None:
    other = await room.run()
    await room.core.policies.set_version("pol", 9, None)
    run = await room.run(staleness=PACED)
    await room.submit(run, groups=9)
    await settled(room, 4)
    await room.core.deliveries.rewind(other.id, "t", None)
    await room.core.groups.cancel_group(room.executor.history[0].group_id)
    stopped = ended(room.executor.history[0], failure=failed(FailureKind.CANCELLED))
    room.executor.end(stopped.id, stopped)
    await settled(room, 5)


async def test_pacing_survives_a_restart(make_room: MakeRoom) -> None:
    async with make_room(FakeExecutor(capacity=64), payloads=FakePayloads()) as room:
        run = await room.run(staleness=PACED)
        await room.submit(run, groups=20)
        await settled(room, 4)
    async with make_room(FakeExecutor(capacity=64), payloads=FakePayloads()) as room:
        await settled(room, 4)
        await room.core.policies.set_version("pol", 1, None)
        await settled(room, 6)


async def test_contradictions_are_refused(room: Room) -> None:
    with pytest.raises(InvalidInput) as caught:
        await room.run(staleness=StalenessRule(groups_per_version=2))
    assert caught.value.field == "staleness.groups_per_version"
    with pytest.raises(InvalidInput) as caught:
        await room.run(purpose="evaluation", staleness=StalenessRule(max_staleness=2))
    assert caught.value.field == "staleness.max_staleness"
