"""What every ``Store`` must do. Subclass ``StoreConformance`` in a test module and give it a fixture
``store`` with an opened, empty store (pytest, asyncio mode ``auto``)::

    class TestMyStore(StoreConformance):
        @pytest.fixture
        async def store(self, tmp_path: Path) -> AsyncIterator[Store]:
            ...
"""

from __future__ import annotations

import asyncio
import time

import pytest
from pydantic import SecretStr

from rollserve.errors import (
    Conflict,
    InvalidInput,
    NotFound,
    QueueFull,
    VersionRegression,
)
from rollserve.records.policy import (
    Backend,
    BackendInfo,
    BackendSpec,
    BackendState,
    Policy,
    TemplateFinding,
    TemplateReport,
)
from rollserve.records.rollout import GroupState, RolloutState
from rollserve.records.run import RunState
from rollserve.store.base import Store
from rollserve.store.values import Finished
from rollserve.testing.store_conformance_callbacks import Calling
from rollserve.testing.store_conformance_control import Controlling
from rollserve.testing.store_conformance_regrades import Regrading
from rollserve.testing.store_conformance_updates import Updating
from rollserve.testing.store_conformance_work import Delivering, Scheduling
from rollserve.testing.store_facts import (
    LOST,
    NOW,
    NeedsStore,
    ending,
    finish_groups,
    make_group,
    make_policy,
    make_run,
    open_run,
)


class KeysPoliciesRuns(NeedsStore):
    async def test_keys(self, store: Store) -> None:
        assert not await store.has_admin_key()
        await store.put_key(name="t", digest="d1", role="trainer")
        assert not await store.has_admin_key()
        await store.put_key(name="a", digest="d2", role="admin")
        assert await store.has_admin_key()
        assert await store.find_key("d1") == "trainer"
        assert await store.find_key("nothing") is None

    async def test_policy_created_once(self, store: Store) -> None:
        policy = make_policy()
        await store.create_policy(policy)
        await store.create_policy(policy)
        assert (await store.list_policies()).items == [policy]
        with pytest.raises(Conflict):
            await store.create_policy(Policy(spec=policy.spec.model_copy(update={"model": "other"})))
        with pytest.raises(NotFound):
            await store.get_policy("none")

    async def test_policies_and_backends_are_paged(self, store: Store) -> None:
        made = [make_policy(name) for name in ("a", "b", "c")]
        for policy in reversed(made):
            await store.create_policy(policy)
        first = await store.list_policies(limit=2)
        last = await store.list_policies(limit=2, cursor=first.next)
        assert ([*first.items, *last.items], last.next) == (made, None)
        info = BackendInfo(engine="vllm 0", models=["tiny"])
        registered = [
            Backend(id=f"be_{n}", policy=name, spec=BackendSpec(url=f"http://127.0.0.1:{n}"), info=info)
            for n, name in ((3, "a"), (2, "b"), (1, "a"))
        ]
        for backend in registered:
            await store.put_backend(backend)
        some = await store.list_backends("a", limit=1)
        rest = await store.list_backends("a", limit=1, cursor=some.next)
        assert [*some.items, *rest.items] == [registered[0], registered[2]]
        assert (await store.list_backends()).items == registered
        for cursor in ("", "x", "7"):
            with pytest.raises(InvalidInput):
                await store.list_policies(cursor=cursor)

    async def test_policy_template(self, store: Store) -> None:
        await store.create_policy(make_policy())
        assert (await store.get_policy("pol")).template is None
        report = TemplateReport(verdict="exceptions", exceptions=["user_turn:break"])
        finding = TemplateFinding(keep=TemplateReport(verdict="exact"), strip=report)
        assert (await store.set_policy_template("pol", finding)).template == finding
        assert (await store.get_policy("pol")).template == finding
        with pytest.raises(NotFound):
            await store.set_policy_template("none", finding)

    async def test_policy_version(self, store: Store) -> None:
        await store.create_policy(make_policy())
        assert (await store.set_policy_version("pol", 3, "step-3")).labels == {"step-3": 3}
        again = await store.set_policy_version("pol", 3, "step-3")
        assert (again.version, again) == (3, await store.get_policy("pol"))
        with pytest.raises(VersionRegression):
            await store.set_policy_version("pol", 2, "step-2")
        with pytest.raises(Conflict):
            await store.set_policy_version("pol", 4, "step-3")
        with pytest.raises(NotFound):
            await store.set_policy_version("none", 4, "x")
        changes = [event for event in await store.list_events(after=0) if event.type == "policy.version"]
        assert [event.data["version"] for event in changes] == [3]

    async def test_backends(self, store: Store) -> None:
        await store.create_policy(make_policy())
        backend = Backend(
            id="be_1",
            policy="pol",
            spec=BackendSpec(url="http://127.0.0.1:1", api_key=SecretStr("s3cret"), options={"a": 1}),
            info=BackendInfo(engine="vllm 0", models=["tiny"], warnings=["w"]),
        )
        await store.put_backend(backend)
        assert await store.get_backend("be_1") == backend
        failed = backend.model_copy(update={"state": BackendState.FAILED, "error": "no answer"})
        await store.put_backend(failed)
        assert (await store.list_backends()).items == [failed]
        assert (await store.list_backends("other")).items == []
        events = await store.list_events(after=0)
        assert [event.type for event in events][1:] == ["backend.registered", "backend.failed"]
        assert not any("s3cret" in repr(event) for event in events)
        await store.delete_backend("be_1")
        with pytest.raises(NotFound):
            await store.get_backend("be_1")
        with pytest.raises(NotFound):
            await store.delete_backend("be_1")
        with pytest.raises(NotFound):
            await store.put_backend(backend.model_copy(update={"policy": "none"}))

    async def test_runs_are_paged(self, store: Store) -> None:
        runs = [await open_run(store) for _ in range(5)]
        first = await store.list_runs(limit=2)
        second = await store.list_runs(limit=2, cursor=first.next)
        third = await store.list_runs(limit=2, cursor=second.next)
        assert [*first.items, *second.items, *third.items] == runs
        assert third.next is None
        last = await store.list_runs(newest=True, limit=3)
        first = await store.list_runs(newest=True, limit=3, cursor=last.next)
        assert [*last.items, *first.items] == runs[::-1]
        assert first.next is None
        paused = [await store.set_run_state(runs[n].id, RunState.PAUSED) for n in (1, 3)]
        assert (await store.list_runs(state=RunState.PAUSED)).items == paused
        with pytest.raises(InvalidInput):
            await store.list_runs(cursor="x")
        with pytest.raises(NotFound):
            await store.create_run(make_run("none"))
        with pytest.raises(Conflict):
            await store.create_run(runs[0])

    async def test_closed_is_final_and_ends_the_queue(self, store: Store) -> None:
        run = await open_run(store)
        (group,) = await store.submit_groups(run.id, [make_group(rollouts=2)])
        (start,) = await store.start_rollouts(NOW, 1)
        await store.set_run_state(run.id, RunState.PAUSED)
        await store.set_run_state(run.id, RunState.OPEN)
        await store.set_run_state(run.id, RunState.CLOSED)
        for state in (RunState.OPEN, RunState.PAUSED):
            with pytest.raises(Conflict):
                await store.set_run_state(run.id, state)
        with pytest.raises(Conflict):
            await store.submit_groups(run.id, [make_group()])
        counts = await store.run_counts(run.id)
        assert (counts["queued"], counts["running"], counts["cancelled"]) == (0, 1, 1)
        assert await store.count_queued() == 0
        retried = await store.finish_attempt(ending(start, RolloutState.QUEUED, failure=LOST))
        assert retried.rollout is not None
        assert retried.rollout.state is RolloutState.CANCELLED
        assert (await store.get_group(group.id)).state is GroupState.CANCELLED

    async def test_prune(self, store: Store) -> None:
        run, other = await open_run(store), await open_run(store)
        await store.submit_groups(run.id, [make_group(rollouts=2)])
        starts = await store.start_rollouts(NOW, 2)
        kept = await store.submit_groups(other.id, [make_group(rollouts=1)])
        await store.finish_attempt(ending(starts[0], payload=f"{run.id}/a.rsp"))
        with pytest.raises(Conflict):
            await store.prune_run(run.id)
        await store.set_run_state(run.id, RunState.CLOSED)
        with pytest.raises(Conflict):
            await store.prune_run(run.id)
        await store.finish_attempt(ending(starts[1]))
        lease = await store.lease_groups(run.id, "t", None, limit=9, ttl_s=9, now=NOW)
        assert lease is not None
        await store.ack_lease(lease.id, now=NOW)
        await store.commit_checkpoint(run.id, "t", 0, name="c", cursor=None, now=NOW)
        assert await store.list_payloads() == {f"{run.id}/a.rsp"}
        assert await store.prune_run(run.id) == [f"{run.id}/a.rsp"]
        with pytest.raises(NotFound):
            await store.get_run(run.id)
        assert await store.list_payloads() == set()
        assert [group.id for group in (await store.list_groups(other.id)).items] == [kept[0].id]
        late = await store.finish_attempt(ending(starts[1]))
        assert late == Finished(accepted=False)


class Submitting(NeedsStore):
    async def test_submit_and_read_back(self, store: Store) -> None:
        run = await open_run(store)
        groups = await store.submit_groups(run.id, [make_group("a", 3), make_group("b", 1)])
        assert [group.task.instruction for group in groups] == ["a", "b"]
        assert (await store.list_groups(run.id)).items == groups
        assert (await store.list_groups(run.id, state="finished")).items == []
        assert await store.get_group(groups[0].id) == groups[0]
        rollouts = (await store.list_rollouts(group_id=groups[0].id)).items
        assert [rollout.index for rollout in rollouts] == [0, 1, 2]
        for rollout in rollouts:
            assert await store.get_rollout(rollout.id) == rollout
        page = await store.list_rollouts(run_id=run.id, state=RolloutState.QUEUED, limit=3)
        rest = await store.list_rollouts(run_id=run.id, state=RolloutState.QUEUED, limit=3, cursor=page.next)
        assert len(page.items) + len(rest.items) == 4
        counts = await store.run_counts(run.id)
        assert (counts["queued"], counts["groups_open"], counts["groups_finished"]) == (4, 2, 0)
        assert await store.last_attempt(rollouts[0].id) is None
        await store.start_rollouts(NOW, 1)
        assert await store.count_queued() == 3
        counts = await store.group_counts(groups[0].id)
        assert counts == {"queued": 2, "running": 1, "completed": 0, "failed": 0, "cancelled": 0}

    async def test_what_is_not_there(self, store: Store) -> None:
        for missing in (
            store.get_run("x"),
            store.run_counts("x"),
            store.prune_run("x"),
            store.set_run_state("x", RunState.PAUSED),
            store.get_group("x"),
            store.get_rollout("x"),
            store.get_attempt("x"),
            store.list_attempts("x"),
            store.last_attempt("x"),
            store.group_counts("x"),
            store.list_groups("x"),
            store.submit_groups("x", [make_group()]),
            store.cancel_rollouts(rollout_id="x"),
            store.cancel_rollouts(group_id="x"),
            store.cancel_rollouts(run_id="x"),
            store.lease_groups("x", "t", None, limit=1, ttl_s=1, now=NOW),
            store.trainer_epoch("x", "t"),
            store.rewind("x", "t", None, now=NOW),
            store.list_checkpoints("x", "t"),
        ):
            with pytest.raises(NotFound):
                await missing
        with pytest.raises(InvalidInput):
            await store.cancel_rollouts()

    async def test_idempotency_key(self, store: Store) -> None:
        run, other = await open_run(store), await open_run(store)
        (first,) = await store.submit_groups(run.id, [make_group("a", 2, key="k")])
        again = await store.submit_groups(run.id, [make_group("a", 2, key="k"), make_group("b", 1, key="l")])
        assert again[0].id == first.id
        assert (await store.run_counts(run.id))["groups_open"] == 2
        (elsewhere,) = await store.submit_groups(other.id, [make_group("a", 2, key="k")])
        assert elsewhere.id != first.id
        for body in (make_group("other", 2, key="k"), make_group("a", 3, key="k")):
            with pytest.raises(Conflict) as caught:
                await store.submit_groups(run.id, [make_group("new"), body])
            assert caught.value.field == "groups.1"
        assert (await store.run_counts(run.id))["groups_open"] == 2

    async def test_same_key_twice_in_one_request(self, store: Store) -> None:
        run = await open_run(store)
        groups = await store.submit_groups(run.id, [make_group(key="k"), make_group(key="k")])
        assert groups[0].id == groups[1].id
        assert (await store.run_counts(run.id))["queued"] == 2

    async def test_key_at_the_same_time(self, store: Store) -> None:
        run = await open_run(store)
        answers = await asyncio.gather(
            *(store.submit_groups(run.id, [make_group("a", 1, key=f"k{i % 5}")]) for i in range(50))
        )
        assert len({answer[0].id for answer in answers}) == 5
        assert (await store.run_counts(run.id))["queued"] == 5

    async def test_answer_of_then_after_the_run_closed(self, store: Store) -> None:
        run = await open_run(store)
        (group,) = await store.submit_groups(run.id, [make_group("a", 1, key="k")])
        await store.set_run_state(run.id, RunState.CLOSED)
        (again,) = await store.submit_groups(run.id, [make_group("a", 1, key="k")])
        assert again.id == group.id

    async def test_open_groups_are_bounded(self, store: Store) -> None:
        run = await open_run(store, max_queued_groups=3)
        await store.submit_groups(run.id, [make_group("a", 1, key="k"), make_group("b", 1)])
        with pytest.raises(QueueFull) as caught:
            await store.submit_groups(run.id, [make_group("c", 1), make_group("d", 1)])
        assert caught.value.retry_after_s is not None
        assert (await store.run_counts(run.id))["groups_open"] == 2
        await store.submit_groups(run.id, [make_group("a", 1, key="k"), make_group("c", 1)])
        (start,) = await store.start_rollouts(NOW, 1)
        await store.finish_attempt(ending(start))
        await store.submit_groups(run.id, [make_group("d", 1)])

    async def test_undelivered_groups_are_bounded(self, store: Store) -> None:
        run = await open_run(store, max_undelivered_groups=2)
        await finish_groups(store, run.id, 2)
        with pytest.raises(QueueFull):
            await store.submit_groups(run.id, [make_group()])
        lease = await store.lease_groups(run.id, "t", None, limit=1, ttl_s=60, now=NOW)
        assert lease is not None
        with pytest.raises(QueueFull):
            await store.submit_groups(run.id, [make_group()])
        await store.ack_lease(lease.id, now=NOW)
        await store.submit_groups(run.id, [make_group()])

    async def test_empty_group_is_refused(self, store: Store) -> None:
        run = await open_run(store)
        with pytest.raises(InvalidInput) as caught:
            await store.submit_groups(run.id, [make_group(), make_group(rollouts=0)])
        assert caught.value.field == "groups.1.num_rollouts"


class Telling(NeedsStore):
    async def test_events(self, store: Store) -> None:
        run = await open_run(store)
        before = (await store.list_events(after=0))[-1].seq
        await store.set_run_state(run.id, RunState.PAUSED)
        await store.set_policy_paused(run.spec.policy, True)
        first, second = await store.list_events(after=before)
        assert (first.type, first.run_id, second.type, second.run_id) == (
            "run.paused",
            run.id,
            "policy.paused",
            None,
        )
        assert first.seq > before
        assert second.seq > first.seq
        assert await store.list_events(after=before, run_id=run.id) == [first]
        assert await store.list_events(after=before, limit=1) == [first]
        assert await store.list_events(after=second.seq) == []

    async def test_failed_write_tells_nothing(self, store: Store) -> None:
        run = await open_run(store, max_queued_groups=1)
        before = await store.list_events(after=0)
        with pytest.raises(QueueFull):
            await store.submit_groups(run.id, [make_group(), make_group()])
        assert await store.list_events(after=0) == before

    async def test_one_that_fails_fails_alone(self, store: Store) -> None:
        """Of writes that may share a transaction."""
        run = await open_run(store, max_queued_groups=20)
        asked = [store.submit_groups(run.id, [make_group(str(i), 1)]) for i in range(40)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, QueueFull)]
        assert len(refused) == 20
        assert (await store.run_counts(run.id))["queued"] == 20

    async def test_times_are_the_clock_s(self, store: Store) -> None:
        run = await open_run(store)
        (group,) = await store.submit_groups(run.id, [make_group()])
        assert abs(group.created_at - time.time()) < 600


class StoreConformance(
    KeysPoliciesRuns, Submitting, Scheduling, Delivering, Controlling, Telling, Regrading, Updating, Calling
):
    """All of it."""
