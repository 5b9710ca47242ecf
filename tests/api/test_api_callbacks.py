"""Callbacks over HTTP: what a receiver does with a message, and what anybody may know of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from rollserve.client import Client, new_secret
from rollserve.errors import NotFound
from rollserve.records.callback import CallbackMessageState, CallbackRule
from rollserve.records.policy import PolicySpec
from rollserve.testing.callback_receiver import CallbackReceiver, a_receiver
from rollserve.testing.server_room import Room, a_task
from rollserve.wire import OpenRun


@pytest.fixture
async def receiver() -> AsyncIterator[CallbackReceiver]:
    async with a_receiver() as receiver:
        yield receiver


@pytest.fixture
async def client(served: httpx.AsyncClient) -> AsyncIterator[Client]:
    async with Client(str(served.base_url)) as client:
        yield client


async def test_a_receiver_acks_what_it_keeps(room: Room, client: Client, receiver: CallbackReceiver) -> None:
    await room.core.policies.create(PolicySpec(name="pol", model="m", tokenizer="tiny"))
    spec = OpenRun.model_validate(
        {"policy": "pol", "callback": {"url": receiver.url}, "callback_secret": receiver.secret}
    )
    run = await client.open_run(spec)
    receiver.let.clear()
    await run.submit([a_task()], num_rollouts=2)
    await room.until(lambda: receiver.received)
    got = receiver.received[0]
    told = client.callback(receiver.secret, got.headers, got.raw)
    assert (told.type, told.run_id, told.id) == ("group.finished", run.id, got.id)
    [group] = told.groups
    assert [sample.ids.tolist() for sample in group.samples] == [[0, 1, 2, 3, 100, 101, 102]] * 2
    await group.ack()
    assert (await run.status()).counts["groups_undelivered"] == 0
    await run.commit("one", trainer="callback", epoch=group.epoch)
    receiver.let.set()

    async def sent() -> bool:
        return (await run.callback()).messages["sent"] == 1

    await room.until(sent)
    assert [each.state async for each in run.messages(CallbackMessageState.SENT)] == [
        CallbackMessageState.SENT
    ]
    assert await run.resend() == 0


async def test_the_secret_is_told_nobody(
    room: Room, client: Client, served: httpx.AsyncClient, receiver: CallbackReceiver
) -> None:
    await room.core.policies.create(PolicySpec(name="pol", model="m", tokenizer="tiny"))
    secret = new_secret()
    body = {"policy": "pol", "callback": {"url": receiver.url}, "callback_secret": secret}
    opened = await served.post("/v1/runs", json=body)
    run_id = opened.json()["id"]
    answers = [opened]
    for path in ("", "/callback", "/callback/messages"):
        answers.append(await served.get(f"/v1/runs/{run_id}{path}"))
    answers.append(await served.get("/v1/status"))
    broken = await served.post("/v1/runs", json=body | {"callback": None})
    assert broken.status_code == 400
    assert all(secret not in each.text for each in [*answers, broken])
    assert secret not in repr(OpenRun.model_validate(body))
    run = await client.open_run(OpenRun(policy="pol"))
    with pytest.raises(NotFound):
        await run.callback()
    assert CallbackRule(url="http://x").trainer == "callback"


async def test_messages_are_listed_by_state_and_metrics_count_them(
    room: Room, served: httpx.AsyncClient, receiver: CallbackReceiver
) -> None:
    await room.core.policies.create(PolicySpec(name="pol", model="m", tokenizer="tiny"))
    receiver.answer = lambda _: 410
    body = {"policy": "pol", "callback": {"url": receiver.url}, "callback_secret": receiver.secret}
    run_id = (await served.post("/v1/runs", json=body)).json()["id"]
    task = a_task().model_dump(mode="json")
    await served.post(f"/v1/runs/{run_id}/groups", json={"groups": [{"task": task}]})

    async def stopped() -> bool:
        return (await room.core.callbacks.status(run_id)).state.value == "stopped"

    await room.until(stopped)
    waiting = (await served.get(f"/v1/runs/{run_id}/callback/messages?state=pending")).json()["items"]
    assert [each["status"] for each in waiting] == [410]
    assert (await served.get(f"/v1/runs/{run_id}/callback/messages?state=dead")).json()["items"] == []
    wrong = await served.get(f"/v1/runs/{run_id}/callback/messages?state=lost")
    assert (wrong.status_code, wrong.json()["field"]) == (400, "state")

    async def shown() -> bool:
        text = (await served.get("/metrics")).text
        return 'rollserve_callback_messages{state="stopped"} 1.0' in text

    await room.until(shown)
    receiver.answer = lambda _: 204
    again = await served.post(f"/v1/runs/{run_id}/callback/resend", json={"ids": ["msg_none"]})
    assert again.json() == {"messages": 0}

    async def sent() -> bool:
        return (await room.core.callbacks.status(run_id)).messages["sent"] == 1

    await room.until(sent)
