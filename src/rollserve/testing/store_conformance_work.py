"""What every ``Store`` must do with work: scheduling it, and delivering what came of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import chain

import pytest

from rollserve.errors import (
    Conflict,
    LeaseLost,
    NotFound,
    StaleEpoch,
)
from rollserve.records.rollout import GroupState, RolloutState
from rollserve.records.run import RunState
from rollserve.store.base import Store
from rollserve.store.payload import SealedPayload
from rollserve.testing.store_facts import (
    LOST,
    NOW,
    NeedsStore,
    ending,
    finish_groups,
    make_group,
    open_run,
)


class Scheduling(NeedsStore):
    async def test_runs_of_equal_rank_share_and_each_goes_in_submit_order(self, store: Store) -> None:
        one, two = await open_run(store), await open_run(store)
        wanted: dict[str, list[tuple[str, int]]] = {one.id: [], two.id: []}
        for run in (one, two, one, two):
            (group,) = await store.submit_groups(run.id, [make_group(rollouts=3)])
            wanted[run.id] += [(group.id, index) for index in range(3)]
        got = []
        for limit in (1, 4, 5, 9):
            got += await store.start_rollouts(NOW, limit)
        assert [start.rollout.run_id for start in got] == [one.id, two.id] * 6
        for run in (one, two):
            mine = [start.rollout for start in got if start.rollout.run_id == run.id]
            assert [(rollout.group_id, rollout.index) for rollout in mine] == wanted[run.id]
        assert all(start.rollout.state is RolloutState.RUNNING for start in got)
        assert all(start.rollout.epoch == 1 for start in got)
        assert got[0].task.metadata == {"b": 1, "a": ["do it"]}
        attempt = await store.get_attempt(got[0].attempt_id)
        assert (attempt.rollout_id, attempt.epoch, attempt.outcome) == (got[0].rollout.id, 1, None)
        assert await store.start_rollouts(NOW, 10) == []

    async def test_quota_of_running_rollouts(self, store: Store) -> None:
        small, large = await open_run(store, max_running_rollouts=2), await open_run(store)
        await store.submit_groups(small.id, [make_group(rollouts=5)])
        await store.submit_groups(large.id, [make_group(rollouts=5)])
        starts = await store.start_rollouts(NOW, 6)
        assert Counter(start.rollout.run_id for start in starts) == {small.id: 2, large.id: 4}
        await store.finish_attempt(ending(starts[0]))
        more = await store.start_rollouts(NOW, 6)
        assert Counter(start.rollout.run_id for start in more) == {small.id: 1, large.id: 1}

    async def test_pauses(self, store: Store) -> None:
        run, other = await open_run(store, "one"), await open_run(store, "two")
        await store.submit_groups(run.id, [make_group(rollouts=1)])
        await store.submit_groups(other.id, [make_group(rollouts=1)])
        assert (await store.set_policy_paused("one", True)).paused
        await store.set_run_state(other.id, RunState.PAUSED)
        assert await store.start_rollouts(NOW, 9) == []
        await store.set_policy_paused("one", False)
        assert [start.rollout.run_id for start in await store.start_rollouts(NOW, 9)] == [run.id]
        await store.set_run_state(other.id, RunState.OPEN)
        assert [start.rollout.run_id for start in await store.start_rollouts(NOW, 9)] == [other.id]

    async def test_retry_waits_and_keeps_its_place(self, store: Store) -> None:
        run = await open_run(store)
        await store.submit_groups(run.id, [make_group(rollouts=2)])
        (first,) = await store.start_rollouts(NOW, 1)
        retry = ending(first, RolloutState.QUEUED, failure=LOST, not_before=NOW + 10)
        done = await store.finish_attempt(retry)
        assert done.accepted
        assert not done.group_finished
        assert done.rollout is not None
        assert (done.rollout.attempts, done.rollout.failure, done.rollout.reward) == (1, LOST, None)
        assert await store.next_due(NOW) == NOW + 10
        (second,) = await store.start_rollouts(NOW + 9, 9)
        assert second.rollout.index == 1
        await store.submit_groups(run.id, [make_group(rollouts=1)])
        again = await store.start_rollouts(NOW + 10, 9)
        assert again[0].rollout.id == first.rollout.id
        assert (again[0].rollout.epoch, again[0].rollout.attempts) == (2, 1)
        assert await store.next_due(NOW) is None
        uncounted = ending(again[0], RolloutState.QUEUED, failure=LOST, counts_as_try=False)
        moved = await store.finish_attempt(uncounted)
        assert moved.rollout is not None
        assert moved.rollout.attempts == 1
        page = await store.list_attempts(first.rollout.id, limit=1)
        rest = await store.list_attempts(first.rollout.id, limit=1, cursor=page.next)
        history = [*page.items, *rest.items]
        assert [(attempt.epoch, attempt.failure) for attempt in history] == [(1, LOST), (2, LOST)]
        assert rest.next is None
        assert await store.last_attempt(first.rollout.id) == history[-1]

    async def test_finish_and_the_log(self, store: Store) -> None:
        run = await open_run(store)
        one, two = await store.submit_groups(run.id, [make_group(rollouts=2), make_group(rollouts=1)])
        a, b, c = await store.start_rollouts(NOW, 3)
        assert not (await store.finish_attempt(ending(a, reward=0.5))).group_finished
        assert (await store.finish_attempt(ending(c, RolloutState.FAILED, failure=LOST))).group_finished
        assert (await store.finish_attempt(ending(b, reward=1.0))).group_finished
        logged = [await store.get_group(group.id) for group in (two, one)]
        assert [group.finished_seq for group in logged] == [1, 2]
        assert {group.state for group in logged} == {GroupState.FINISHED}
        rollout = await store.get_rollout(a.rollout.id)
        assert (rollout.state, rollout.reward, rollout.attempts) == (RolloutState.COMPLETED, 0.5, 1)
        failed = await store.get_rollout(c.rollout.id)
        assert (failed.reward, failed.failure, failed.finished_at) == (None, LOST, NOW + 1)
        counts = await store.run_counts(run.id)
        assert counts == {
            "queued": 0,
            "running": 0,
            "completed": 2,
            "failed": 1,
            "cancelled": 0,
            "groups_open": 0,
            "groups_finished": 2,
            "groups_undelivered": 2,
            "groups_started": 0,
            "groups_good": 1,
        }
        types = Counter(event.type for event in await store.list_events(after=0, run_id=run.id))
        assert types["rollout.completed"] == 2
        assert types["rollout.failed"] == 1
        assert types["group.finished"] == 2

    async def test_report_that_comes_twice(self, store: Store) -> None:
        run = await open_run(store)
        await store.submit_groups(run.id, [make_group(rollouts=1)])
        (start,) = await store.start_rollouts(NOW, 1)
        reports = [ending(start, reward=1.0, payload="r/a.rsp")] * 3
        answers = await asyncio.gather(*(store.finish_attempt(report) for report in reports))
        assert all(answer.accepted for answer in answers)
        assert sum(answer.group_finished for answer in answers) == 1
        assert (await store.run_counts(run.id))["completed"] == 1
        assert "fenced" not in (await store.get_attempt(start.attempt_id)).detail

    async def test_fenced_report(self, store: Store) -> None:
        run = await open_run(store)
        await store.submit_groups(run.id, [make_group(rollouts=1)])
        (old,) = await store.start_rollouts(NOW, 1)
        assert await store.recover(NOW, {}) == 1
        assert not (await store.finish_attempt(ending(old, reward=9.0))).accepted
        (new,) = await store.start_rollouts(NOW, 1)
        assert (new.rollout.epoch, new.rollout.attempts) == (2, 0)
        late = await store.finish_attempt(ending(old, reward=9.0))
        assert not late.accepted
        assert late.rollout == new.rollout
        assert (await store.finish_attempt(ending(new, reward=1.0))).accepted
        assert not (await store.finish_attempt(ending(old, reward=9.0))).accepted
        assert (await store.get_rollout(new.rollout.id)).reward == 1.0
        assert "fenced" in (await store.get_attempt(old.attempt_id)).detail
        assert (await store.run_counts(run.id))["completed"] == 1

    async def test_recover(self, store: Store) -> None:
        run, closed = await open_run(store), await open_run(store)
        await store.submit_groups(run.id, [make_group(rollouts=4)])
        starts = await store.start_rollouts(NOW, 4)
        (doomed,) = await store.submit_groups(closed.id, [make_group(rollouts=1)])
        starts += await store.start_rollouts(NOW, 1)
        await store.finish_attempt(ending(starts[0], reward=1.0))
        await store.cancel_rollouts(rollout_id=starts[1].rollout.id)
        await store.set_run_state(closed.id, RunState.CLOSED)
        interrupted = await store.list_interrupted()
        running = {(start.rollout.run_id, start.attempt_id) for start in starts[1:]}
        assert set(interrupted) == running
        salvaged = SealedPayload(ref="r/left.rsp", size_bytes=7)
        assert await store.recover(NOW, {starts[2].attempt_id: salvaged}) == 2
        assert await store.list_interrupted() == []
        counts = await store.run_counts(run.id)
        assert (counts["queued"], counts["running"], counts["cancelled"]) == (2, 0, 1)
        assert (await store.get_group(doomed.id)).state is GroupState.CANCELLED
        lost = await store.get_attempt(starts[2].attempt_id)
        assert lost.failure is not None
        assert lost.failure.code == "server_restart"
        assert (lost.payload, lost.payload_bytes) == ("r/left.rsp", 7)
        assert "r/left.rsp" in await store.list_payloads()
        assert (await store.get_attempt(starts[3].attempt_id)).payload is None
        again = await store.start_rollouts(NOW, 9)
        assert [start.rollout.id for start in again] == [start.rollout.id for start in starts[2:4]]
        for start in again:
            await store.finish_attempt(ending(start))
        assert (await store.run_counts(run.id))["groups_finished"] == 1

    async def test_cancel(self, store: Store) -> None:
        run = await open_run(store)
        one, two = await store.submit_groups(run.id, [make_group(rollouts=3), make_group(rollouts=2)])
        (start,) = await store.start_rollouts(NOW, 1)
        ended, stopping = await store.cancel_rollouts(group_id=one.id)
        assert [rollout.index for rollout in ended] == [1, 2]
        assert [rollout.id for rollout in stopping] == [start.rollout.id]
        assert (await store.get_group(one.id)).state is GroupState.OPEN
        done = await store.finish_attempt(ending(start, RolloutState.CANCELLED))
        assert done.group_finished
        assert (await store.get_group(one.id)).state is GroupState.CANCELLED
        ended, stopping = await store.cancel_rollouts(run_id=run.id)
        assert (len(ended), stopping) == (2, [])
        assert (await store.get_group(two.id)).finished_seq == 2
        assert await store.cancel_rollouts(run_id=run.id) == ([], [])
        assert await store.start_rollouts(NOW, 9) == []

    async def test_cancelled_attempt_is_not_tried_again(self, store: Store) -> None:
        run = await open_run(store)
        await store.submit_groups(run.id, [make_group(rollouts=1)])
        (start,) = await store.start_rollouts(NOW, 1)
        await store.cancel_rollouts(rollout_id=start.rollout.id)
        done = await store.finish_attempt(ending(start, RolloutState.QUEUED, failure=LOST))
        assert done.group_finished
        assert done.rollout is not None
        assert done.rollout.state is RolloutState.CANCELLED

    async def test_many_finish_at_once(self, store: Store) -> None:
        run = await open_run(store)
        await store.submit_groups(run.id, [make_group(rollouts=5) for _ in range(100)])
        starts = await store.start_rollouts(NOW, 500)
        answers = await asyncio.gather(*(store.finish_attempt(ending(start)) for start in starts))
        assert sum(answer.group_finished for answer in answers) == 100
        log = [group.finished_seq for group in (await store.list_groups(run.id, limit=200)).items]
        assert sorted(place or 0 for place in log) == list(range(1, 101))

    async def test_start_at_the_same_time(self, store: Store) -> None:
        run = await open_run(store, max_running_rollouts=150)
        await store.submit_groups(run.id, [make_group(rollouts=4) for _ in range(50)])
        answers = await asyncio.gather(*(store.start_rollouts(NOW, 7) for _ in range(40)))
        started = [start.rollout.id for answer in answers for start in answer]
        assert len(started) == len(set(started)) == 150


class Delivering(NeedsStore):
    async def test_lease_ack_commit(self, store: Store) -> None:
        run = await open_run(store)
        groups = await finish_groups(store, run.id, 3)
        lease = await store.lease_groups(run.id, "t", None, limit=2, ttl_s=60, now=NOW)
        assert lease is not None
        assert lease.group_ids == [group.id for group in groups[:2]]
        assert (lease.epoch, lease.expires_at) == (0, NOW + 60)
        renewed = await store.renew_lease(lease.id, ttl_s=90, now=NOW)
        assert renewed.expires_at == NOW + 90
        assert await store.ack_lease(lease.id, now=NOW) == await store.ack_lease(lease.id, now=NOW)
        assert (await store.run_counts(run.id))["groups_undelivered"] == 1
        assert await store.expire_leases(NOW + 1e6) == 0
        await store.set_policy_version("pol", 7, "seven")
        made = await store.commit_checkpoint(run.id, "t", 0, name="c1", cursor="at 2", now=NOW)
        assert (made.seq, made.policy_version, made.cursor) == (1, 7, "at 2")
        assert await store.commit_checkpoint(run.id, "t", 0, name="c1", cursor="at 2", now=NOW) == made
        last = await store.lease_groups(run.id, "t", 0, limit=9, ttl_s=60, now=NOW)
        assert last is not None
        assert last.group_ids == [groups[2].id]
        assert await store.lease_groups(run.id, "t", 0, limit=9, ttl_s=60, now=NOW) is None
        await store.ack_lease(last.id, now=NOW)
        with pytest.raises(Conflict):
            await store.commit_checkpoint(run.id, "t", 0, name="c1", cursor="at 2", now=NOW)
        await store.commit_checkpoint(run.id, "t", 0, name="c2", cursor=None, now=NOW)
        with pytest.raises(Conflict):
            await store.commit_checkpoint(run.id, "t", 0, name="c1", cursor="at 2", now=NOW)
        page = await store.list_checkpoints(run.id, "t", limit=1)
        rest = await store.list_checkpoints(run.id, "t", limit=1, cursor=page.next)
        assert [item.name for item in (*page.items, *rest.items)] == ["c1", "c2"]
        assert rest.next is None

    async def test_each_trainer_gets_the_whole_log(self, store: Store) -> None:
        run = await open_run(store)
        groups = await finish_groups(store, run.id, 2)
        for trainer in ("one", "two"):
            lease = await store.lease_groups(run.id, trainer, None, limit=9, ttl_s=60, now=NOW)
            assert lease is not None
            assert lease.group_ids == [group.id for group in groups]
            await store.ack_lease(lease.id, now=NOW)
            assert (await store.run_counts(run.id))["groups_undelivered"] == 0
        await store.rewind(run.id, "one", None, now=NOW)
        assert (await store.run_counts(run.id))["groups_undelivered"] == 0
        await store.rewind(run.id, "two", None, now=NOW)
        assert (await store.run_counts(run.id))["groups_undelivered"] == 2

    async def test_given_back_is_leased_first(self, store: Store) -> None:
        run = await open_run(store)
        groups = [group.id for group in await finish_groups(store, run.id, 4)]
        first = await store.lease_groups(run.id, "t", None, limit=1, ttl_s=60, now=NOW)
        second = await store.lease_groups(run.id, "t", None, limit=1, ttl_s=5, now=NOW)
        assert first is not None
        assert second is not None
        await store.nack_lease(first.id)
        third = await store.lease_groups(run.id, "t", None, limit=2, ttl_s=60, now=NOW + 5)
        assert third is not None
        assert third.group_ids == groups[:2]
        for lost in (first, second):
            for attempt in (
                store.ack_lease(lost.id, now=NOW),
                store.nack_lease(lost.id),
                store.renew_lease(lost.id, ttl_s=5, now=NOW),
            ):
                with pytest.raises(LeaseLost):
                    await attempt

    async def test_expiry(self, store: Store) -> None:
        run = await open_run(store)
        await finish_groups(store, run.id, 2)
        one = await store.lease_groups(run.id, "t", None, limit=1, ttl_s=5, now=NOW)
        two = await store.lease_groups(run.id, "t", None, limit=1, ttl_s=50, now=NOW)
        assert one is not None
        assert two is not None
        assert await store.expire_leases(NOW + 4) == 0
        assert await store.expire_leases(NOW + 5) == 1
        with pytest.raises(LeaseLost):
            await store.ack_lease(one.id, now=NOW + 5)
        assert (await store.ack_lease(two.id, now=NOW + 500)).id == two.id
        with pytest.raises(LeaseLost):
            await store.nack_lease(two.id)
        assert (await store.renew_lease(two.id, ttl_s=5, now=NOW)).id == two.id

    async def test_unknown_lease(self, store: Store) -> None:
        with pytest.raises(LeaseLost):
            await store.ack_lease("lea_none", now=NOW)

    async def test_rewind(self, store: Store) -> None:
        run = await open_run(store)
        groups = [group.id for group in await finish_groups(store, run.id, 5)]
        names = iter(["c1", "c2"])
        for version, size in ((1, 2), (2, 1)):
            lease = await store.lease_groups(run.id, "t", 0, limit=size, ttl_s=60, now=NOW)
            assert lease is not None
            await store.ack_lease(lease.id, now=NOW)
            await store.set_policy_version("pol", version, f"v{version}")
            await store.commit_checkpoint(run.id, "t", 0, name=next(names), cursor=str(version), now=NOW)
        acked = await store.lease_groups(run.id, "t", 0, limit=1, ttl_s=60, now=NOW)
        assert acked is not None
        await store.ack_lease(acked.id, now=NOW)
        held = await store.lease_groups(run.id, "t", 0, limit=1, ttl_s=60, now=NOW)
        assert held is not None
        epoch, checkpoint = await store.rewind(run.id, "t", "c1", now=NOW)
        assert epoch == await store.trainer_epoch(run.id, "t") == 1
        assert checkpoint is not None
        assert (checkpoint.name, checkpoint.cursor) == ("c1", "1")
        policy = await store.get_policy("pol")
        assert (policy.version, policy.labels) == (1, {"v1": 1})
        assert [item.name for item in (await store.list_checkpoints(run.id, "t")).items] == ["c1"]
        for fenced in (
            store.ack_lease(held.id, now=NOW),
            store.ack_lease(acked.id, now=NOW),
            store.nack_lease(held.id),
            store.renew_lease(held.id, ttl_s=9, now=NOW),
            store.lease_groups(run.id, "t", 0, limit=1, ttl_s=60, now=NOW),
            store.commit_checkpoint(run.id, "t", 0, name="c3", cursor=None, now=NOW),
        ):
            with pytest.raises(StaleEpoch):
                await fenced
        again = await store.lease_groups(run.id, "t", None, limit=9, ttl_s=60, now=NOW)
        assert again is not None
        assert (again.epoch, again.group_ids) == (1, groups[2:])
        with pytest.raises(NotFound):
            await store.rewind(run.id, "t", "c2", now=NOW)
        assert await store.rewind(run.id, "t", None, now=NOW) == (2, None)
        assert (await store.get_policy("pol")).version == 0
        everything = await store.lease_groups(run.id, "t", 2, limit=9, ttl_s=60, now=NOW)
        assert everything is not None
        assert everything.group_ids == groups

    async def test_competing_consumers(self, store: Store) -> None:
        """Five consumers under one name: each group to exactly one of them."""
        run = await open_run(store)
        groups = await finish_groups(store, run.id, 250)

        async def consume() -> list[str]:
            mine: list[str] = []
            while lease := await store.lease_groups(run.id, "t", None, limit=2, ttl_s=60, now=NOW):
                mine += lease.group_ids
                await store.ack_lease(lease.id, now=NOW)
            return mine

        shares = await asyncio.gather(*(consume() for _ in range(5)))
        assert sorted(chain.from_iterable(shares)) == sorted(group.id for group in groups)

    async def test_leases_at_once(self, store: Store) -> None:
        run = await open_run(store)
        groups = await finish_groups(store, run.id, 60)
        asked = (store.lease_groups(run.id, "t", None, limit=1, ttl_s=60, now=NOW) for _ in range(500))
        leases = [lease for lease in await asyncio.gather(*asked) if lease is not None]
        assert sorted(lease.group_ids[0] for lease in leases) == sorted(group.id for group in groups)
