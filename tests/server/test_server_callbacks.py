"""Finished groups are pushed to a real receiver, whatever that does."""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from rollserve.config import DeliverySettings, Settings
from rollserve.records.callback import CallbackMessage, CallbackMessageState
from rollserve.records.rollout import Group
from rollserve.records.run import Quota, Run, RunSpec
from rollserve.rollouts.delivery import Wanted
from rollserve.testing.callback_receiver import CallbackReceiver, a_receiver
from rollserve.testing.clock import FakeClock
from rollserve.testing.fake_payloads import FakePayloads
from rollserve.testing.fakes_server import FakeExecutor, completes
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


class Pushed:
    """A run whose groups are pushed, and its room. Where its time is turned by hand, waiting turns it."""

    def __init__(self, room: Room, run: Run, clock: FakeClock | None = None) -> None:
        self.room, self.run, self._clock = room, run, clock

    @property
    def clock(self) -> FakeClock:
        assert self._clock is not None
        return self._clock

    async def submit(self, groups: int = 1, **settings: Any) -> list[Group]:
        return await self.room.submit(self.run, groups=groups, **settings)

    async def counts(self) -> dict[str, int]:
        """Of its messages, by state."""
        found = (await self.room.core.callbacks.status(self.run.id)).messages
        return {state: many for state, many in found.items() if many}

    async def until(self, **wanted: int) -> None:
        """Until its messages are so many by state."""

        async def met() -> bool:
            await self._turn()
            return await self.counts() == wanted

        await self.room.until(met)

    async def quiet(self) -> None:
        """Until none of its messages is on its way."""

        async def met() -> bool:
            return not (await self.counts()).get("sending")

        await self.room.until(met)

    async def undelivered(self) -> int:
        return (await self.room.core.runs.counts(self.run.id))["groups_undelivered"]

    async def _turn(self) -> None:
        if self._clock is not None:
            await self._clock.advance(0.5)

    async def messages(self) -> list[CallbackMessage]:
        return (await self.room.core.callbacks.messages(self.run.id)).items

    async def tried(self) -> CallbackMessage:
        """Its first message, once that has been tried and waits for the next try."""

        async def met() -> bool:
            found = await self.messages()
            return bool(found) and found[0].tries > 0 and found[0].state is CallbackMessageState.PENDING

        await self.room.until(met)
        return (await self.messages())[0]


Push = Callable[..., Awaitable[Pushed]]


@pytest.fixture
def push(room: Room, receiver: CallbackReceiver) -> Push:
    """``await push(**settings)``: a run in a room whose time goes by itself."""

    async def open_run(**settings: Any) -> Pushed:
        return Pushed(room, await room.run(**by_push(receiver, settings)))

    return open_run


@pytest.fixture
async def held(make_room: MakeRoom, receiver: CallbackReceiver) -> AsyncIterator[Push]:
    """``await held(run=…, **delivery)``: in a room of its own, whose time is turned by hand."""
    async with AsyncExitStack() as stack:

        async def open_run(run: dict[str, Any] | None = None, **delivery: Any) -> Pushed:
            payloads, clock = FakePayloads(), FakeClock(time.time())
            opened = make_room(
                FakeExecutor(play=completes(payloads)),
                payloads=payloads,
                clock=clock,
                settings=Settings(delivery=DeliverySettings(**delivery)),
            )
            room = await stack.enter_async_context(opened)
            return Pushed(room, await room.run(**by_push(receiver, run or {})), clock)

        yield open_run


def by_push(receiver: CallbackReceiver, settings: dict[str, Any]) -> dict[str, Any]:
    """Of a run, with what it is given besides."""
    callback = {"url": receiver.url, **settings.get("callback", {})}
    return {"callback_secret": receiver.secret, **settings, "callback": callback}


async def test_a_group_is_sent_with_its_samples_and_counts_as_acked(
    push: Push, receiver: CallbackReceiver
) -> None:
    pushed = await push()
    [group] = await pushed.submit(rollouts=2)
    await pushed.until(sent=1)
    [got] = receiver.received
    assert (got.type, got.group_id, got.data["run_id"]) == ("group.finished", group.id, pushed.run.id)
    rollouts = got.data["delivery"]["groups"][0]["rollouts"]
    assert [each["samples"][0]["arrays"]["ids"]["data"] for each in rollouts] == [
        [0, 1, 2, 3, 100, 101, 102]
    ] * 2
    assert await pushed.undelivered() == 0
    assert (await pushed.room.core.deliveries.lease(pushed.run.id, PULL)).lease is None
    assert receiver.forged == 0


async def test_without_failures_groups_start_out_in_the_order_of_the_log(
    held: Push, receiver: CallbackReceiver
) -> None:
    pushed = await held(callback_in_flight=1)
    groups = [group.id for group in await pushed.submit(groups=8)]
    await pushed.until(sent=8)
    finished = {each: (await pushed.room.core.groups.get(each)).finished_seq or 0 for each in groups}
    assert receiver.group_ids == sorted(finished, key=lambda group_id: finished[group_id])


async def test_a_receiver_gets_so_many_at_once_and_no_more(push: Push, receiver: CallbackReceiver) -> None:
    receiver.let.clear()
    pushed = await push()
    await pushed.submit(groups=12)
    await pushed.until(pending=8, sending=4)
    await pushed.room.until(lambda: len(receiver.received) == 4)
    receiver.let.set()
    await pushed.until(sent=12)
    assert receiver.most_at_once == 4


async def test_other_events_of_the_run_come_as_asked(push: Push, receiver: CallbackReceiver) -> None:
    pushed = await push(name="mine", callback={"events": ["run.closed"]})
    await pushed.submit()
    await pushed.room.core.runs.close(pushed.run.id)
    await pushed.until(sent=1)
    [got] = receiver.received
    assert (got.type, got.data) == ("run.closed", {"run_id": pushed.run.id, "detail": {"name": "mine"}})


async def test_the_end_of_a_source_is_told(push: Push, receiver: CallbackReceiver) -> None:
    task = {"instruction": "act", "grader": {"name": "exact"}}
    pushed = await push(source={"tasks": [task], "num_rollouts": 1}, callback={"events": ["source.ended"]})
    await pushed.until(sent=1)
    assert receiver.received[0].data["detail"]["position"] == 1


async def test_what_fails_is_tried_again_under_the_same_id_and_holds_up_nobody(
    held: Push, receiver: CallbackReceiver
) -> None:
    pushed = await held()
    [first] = await pushed.submit()
    bad = first.id
    receiver.answer = lambda one: 500 if one.group_id == bad and one.number < 3 else 204
    await pushed.tried()
    await pushed.submit(groups=3)
    await pushed.until(sent=4)
    ids = [one.id for one in receiver.received if one.group_id == bad]
    assert len(ids) >= 2
    assert len(set(ids)) == 1
    assert len(receiver.group_ids) == len(ids) + 3
    leases = {one.lease_id for one in receiver.received if one.group_id == bad}
    assert len(leases) == len(ids)


async def test_a_message_is_given_up_in_the_end_and_can_be_sent_again(
    held: Push, receiver: CallbackReceiver
) -> None:
    pushed = await held(callback_tries=3)
    receiver.answer = lambda _: 500
    [group] = await pushed.submit()
    await pushed.until(dead=1)
    assert len(receiver.received) == 3
    [dead] = (await pushed.room.core.callbacks.messages(pushed.run.id, state=CallbackMessageState.DEAD)).items
    assert (dead.tries, dead.status, dead.group_id) == (3, 500, group.id)
    assert (await pushed.room.core.status.snapshot()).callbacks["dead"] == 1
    assert "callback.dead" in [each.type for each in await pushed.room.store.list_events(after=0)]
    receiver.answer = lambda _: 204
    assert await pushed.room.core.callbacks.resend(pushed.run.id, [dead.id]) == 1
    await pushed.until(sent=1)
    assert len({one.id for one in receiver.received}) == 1


async def test_a_group_whose_message_was_given_up_can_be_pulled(
    held: Push, receiver: CallbackReceiver
) -> None:
    pushed = await held(callback_tries=1)
    receiver.answer = lambda _: 500
    [group] = await pushed.submit()
    await pushed.until(dead=1)
    pulled = await pushed.room.core.deliveries.lease(pushed.run.id, PULL)
    assert pulled.lease is not None
    assert pulled.lease.group_ids == [group.id]
    await pushed.room.core.deliveries.ack(pulled.lease.id)
    assert await pushed.room.core.callbacks.resend(pushed.run.id, None) == 1
    await pushed.until(skipped=1)
    assert len(receiver.received) == 1


async def test_an_old_message_is_given_up_whatever_its_tries(held: Push, receiver: CallbackReceiver) -> None:
    pushed = await held(callback_age_s=20)
    receiver.answer = lambda _: 503
    await pushed.submit()
    await pushed.until(dead=1)
    assert 3 <= len(receiver.received) <= 7


async def test_a_receiver_that_wants_no_more_is_left_alone_until_asked(
    held: Push, receiver: CallbackReceiver
) -> None:
    pushed = await held(callback_in_flight=1)
    receiver.answer = lambda _: 410
    await pushed.submit(groups=3)
    await pushed.until(pending=3)
    await pushed.room.until(lambda: len(receiver.received) == 1)
    await pushed.clock.advance(100)
    await pushed.submit()
    await pushed.until(pending=4)
    assert len(receiver.received) == 1
    status = await pushed.room.core.callbacks.status(pushed.run.id)
    assert (status.state.value, status.detail) == ("stopped", "the receiver answered 410")
    assert (await pushed.room.core.status.snapshot()).callbacks["stopped"] == 1
    receiver.answer = lambda _: 204
    await pushed.room.core.callbacks.resend(pushed.run.id, None)
    await pushed.until(sent=4)


async def test_retry_after_is_heeded(held: Push, receiver: CallbackReceiver) -> None:
    pushed = await held()
    receiver.answer = lambda one: 429 if one.number == 0 else 204
    receiver.headers = {"Retry-After": "200"}
    await pushed.submit()
    await pushed.room.until(lambda: len(receiver.received) == 1)
    waiting = await pushed.tried()
    assert 195 <= waiting.due_at - pushed.clock.now() <= 200
    await pushed.until(sent=1)


async def test_a_receiver_that_hangs_costs_its_time_and_is_tried_again(
    held: Push, receiver: CallbackReceiver
) -> None:
    pushed = await held(callback_timeout_s=0.05)
    receiver.let.clear()
    await pushed.submit()
    waiting = await pushed.tried()
    assert (waiting.status, waiting.error) == (None, "no answer within 0.05 s")
    receiver.let.set()
    await pushed.until(sent=1)


async def test_nobody_there_stalls_no_run_and_is_seldom_tried(held: Push) -> None:
    with socket.socket() as refuses:
        refuses.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{refuses.getsockname()[1]}/hook"
        pushed = await held(run={"callback_secret": new_secret(), "callback": {"url": url}})
        await pushed.submit(groups=50)

        async def finished() -> bool:
            await pushed.clock.advance(0.5)
            return (await pushed.room.core.runs.counts(pushed.run.id))["groups_finished"] == 50

        await pushed.room.until(finished)
        for _ in range(20):
            await pushed.clock.advance(1)
            await pushed.quiet()
        tries = sum(each.tries for each in await pushed.messages())
        assert 2 <= tries <= 10
        assert pushed.room.core.status  # the server goes on
        other = await pushed.room.core.runs.open(RunSpec(policy="pol"))
        await pushed.room.submit(other)
        delivered = await pushed.room.core.deliveries.lease(other.id, Wanted(trainer="t", wait_s=20))
        assert len(delivered.groups) == 1


async def test_a_receiver_that_takes_nothing_bounds_its_run_and_no_other(
    held: Push, receiver: CallbackReceiver
) -> None:
    receiver.answer = lambda _: 500
    task = {"instruction": "act", "grader": {"name": "exact"}}
    source = {"tasks": [task], "num_rollouts": 1, "epochs": None, "in_flight": 4}
    quota = Quota(max_undelivered_groups=6)
    pushed = await held(run={"source": source, "quota": quota})

    async def full() -> bool:
        await pushed.clock.advance(0.5)
        return await pushed.undelivered() >= 6

    await pushed.room.until(full)
    await pushed.clock.advance(30)
    assert await pushed.undelivered() <= 6 + 4


async def test_a_signature_by_another_secret_is_refused_and_tried_again(
    held: Push, receiver: CallbackReceiver
) -> None:
    pushed = await held(run={"callback_secret": new_secret()})
    await pushed.submit()
    assert (await pushed.tried()).status == 401
    assert (receiver.received, receiver.forged) == ([], 1)


# -- one effect each


async def test_a_receiver_may_ack_by_itself_before_it_answers(held: Push, receiver: CallbackReceiver) -> None:
    """Then the group is its own, whatever becomes of the answer."""
    receiver.let.clear()
    receiver.answer = lambda _: 500
    pushed = await held()
    await pushed.submit()
    await pushed.room.until(lambda: len(receiver.received) == 1)
    await pushed.room.core.deliveries.ack(receiver.received[0].lease_id)
    receiver.let.set()
    await pushed.until(sent=1)
    await pushed.clock.advance(100)
    assert len(receiver.received) == 1


async def test_commit_and_rewind_are_those_of_the_callbacks_trainer(
    push: Push, receiver: CallbackReceiver
) -> None:
    pushed = await push()
    await pushed.submit(groups=2)
    await pushed.until(sent=2)
    await pushed.room.core.deliveries.commit(pushed.run.id, "callback", 0, name="one", cursor=None)
    kept = set(receiver.group_ids)
    await pushed.submit(groups=3)
    await pushed.until(sent=5)
    before = {one.group_id: one.id for one in receiver.received}
    receiver.received.clear()
    epoch, _, _ = await pushed.room.core.deliveries.rewind(pushed.run.id, "callback", "one")
    await pushed.until(sent=5)
    again = {one.group_id: one.id for one in receiver.received}
    assert set(again) == set(before) - kept
    assert all(again[group] != before[group] for group in again)
    assert {one.data["delivery"]["lease"]["epoch"] for one in receiver.received} == {epoch}


async def test_an_answer_that_comes_after_a_rewind_counts_for_nothing(
    push: Push, receiver: CallbackReceiver
) -> None:
    receiver.let.clear()
    pushed = await push()
    [group] = await pushed.submit()
    await pushed.room.until(lambda: len(receiver.received) == 1)
    await pushed.room.core.deliveries.rewind(pushed.run.id, "callback", None)
    await pushed.room.until(lambda: len(receiver.received) == 2)
    assert await pushed.undelivered() == 1
    receiver.let.set()
    await pushed.until(sent=1)
    assert receiver.group_ids == [group.id] * 2
    assert len({one.id for one in receiver.received}) == 2


async def test_what_was_on_its_way_when_the_server_died_comes_again_under_its_id(
    make_room: MakeRoom, receiver: CallbackReceiver
) -> None:
    payloads = FakePayloads()
    receiver.let.clear()
    async with make_room(FakeExecutor(play=completes(payloads)), payloads=payloads) as room:
        pushed = Pushed(room, await room.run(**by_push(receiver, {})))
        await pushed.submit()
        await room.until(lambda: len(receiver.received) == 1)
        assert await pushed.counts() == {"sending": 1}
    receiver.let.set()
    async with make_room(FakeExecutor(), payloads=payloads) as room:
        await Pushed(room, pushed.run).until(sent=1)
    assert len(receiver.received) == 2
    assert len({one.id for one in receiver.received}) == 1


async def test_what_is_too_old_is_not_sent(held: Push, receiver: CallbackReceiver) -> None:
    receiver.answer = lambda _: 500
    rule = {"max_staleness": 1, "on_stale": "withhold"}
    pushed = await held(run={"staleness": rule})
    await pushed.submit()
    await pushed.tried()
    await pushed.room.core.policies.set_version("pol", 5, None)
    receiver.answer = lambda _: 204
    await pushed.until(skipped=1)
    assert await pushed.undelivered() == 0


async def test_a_run_is_forgotten_with_its_messages(push: Push, receiver: CallbackReceiver) -> None:
    pushed = await push()
    await pushed.submit()
    await pushed.until(sent=1)
    await pushed.room.core.runs.close(pushed.run.id)
    await pushed.until(sent=2)
    await pushed.room.core.runs.prune(pushed.run.id)
    assert await pushed.room.store.callback_secret(pushed.run.id) is None
