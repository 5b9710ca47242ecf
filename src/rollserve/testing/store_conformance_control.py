"""Part of ``store_conformance``: groups that end by rule, pacing, filters, sources, what became of tokens."""

from __future__ import annotations

from rollserve.records.base import new_id
from rollserve.records.control import (
    DeliveryRule,
    FilterRule,
    GroupRule,
    StalenessRule,
    TaskSource,
)
from rollserve.records.rollout import Attempt, GroupState, RolloutState
from rollserve.records.run import Run, RunSpec, SourceState, SourceStatus
from rollserve.records.task import GraderSpec, Task
from rollserve.store.base import Store
from rollserve.store.values import Fed, Finish, Handed, NewGroup, Start
from rollserve.testing.store_facts import NOW, NeedsStore, ending, make_group, make_policy

TASK = Task(instruction="do it", grader=GraderSpec(name="exact"))


async def a_run(store: Store, *, lines: int = 0, **settings: object) -> Run:
    await store.create_policy(make_policy())
    spec = RunSpec.model_validate({"policy": "pol", **settings})
    source = SourceStatus(state=SourceState.RUNNING, position=0, lines=lines, digest="d") if lines else None
    return await store.create_run(Run(id=new_id("run"), spec=spec, created_at=NOW), source)


def with_rule(rule: GroupRule, rollouts: int = 2) -> NewGroup:
    return NewGroup(task=TASK, num_rollouts=rollouts, rule=rule)


def sampled(start: Start, tokens: int, *, reward: float | None = 1.0) -> Finish:
    finish = ending(start, reward=reward)
    attempt: Attempt = finish.attempt.model_copy(update={"counts": {"sampled_tokens": tokens}})
    return Finish(attempt=attempt, target=finish.target)


async def tokens(store: Store, run: Run) -> dict[str, tuple[int, int]]:
    bins = (await store.run_bins(run.id)).get("tokens", {})
    return {name: (found.count, found.tokens) for name, found in bins.items()}


class Controlling(NeedsStore):
    async def test_enough_is_enough_in_one_transaction(self, store: Store) -> None:
        run = await a_run(store)
        [group] = await store.submit_groups(run.id, [with_rule(GroupRule(oversample=2))])
        starts = await store.start_rollouts(NOW, 3)
        assert starts[0].rule.oversample == 2
        await store.finish_attempt(sampled(starts[0], 5))
        done = await store.finish_attempt(sampled(starts[1], 7))
        assert done.group_finished
        assert [rollout.id for rollout in done.others.running] == [starts[2].rollout.id]
        rollouts = (await store.list_rollouts(group_id=group.id)).items
        assert [rollout.state for rollout in rollouts[2:]] == [RolloutState.CANCELLED] * 2
        assert {rollout.failure.code for rollout in rollouts[2:] if rollout.failure} == {"redundant"}
        late = await store.finish_attempt(sampled(starts[2], 11))
        assert not late.accepted
        assert await tokens(store, run) == {"waiting": (2, 12), "redundant": (1, 11)}
        again = await store.finish_attempt(sampled(starts[2], 11))
        assert not again.accepted
        assert await tokens(store, run) == {"waiting": (2, 12), "redundant": (1, 11)}

    async def test_a_deadline_is_set_by_the_first_start_and_kept(self, store: Store) -> None:
        run = await a_run(store)
        [group] = await store.submit_groups(run.id, [with_rule(GroupRule(deadline_s=60))])
        assert await store.next_group_due() is None
        [first] = await store.start_rollouts(NOW, 1)
        [second] = await store.start_rollouts(NOW + 30, 1)
        assert (await store.next_group_due(), (await store.get_group(group.id)).deadline_at) == (
            NOW + 60,
            NOW + 60,
        )
        await store.finish_attempt(ending(first, reward=1.0))
        assert (await store.end_due_groups(NOW + 59)).finished == {}
        ended = await store.end_due_groups(NOW + 60)
        assert ended.finished == {run.id: 1}
        assert [rollout.id for rollout in ended.running] == [second.rollout.id]
        assert await store.next_group_due() is None
        assert (await store.end_due_groups(NOW + 600)).finished == {}

    async def test_pacing_counts_groups_that_can_still_be_trained(self, store: Store) -> None:
        rule = StalenessRule(max_staleness=0, groups_per_version=2)
        run = await a_run(store, staleness=rule.model_dump())
        await store.submit_groups(run.id, [make_group(rollouts=2) for _ in range(9)])
        starts = await store.start_rollouts(NOW, 50)
        assert len({start.rollout.group_id for start in starts}) == 2
        assert len(starts) == 4
        await store.cancel_rollouts(group_id=starts[0].rollout.group_id)
        for start in starts[:2]:
            await store.finish_attempt(ending(start, RolloutState.CANCELLED))
        assert len({start.rollout.group_id for start in await store.start_rollouts(NOW, 50)}) == 1
        await store.set_policy_version("pol", 3, "three")
        assert len({start.rollout.group_id for start in await store.start_rollouts(NOW, 50)}) == 6

    async def test_judged_groups_enter_the_log_once_or_not_at_all(self, store: Store) -> None:
        run = await a_run(store, filters=[FilterRule(name="too_easy").model_dump()])
        await store.submit_groups(run.id, [make_group(rollouts=2), make_group(rollouts=1)])
        starts = await store.start_rollouts(NOW, 9)
        for start, reward in zip(starts, (0.25, 0.5, 1.0), strict=True):
            done = await store.finish_attempt(sampled(start, 3, reward=reward))
            assert not done.group_finished
        assert done.others.judging
        waiting = await store.list_judging()
        assert [rewards for _, rewards in waiting] == [[0.25, 0.5], [1.0]]
        kept, left_out = (group for group, _ in waiting)
        entered = await store.judge_group(kept.id, filtered_by=None, note="a filter raised")
        assert entered.finished == {run.id: 1}
        assert (await store.judge_group(left_out.id, filtered_by="too_easy", note=None)).left == 1
        for group in (kept, left_out):
            assert (await store.judge_group(group.id, filtered_by=None, note=None)).finished == {}
        found = await store.get_group(left_out.id)
        assert (found.state, found.filtered_by, found.finished_seq) == (
            GroupState.FILTERED,
            "too_easy",
            None,
        )
        assert (await store.get_group(kept.id)).note == "a filter raised"
        assert await tokens(store, run) == {"waiting": (2, 6), "filtered": (1, 3)}
        counts = await store.run_counts(run.id)
        assert (counts["groups_open"], counts["groups_finished"], counts["groups_good"]) == (0, 1, 1)

    async def test_submit_order_holds_and_lets_go(self, store: Store) -> None:
        run = await a_run(store, delivery=DeliveryRule(order="submit", max_wait_s=50).model_dump())
        groups = await store.submit_groups(run.id, [make_group(rollouts=1) for _ in range(3)])
        first, second, third = await store.start_rollouts(NOW, 3)
        held = await store.finish_attempt(ending(third, reward=1.0))
        assert (held.group_finished, held.others.held) == (False, True)
        assert (await store.get_group(groups[2].id)).state is GroupState.HELD
        await store.finish_attempt(ending(second, reward=1.0))
        last = await store.finish_attempt(ending(first, reward=1.0))
        assert last.others.finished == {run.id: 3}
        lease = await store.lease_groups(run.id, "t", None, limit=9, ttl_s=9, now=NOW)
        assert lease is not None
        assert lease.group_ids == [group.id for group in groups]

    async def test_a_source_moves_with_its_groups(self, store: Store) -> None:
        run = await a_run(store, lines=4, source=TaskSource(path="x").model_dump())
        assert await store.list_sources() == [run.id]
        fed = Fed(
            position=0, next=2, groups=[NewGroup(task=TASK, num_rollouts=1, source_seq=n) for n in (0, 1)]
        )
        assert await store.feed(run.id, fed)
        assert not await store.feed(run.id, fed)  # it stands elsewhere now
        supply = await store.supply(run.id)
        assert (supply.source.position, supply.open, supply.good) == (2, 2, 0)
        end = Fed(position=2, next=4, groups=[], broken=["line 3", "line 4"], state=SourceState.ENDED)
        assert await store.feed(run.id, end)
        assert (await store.run_bins(run.id))["groups"]["broken_lines"].count == 2
        assert await store.run_over(run.id, "t") is None
        assert await store.carry_source_groups(run.id) == 2
        assert await store.carry_source_groups(run.id) == 0
        stopped = await store.stop_source_groups(run.id)
        assert (stopped.left, stopped.finished) == (2, {})
        assert await store.run_over(run.id, "t") == ("source_ended", "the task source has no more tasks")
        await store.rewind(run.id, "t", None, now=NOW)
        back = await store.source(run.id)
        assert back is not None
        assert (back.position, back.state) == (0, SourceState.RUNNING)

    async def test_what_a_delivery_found_counts_when_it_is_acked(self, store: Store) -> None:
        run = await a_run(store)
        await store.submit_groups(run.id, [make_group(rollouts=3), make_group(rollouts=1)])
        starts = await store.start_rollouts(NOW, 9)
        for start in starts:
            await store.finish_attempt(sampled(start, 10))
        lease = await store.lease_groups(run.id, "t", None, limit=9, ttl_s=9, now=NOW)
        assert lease is not None
        ids = [start.attempt_id for start in starts]
        handed = [
            Handed(attempt_id=ids[0], staleness=1, trained=10),
            Handed(attempt_id=ids[1], staleness=4, trained=5, masked=3),
            Handed(attempt_id=ids[2], staleness=9, dropped=True),
            Handed(attempt_id=ids[3], staleness=9, dropped=True),
        ]
        await store.note_lease(lease.id, handed, [starts[3].rollout.group_id])
        assert await tokens(store, run) == {"waiting": (3, 30), "stale": (1, 10)}
        await store.ack_lease(lease.id, now=NOW)
        await store.ack_lease(lease.id, now=NOW)
        found = await tokens(store, run)
        assert found == {"delivered": (2, 15), "masked": (1, 3), "left_out": (1, 2), "stale": (2, 20)}
        bins = await store.run_bins(run.id)
        assert {name: each.count for name, each in bins["staleness"].items()} == {"1": 1, "4": 1}
        assert bins["stale_length"]["8-15"].count == 3
        assert await store.run_bins(None) == bins
        assert (await store.run_counts(run.id))["groups_good"] == 1
        await store.rewind(run.id, "t", None, now=NOW)
        assert await tokens(store, run) == {"waiting": (4, 40)}
        assert (await store.run_counts(run.id))["groups_good"] == 2
        again = await store.lease_groups(run.id, "t", None, limit=9, max_tokens=30, ttl_s=9, now=NOW)
        assert again is not None
        assert len(again.group_ids) == 1
