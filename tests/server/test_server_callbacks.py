"""Finished groups are pushed to a real receiver, whatever that does."""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollserve.config import DeliverySettings, Settings
from rollserve.records.callback import MessageState
from rollserve.records.run import Quota, Run, RunSpec
from rollserve.rollouts.delivery import Wanted
from rollserve.testing.callback_receiver import CallbackReceiver, a_receiver
from rollserve.testing.clock import FakeClock
from rollserve.testing.fakes_server import FakeExecutor, FakePayloads, completes
from rollserve.testing.server_room import MakeRoom, Room
from rollserve.webhooks import new_secret

PULL = Wanted(trainer="callback", max_groups=100)


@pytest.fixture
async def receiver() -> AsyncIterator[CallbackReceiver]:
    async with a_receiver() as receiver:
        yield receiver


@pytest.fixture
async def room(make_room: MakeRoom) -> AsyncIterator[Room]:
    """Every attempt completes at once."""
    payloads = FakePayloads()
    async with make_room(FakeExecutor(play=completes(payloads)), payloads=payloads) as room:
        yield room


async def a_run(room: Room, receiver: CallbackReceiver, **settings: Any) -> Run:
    callback = {"url": receiver.url, **settings.pop("callback", {})}
    return await room.run(callback_secret=receiver.secret, callback=callback, **settings)


async def counts(room: Room, run: Run) -> dict[str, int]:
    found = (await room.core.callbacks.status(run.id)).messages
    return {state: many for state, many in found.items() if many}


async def until_counts(room: Room, run: Run, **wanted: int) -> None:
    async def met() -> bool:
        return await counts(room, run) == wanted

    await room.until(met)


async def test_a_group_is_sent_with_its_samples_and_counts_as_acked(
    room: Room, receiver: CallbackReceiver
) -> None:
    run = await a_run(room, receiver)
    [group] = await room.submit(run, rollouts=2)
    await until_counts(room, run, sent=1)
    [got] = receiver.received
    assert (got.type, got.group_id, got.data["run_id"]) == ("group.finished", group.id, run.id)
    rollouts = got.data["delivery"]["groups"][0]["rollouts"]
    assert [each["samples"][0]["arrays"]["ids"]["data"] for each in rollouts] == [
        [0, 1, 2, 3, 100, 101, 102]
    ] * 2
    assert (await room.core.runs.counts(run.id))["groups_undelivered"] == 0
    assert (await room.core.deliveries.lease(run.id, PULL)).lease is None
    assert receiver.forged == 0


async def test_without_failures_groups_start_out_in_the_order_of_the_log(
    make_room: MakeRoom, receiver: CallbackReceiver
) -> None:
    payloads = FakePayloads()
    settings = Settings(delivery=DeliverySettings(callback_in_flight=1))
    async with make_room(
        FakeExecutor(play=completes(payloads)), payloads=payloads, settings=settings
    ) as room:
        run = await a_run(room, receiver)
        groups = await room.submit(run, groups=8)
        await until_counts(room, run, sent=8)
        finished = {group.id: (await room.core.groups.get(group.id)).finished_seq or 0 for group in groups}
        assert receiver.group_ids == sorted(finished, key=lambda group_id: finished[group_id])


async def test_a_receiver_gets_so_many_at_once_and_no_more(room: Room, receiver: CallbackReceiver) -> None:
    receiver.let.clear()
    run = await a_run(room, receiver)
    await room.submit(run, groups=12)
    await until_counts(room, run, pending=8, sending=4)
    await room.until(lambda: len(receiver.received) == 4)
    receiver.let.set()
    await until_counts(room, run, sent=12)
    assert receiver.most_at_once == 4


async def test_other_events_of_the_run_come_as_asked(room: Room, receiver: CallbackReceiver) -> None:
    run = await a_run(room, receiver, name="mine", callback={"events": ["run.closed"]})
    await room.submit(run)
    await room.core.runs.close(run.id)
    await until_counts(room, run, sent=1)
    [got] = receiver.received
    assert (got.type, got.data) == ("run.closed", {"run_id": run.id, "detail": {"name": "mine"}})


async def test_the_end_of_a_source_is_told(room: Room, receiver: CallbackReceiver) -> None:
    task = {"instruction": "act", "grader": {"name": "exact"}}
    run = await a_run(
        room, receiver, source={"tasks": [task], "num_rollouts": 1}, callback={"events": ["source.ended"]}
    )
    await until_counts(room, run, sent=1)
    assert receiver.received[0].data["detail"]["position"] == 1


async def advancing(room: Room, run: Run, clock: FakeClock, **wanted: int) -> None:
    """Until the run's messages are so many by state, while time goes by."""

    async def met() -> bool:
        await clock.advance(0.5)
        return await counts(room, run) == wanted

    await room.until(met)


async def tried(room: Room, run: Run) -> None:
    """Until the run's first message has been tried and waits for the next try."""

    async def met() -> bool:
        found = (await room.core.callbacks.messages(run.id)).items
        return bool(found) and found[0].tries > 0 and found[0].state is MessageState.PENDING

    await room.until(met)


class Held:
    """A room whose time is turned by hand, its receiver, and how it is set."""

    def __init__(self, make_room: MakeRoom, **delivery: Any) -> None:
        payloads = FakePayloads()
        self.clock = FakeClock(time.time())
        self.opened = make_room(
            FakeExecutor(play=completes(payloads)),
            payloads=payloads,
            clock=self.clock,
            settings=Settings(delivery=DeliverySettings(**delivery)),
        )


async def test_what_fails_is_tried_again_under_the_same_id_and_holds_up_nobody(
    make_room: MakeRoom, receiver: CallbackReceiver
) -> None:
    held = Held(make_room)
    async with held.opened as room:
        run = await a_run(room, receiver)
        [first] = await room.submit(run)
        bad = first.id
        receiver.answer = lambda one: 500 if one.group_id == bad and one.number < 3 else 204
        await tried(room, run)
        await room.submit(run, groups=3)
        await advancing(room, run, held.clock, sent=4)
        ids = [one.id for one in receiver.received if one.group_id == bad]
        assert len(ids) >= 2
        assert len(set(ids)) == 1
        assert len(receiver.group_ids) == len(ids) + 3
        leases = {one.lease_id for one in receiver.received if one.group_id == bad}
        assert len(leases) == len(ids)


async def test_a_message_is_given_up_in_the_end_and_can_be_sent_again(
    make_room: MakeRoom, receiver: CallbackReceiver
) -> None:
    held = Held(make_room, callback_tries=3)
    async with held.opened as room:
        run = await a_run(room, receiver)
        receiver.answer = lambda _: 500
        [group] = await room.submit(run)
        await advancing(room, run, held.clock, dead=1)
        assert len(receiver.received) == 3
        [dead] = (await room.core.callbacks.messages(run.id, state=MessageState.DEAD)).items
        assert (dead.tries, dead.status, dead.group_id) == (3, 500, group.id)
        assert (await room.core.status.snapshot()).callbacks["dead"] == 1
        assert "callback.dead" in [each.type for each in await room.store.list_events(after=0)]
        receiver.answer = lambda _: 204
        assert await room.core.callbacks.resend(run.id, [dead.id]) == 1
        await advancing(room, run, held.clock, sent=1)
        assert len({one.id for one in receiver.received}) == 1


async def test_a_group_whose_message_was_given_up_can_be_pulled(
    make_room: MakeRoom, receiver: CallbackReceiver
) -> None:
    held = Held(make_room, callback_tries=1)
    async with held.opened as room:
        run = await a_run(room, receiver)
        receiver.answer = lambda _: 500
        [group] = await room.submit(run)
        await advancing(room, run, held.clock, dead=1)
        pulled = await room.core.deliveries.lease(run.id, PULL)
        assert pulled.lease is not None
        assert pulled.lease.group_ids == [group.id]
        await room.core.deliveries.ack(pulled.lease.id)
        assert await room.core.callbacks.resend(run.id, None) == 1
        await advancing(room, run, held.clock, skipped=1)
        assert len(receiver.received) == 1


async def test_an_old_message_is_given_up_whatever_its_tries(
    make_room: MakeRoom, receiver: CallbackReceiver
) -> None:
    held = Held(make_room, callback_age_s=20)
    async with held.opened as room:
        run = await a_run(room, receiver)
        receiver.answer = lambda _: 503
        await room.submit(run)
        await advancing(room, run, held.clock, dead=1)
        assert 3 <= len(receiver.received) <= 7


async def test_a_receiver_that_wants_no_more_is_left_alone_until_asked(
    make_room: MakeRoom, receiver: CallbackReceiver
) -> None:
    held = Held(make_room, callback_in_flight=1)
    async with held.opened as room:
        run = await a_run(room, receiver)
        receiver.answer = lambda _: 410
        await room.submit(run, groups=3)
        await advancing(room, run, held.clock, pending=3)
        await room.until(lambda: len(receiver.received) == 1)
        await held.clock.advance(100)
        await room.submit(run)
        await advancing(room, run, held.clock, pending=4)
        assert len(receiver.received) == 1
        status = await room.core.callbacks.status(run.id)
        assert (status.state.value, status.detail) == ("stopped", "the receiver answered 410")
        assert (await room.core.status.snapshot()).callbacks["stopped"] == 1
        receiver.answer = lambda _: 204
        await room.core.callbacks.resend(run.id, None)
        await advancing(room, run, held.clock, sent=4)


async def test_retry_after_is_heeded(make_room: MakeRoom, receiver: CallbackReceiver) -> None:
    held = Held(make_room)
    async with held.opened as room:
        run = await a_run(room, receiver)
        receiver.answer = lambda one: 429 if one.number == 0 else 204
        receiver.headers = {"Retry-After": "200"}
        await room.submit(run)
        await room.until(lambda: len(receiver.received) == 1)
        await tried(room, run)
        [waiting] = (await room.core.callbacks.messages(run.id)).items
        assert 195 <= waiting.due_at - held.clock.now() <= 200
        await advancing(room, run, held.clock, sent=1)


async def test_a_receiver_that_hangs_costs_its_time_and_is_tried_again(
    make_room: MakeRoom, receiver: CallbackReceiver
) -> None:
    held = Held(make_room, callback_timeout_s=0.05)
    async with held.opened as room:
        run = await a_run(room, receiver)
        receiver.let.clear()
        await room.submit(run)
        await tried(room, run)
        [waiting] = (await room.core.callbacks.messages(run.id)).items
        assert (waiting.status, waiting.error) == (None, "no answer within 0.05 s")
        receiver.let.set()
        await advancing(room, run, held.clock, sent=1)


async def test_nobody_there_stalls_no_run_and_is_seldom_tried(make_room: MakeRoom) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/hook"
    held = Held(make_room)
    async with held.opened as room:
        run = await room.run(callback_secret=new_secret(), callback={"url": url})
        await room.submit(run, groups=50)

        async def finished() -> bool:
            await held.clock.advance(0.5)
            return (await room.core.runs.counts(run.id))["groups_finished"] == 50

        await room.until(finished)
        for _ in range(20):
            await held.clock.advance(1)
            await until_no_try(room, run)
        tries = sum(each.tries for each in (await room.core.callbacks.messages(run.id)).items)
        assert 2 <= tries <= 10
        assert room.core.status  # the server goes on
        other = await room.core.runs.open(RunSpec(policy="pol"))
        await room.submit(other)
        delivered = await room.core.deliveries.lease(other.id, Wanted(trainer="t", wait_s=20))
        assert len(delivered.groups) == 1


async def until_no_try(room: Room, run: Run) -> None:
    async def met() -> bool:
        return not (await counts(room, run)).get("sending")

    await room.until(met)


async def test_a_receiver_that_takes_nothing_bounds_its_run_and_no_other(
    make_room: MakeRoom, receiver: CallbackReceiver
) -> None:
    held = Held(make_room)
    async with held.opened as room:
        receiver.answer = lambda _: 500
        task = {"instruction": "act", "grader": {"name": "exact"}}
        source = {"tasks": [task], "num_rollouts": 1, "epochs": None, "in_flight": 4}
        quota = Quota(max_undelivered_groups=6)
        run = await a_run(room, receiver, source=source, quota=quota)

        async def full() -> bool:
            await held.clock.advance(0.5)
            return (await room.core.runs.counts(run.id))["groups_undelivered"] >= 6

        await room.until(full)
        await held.clock.advance(30)
        assert (await room.core.runs.counts(run.id))["groups_undelivered"] <= 6 + 4


async def test_a_signature_by_another_secret_is_refused_and_tried_again(
    make_room: MakeRoom, receiver: CallbackReceiver
) -> None:
    held = Held(make_room)
    async with held.opened as room:
        run = await room.run(callback_secret=new_secret(), callback={"url": receiver.url})
        await room.submit(run)
        await tried(room, run)
        assert (receiver.received, receiver.forged) == ([], 1)
        [waiting] = (await room.core.callbacks.messages(run.id)).items
        assert waiting.status == 401


# -- one effect each


async def test_a_receiver_may_ack_by_itself_before_it_answers(
    make_room: MakeRoom, receiver: CallbackReceiver
) -> None:
    """Then the group is its own, whatever becomes of the answer."""
    held = Held(make_room)
    async with held.opened as room:
        receiver.let.clear()
        receiver.answer = lambda _: 500
        run = await a_run(room, receiver)
        await room.submit(run)
        await room.until(lambda: len(receiver.received) == 1)
        await room.core.deliveries.ack(receiver.received[0].lease_id)
        receiver.let.set()
        await until_counts(room, run, sent=1)
        await held.clock.advance(100)
        assert len(receiver.received) == 1


async def test_commit_and_rewind_are_those_of_the_callbacks_trainer(
    room: Room, receiver: CallbackReceiver
) -> None:
    run = await a_run(room, receiver)
    await room.submit(run, groups=2)
    await until_counts(room, run, sent=2)
    await room.core.deliveries.commit(run.id, "callback", 0, name="one", cursor=None)
    kept = set(receiver.group_ids)
    await room.submit(run, groups=3)
    await until_counts(room, run, sent=5)
    before = {one.group_id: one.id for one in receiver.received}
    receiver.received.clear()
    epoch, _, _ = await room.core.deliveries.rewind(run.id, "callback", "one")
    await until_counts(room, run, sent=5)
    again = {one.group_id: one.id for one in receiver.received}
    assert set(again) == set(before) - kept
    assert all(again[group] != before[group] for group in again)
    assert {one.data["delivery"]["lease"]["epoch"] for one in receiver.received} == {epoch}


async def test_an_answer_that_comes_after_a_rewind_counts_for_nothing(
    room: Room, receiver: CallbackReceiver
) -> None:
    receiver.let.clear()
    run = await a_run(room, receiver)
    [group] = await room.submit(run)
    await room.until(lambda: len(receiver.received) == 1)
    await room.core.deliveries.rewind(run.id, "callback", None)
    await room.until(lambda: len(receiver.received) == 2)
    assert (await room.core.runs.counts(run.id))["groups_undelivered"] == 1
    receiver.let.set()
    await until_counts(room, run, sent=1)
    assert receiver.group_ids == [group.id] * 2
    assert len({one.id for one in receiver.received}) == 2


async def test_what_was_on_its_way_when_the_server_died_comes_again_under_its_id(
    make_room: MakeRoom, receiver: CallbackReceiver
) -> None:
    payloads = FakePayloads()
    receiver.let.clear()
    async with make_room(FakeExecutor(play=completes(payloads)), payloads=payloads) as room:
        run = await a_run(room, receiver)
        await room.submit(run)
        await room.until(lambda: len(receiver.received) == 1)
        assert await counts(room, run) == {"sending": 1}
    receiver.let.set()
    async with make_room(FakeExecutor(), payloads=payloads) as room:
        await until_counts(room, run, sent=1)
    assert len(receiver.received) == 2
    assert len({one.id for one in receiver.received}) == 1


async def test_what_is_too_old_is_not_sent(make_room: MakeRoom, receiver: CallbackReceiver) -> None:
    held = Held(make_room)
    async with held.opened as room:
        receiver.answer = lambda _: 500
        rule = {"max_staleness": 1, "on_stale": "withhold"}
        run = await a_run(room, receiver, staleness=rule)
        await room.submit(run)
        await tried(room, run)
        await room.core.policies.set_version("pol", 5, None)
        receiver.answer = lambda _: 204
        await advancing(room, run, held.clock, skipped=1)
        assert (await room.core.runs.counts(run.id))["groups_undelivered"] == 0


async def test_a_run_is_forgotten_with_its_messages(room: Room, receiver: CallbackReceiver) -> None:
    run = await a_run(room, receiver)
    await room.submit(run)
    await until_counts(room, run, sent=1)
    await room.core.runs.close(run.id)
    await until_counts(room, run, sent=2)
    await room.core.runs.prune(run.id)
    assert await room.store.callback_secret(run.id) is None
