"""What every ``Store`` does about re-grading (part of ``store_conformance``)."""

from __future__ import annotations

import pytest

from rollserve.errors import Conflict, FailureKind
from rollserve.records.regrade import Graded, JudgeRoute, Regrade, RegradingState, try_name
from rollserve.records.rollout import Failure, RolloutState
from rollserve.records.task import GraderSpec
from rollserve.store.base import Store
from rollserve.store.values import Bin
from rollserve.testing.store_facts import NOW, NeedsStore, ending, finish_groups, make_group, open_run

GRADED = Graded(state=RegradingState.GRADED, reward=0.5)
CRASH = Failure(kind=FailureKind.AGENT, code="crash", message="agent")
UNGRADED = Failure(kind=FailureKind.GRADER, code="broken", message="grader")


def make_regrade(run_id: str, **changes: object) -> Regrade:
    routes = {"judge": JudgeRoute(policy="jury")}
    made = Regrade(id="reg_1", run_id=run_id, grader=GraderSpec(name="exact"), routes=routes, created_at=NOW)
    return made.model_copy(update=changes)


async def begun(store: Store, groups: int) -> Regrade:
    """Of a run whose groups have all ended well."""
    run = await open_run(store)
    await finish_groups(store, run.id, groups)
    return await store.create_regrade(make_regrade(run.id))


async def regraded(store: Store, run_id: str) -> Bin | None:
    return (await store.run_bins(run_id)).get("tokens", {}).get("regraded")


class Regrading(NeedsStore):
    async def test_what_has_something_to_grade_is_graded_again(self, store: Store) -> None:
        run = await open_run(store)
        await store.submit_groups(run.id, [make_group(rollouts=4)])
        good, ungraded, crashed, _ = await store.start_rollouts(NOW, 9)
        await store.finish_attempt(ending(good, reward=1.0))
        await store.finish_attempt(ending(ungraded, RolloutState.FAILED, failure=UNGRADED))
        await store.finish_attempt(ending(crashed, RolloutState.FAILED, failure=CRASH))
        made = make_regrade(run.id)
        assert await store.create_regrade(made) == made
        found = (await store.list_regradings(made.id)).items
        assert [(each.rollout_id, each.before) for each in found] == [
            (good.rollout.id, 1.0),
            (ungraded.rollout.id, None),
        ]
        assert await store.create_regrade(made.model_copy(update={"created_at": NOW + 9})) == made
        others: list[dict[str, object]] = [{"grader": GraderSpec(name="math")}, {"routes": {}}]
        for other in others:
            with pytest.raises(Conflict):
                await store.create_regrade(make_regrade(run.id, **other))
        assert await store.get_regrade(made.id) == made
        assert (await store.list_regrades(run.id)).items == [made]

    async def test_a_try_ends_once(self, store: Store) -> None:
        regrade = await begun(store, 2)
        assert await store.next_regrading_due() == 0.0
        [first] = await store.take_regradings(NOW, 1)
        assert (first.tries, first.routes, first.attempt.reward) == (1, regrade.routes, 1.0)
        assert await store.finish_regrading(first, None, not_before=NOW + 60)
        assert not await store.finish_regrading(first, GRADED)
        [second] = await store.take_regradings(NOW, 9)
        assert second.rollout_id != first.rollout_id
        assert await store.finish_regrading(second, GRADED)
        assert await store.next_regrading_due() == NOW + 60
        assert await store.take_regradings(NOW + 59, 9) == []
        [again] = await store.take_regradings(NOW + 60, 9)
        assert (again.rollout_id, again.tries) == (first.rollout_id, 2)
        assert not await store.finish_regrading(first, GRADED)  # of a try that was given up
        assert await store.finish_regrading(again, Graded(state=RegradingState.IMPOSSIBLE, note="gone"))
        counts = await store.regrading_counts(regrade.id)
        assert (counts["graded"], counts["impossible"], sum(counts.values())) == (1, 1, 2)
        found = await store.regradings_of(regrade.id, [first.rollout_id, "rol_0"])
        assert [each.state for each in found.values()] == [RegradingState.IMPOSSIBLE]
        types = [event.type for event in await store.list_events(after=0)]
        assert (types.count("regrade.begun"), types.count("regrade.ended")) == (1, 1)

    async def test_what_its_models_sampled_is_in_a_bin(self, store: Store) -> None:
        regrade = await begun(store, 2)
        run_id = regrade.run_id
        before = await store.run_bins(run_id)
        one, other = await store.take_regradings(NOW, 9)
        assert await store.finish_regrading(one, None, sampled_tokens=5)
        assert not await store.finish_regrading(one, GRADED, sampled_tokens=7)  # counted already
        assert await regraded(store, run_id) == Bin(count=1, tokens=5)
        [again] = await store.take_regradings(NOW, 9)
        assert await store.finish_regrading(again, GRADED, sampled_tokens=2)
        assert await store.finish_regrading(other, GRADED)
        assert await regraded(store, run_id) == Bin(count=2, tokens=7)
        after = await store.run_bins(run_id)
        after["tokens"].pop("regraded")
        assert {kind: bins for kind, bins in after.items() if bins} == before

    async def test_those_that_ran_at_a_death_run_again(self, store: Store) -> None:
        regrade = await begun(store, 3)
        one, two = await store.take_regradings(NOW, 2)
        assert await store.finish_regrading(one, GRADED)
        name = try_name(regrade.id, two.rollout_id, 1)
        assert await store.list_interrupted_regradings() == [(regrade.run_id, name)]
        assert name == two.owner
        assert await store.recover_regradings({name: 4, "another": 9}) == 1
        assert await regraded(store, regrade.run_id) == Bin(count=1, tokens=4)
        assert await store.list_interrupted_regradings() == []
        assert not await store.finish_regrading(two, GRADED)
        again, _ = await store.take_regradings(NOW, 9)
        assert (again.rollout_id, again.tries) == (two.rollout_id, 1)

    async def test_what_has_not_begun_is_cancelled(self, store: Store) -> None:
        regrade = await begun(store, 3)
        [running] = await store.take_regradings(NOW, 1)
        assert await store.cancel_regrade(regrade.id) == 2
        assert await store.cancel_regrade(regrade.id) == 0
        assert await store.take_regradings(NOW, 9) == []
        assert await store.finish_regrading(running, GRADED)
        cancelled = (await store.list_regradings(regrade.id, state=RegradingState.CANCELLED)).items
        assert len(cancelled) == 2
