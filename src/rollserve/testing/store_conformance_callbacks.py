"""What every ``Store`` does about callbacks and evaluations (part of ``store_conformance``)."""

from __future__ import annotations

import pytest

from rollserve.errors import FailureKind, LeaseLost, NotFound
from rollserve.records.callback import CallbackMessageState, CallbackRule
from rollserve.records.rollout import Failure, RolloutState
from rollserve.records.run import Run, RunSpec, RunState
from rollserve.store.base import Store
from rollserve.store.values import Outgoing, TryEnd
from rollserve.testing.store_facts import (
    NOW,
    NeedsStore,
    ending,
    finish_groups,
    make_group,
    make_policy,
    make_run,
)

LATER = 4_000_000_000.0
"""The store stamps messages with its own clock: after any of these."""

SENT = TryEnd(state=CallbackMessageState.SENT, status=200)
AGAIN = TryEnd(state=CallbackMessageState.PENDING, due_at=LATER + 50, status=500, error="no")


async def a_callback(store: Store, *events: str) -> Run:
    await store.create_policy(make_policy())
    rule = CallbackRule.model_validate({"url": "http://x/", "events": events or ("group.finished",)})
    run = make_run().model_copy(update={"spec": RunSpec(policy="pol", callback=rule)})
    return await store.create_run(run, None, "the secret")


async def taken(store: Store, run: Run, now: float = LATER) -> Outgoing:
    found = await store.take_callback_message(run.id, ttl_s=100, now=now)
    assert found is not None
    return found


class Calling(NeedsStore):
    async def test_a_group_in_the_log_is_in_the_outbox(self, store: Store) -> None:
        run = await a_callback(store)
        groups = await finish_groups(store, run.id, 2)
        [due] = await store.callback_dues()
        assert (due.run_id, due.url) == (run.id, "http://x/")
        one, two = await taken(store, run), await taken(store, run)
        assert one.lease is not None
        assert two.lease is not None
        assert [*one.lease.group_ids, *two.lease.group_ids] == [group.id for group in groups]
        assert one.secret.get_secret_value() == "the secret"
        assert "the secret" not in repr(one)
        assert await store.take_callback_message(run.id, ttl_s=100, now=LATER) is None
        assert await store.lease_groups(run.id, "callback", None, limit=9, ttl_s=9, now=LATER) is None
        assert await store.end_callback_message(one, SENT, now=LATER) is CallbackMessageState.SENT
        assert (await store.run_counts(run.id))["groups_undelivered"] == 1
        assert await store.end_callback_message(two, AGAIN, now=LATER) is CallbackMessageState.PENDING
        assert await store.take_callback_message(run.id, ttl_s=100, now=LATER + 49) is None
        again = await taken(store, run, LATER + 50)
        assert (again.message_id, again.tries) == (two.message_id, 1)

    async def test_events_that_nobody_asked_for_are_in_no_outbox(self, store: Store) -> None:
        run = await a_callback(store, "run.closed")
        await finish_groups(store, run.id, 1)
        assert await store.callback_dues() == []
        await store.set_run_state(run.id, RunState.CLOSED)
        closed = await taken(store, run)
        assert (closed.type, closed.lease) == ("run.closed", None)
        assert await store.end_callback_message(closed, SENT, now=LATER) is CallbackMessageState.SENT

    async def test_a_try_on_its_way_at_a_death_is_made_again(self, store: Store) -> None:
        run = await a_callback(store)
        await finish_groups(store, run.id, 2)
        one, two = await taken(store, run), await taken(store, run)
        assert one.lease is not None
        assert two.lease is not None
        await store.ack_lease(one.lease.id, now=LATER)
        assert await store.recover_callback_messages(LATER) == 2
        with pytest.raises(LeaseLost):
            await store.ack_lease(two.lease.id, now=LATER)
        states = {each.state: each.group_id for each in (await store.list_callback_messages(run.id)).items}
        assert states == {
            CallbackMessageState.SENT: one.lease.group_ids[0],
            CallbackMessageState.PENDING: two.lease.group_ids[0],
        }
        assert (await taken(store, run)).message_id == two.message_id
        assert await store.end_callback_message(two, SENT, now=LATER) is None

    async def test_a_rewind_sends_again_what_it_takes_back(self, store: Store) -> None:
        run = await a_callback(store)
        await finish_groups(store, run.id, 3)
        await store.end_callback_message(await taken(store, run), SENT, now=LATER)
        await store.commit_checkpoint(run.id, "callback", 0, name="one", cursor=None, now=NOW)
        await store.end_callback_message(await taken(store, run), SENT, now=LATER)
        dead = TryEnd(state=CallbackMessageState.DEAD, error="no")
        await store.end_callback_message(await taken(store, run), dead, now=LATER)
        assert (await store.count_callback_messages())["dead"] == 1
        await store.rewind(run.id, "callback", "one", now=NOW)
        ids = [(await taken(store, run)).message_id for _ in range(2)]
        assert all(each.endswith("_1") for each in ids)
        assert await store.take_callback_message(run.id, ttl_s=100, now=LATER) is None

    async def test_a_receiver_that_is_gone_is_sent_nothing_until_asked(self, store: Store) -> None:
        run = await a_callback(store)
        await finish_groups(store, run.id, 1)
        gone = TryEnd(state=CallbackMessageState.PENDING, due_at=LATER, status=410, error="gone", stop=True)
        await store.end_callback_message(await taken(store, run), gone, now=LATER)
        assert await store.callback_dues() == []
        assert await store.take_callback_message(run.id, ttl_s=100, now=LATER) is None
        assert (await store.callback_status(run.id)).detail == "gone"
        assert await store.resend_callback_messages(run.id, None, now=LATER) == 0
        assert (await taken(store, run)).tries == 1

    async def test_a_run_without_a_callback_says_so(self, store: Store) -> None:
        await store.create_policy(make_policy())
        run = await store.create_run(make_run())
        assert await store.callback_secret(run.id) is None
        for work in (store.callback_status(run.id), store.callback_status("run_none")):
            with pytest.raises(NotFound):
                await work

    async def test_outcomes_are_by_task_and_say_why_there_is_no_grade(self, store: Store) -> None:
        await store.create_policy(make_policy())
        run = await store.create_run(make_run())
        await store.submit_groups(run.id, [make_group("a\nb", 3), make_group("c", 1)])
        one, two, *_ = await store.start_rollouts(NOW, 3)
        await store.finish_attempt(ending(one, reward=0.5))
        crash = Failure(kind=FailureKind.AGENT, code="crash", message="x")
        await store.finish_attempt(ending(two, RolloutState.FAILED, failure=crash))
        page = await store.list_outcomes(run.id, limit=1)
        assert page.next is not None
        [group] = page.items
        assert [(each.reward, each.ungraded) for each in group] == [
            (0.5, None),
            (None, "agent"),
            (None, "open"),
        ]
        assert {each.title for each in group} == {"a"}
        [[last]] = (await store.list_outcomes(run.id, cursor=page.next)).items
        assert last.task_key != group[0].task_key
