"""Updates of the weights over HTTP, as a trainer makes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollserve.client import Client, SyncClient
from rollserve.errors import Conflict, InvalidInput, LeaseLost, NotFound, VersionRegression
from rollserve.records.update import UpdateMode, UpdateState
from rollserve.testing.fakes_server import FakeControls, FakeExecutor
from rollserve.testing.server_room import Room, a_room
from rollserve.wire import CreatePolicy, RegisterBackend


@pytest.fixture
def controls() -> FakeControls:
    return FakeControls()


@pytest.fixture
async def room(tmp_path: Path, controls: FakeControls) -> AsyncIterator[Room]:
    async with a_room(tmp_path, FakeExecutor(), controls=controls) as room:
        yield room


@pytest.fixture
async def client(client: Client) -> Client:
    await client.register_backend("pol", RegisterBackend(url="http://a"))
    return client


async def test_inside_the_backends_are_paused_and_a_commit_ends_it(
    client: Client, controls: FakeControls
) -> None:
    async with client.updating("pol", mode=UpdateMode.ABORT) as update:
        assert controls.said[-1] == ("http://a", "pause abort")
        assert update.update.state is UpdateState.READY
        assert len(update.canary_ids) == 32
        policy = await update.commit(3, label="three", canary=[-1.0] * 31)
    assert (policy.version, policy.labels) == (3, {"three": 3})
    shown = await client.policy("pol")
    assert shown.update is not None
    assert shown.update.state is UpdateState.COMMITTED
    assert shown.canary is not None
    assert shown.canary.backends, "what each backend gave stands in the policy"


async def test_left_without_a_commit_it_is_aborted(client: Client, controls: FakeControls) -> None:
    with pytest.raises(ZeroDivisionError):
        async with client.updating("pol"):
            raise ZeroDivisionError
    policy = await client.policy("pol")
    assert policy.version == 0
    assert policy.update is not None
    assert policy.update.state is UpdateState.ABORTED
    assert controls.said[-1] == ("http://a", "resume")


async def test_it_is_renewed_while_inside(client: Client) -> None:
    updates = client.updates("pol")
    async with client.updating("pol", lease_s=3.0) as update, asyncio.timeout(30):
        first = await updates.get(update.update.id)
        while (await updates.get(update.update.id)).expires_at <= first.expires_at:
            await asyncio.sleep(0.02)
        await update.commit(1)


async def test_what_is_wrong_is_named(client: Client) -> None:
    updates = client.updates("pol")
    async with client.updating("pol") as update:
        with pytest.raises(Conflict, match="is open"):
            await updates.begin(UpdateMode.DRAIN, 60)
        with pytest.raises(Conflict, match="is open"):
            await client.set_version("pol", 5)
        with pytest.raises(InvalidInput) as wrong:
            await update.commit(1, canary=[-1.0])
        assert wrong.value.field == "canary"
        await update.commit(4)
    async with client.updating("pol") as update:
        with pytest.raises(VersionRegression) as old:
            await update.commit(3)
        assert old.value.field == "version"
    with pytest.raises(LeaseLost, match="aborted"):
        await updates.commit(update.update.id, 9, None, None)
    with pytest.raises(NotFound):
        await updates.get("up_other")
    with pytest.raises(InvalidInput) as lease:
        await updates.begin(UpdateMode.DRAIN, 0)
    assert lease.value.field == "lease_s"
    with pytest.raises(NotFound):
        await client.updates("none").begin(UpdateMode.DRAIN, 60)


async def test_without_backends(client: Client) -> None:
    await client.create_policy(CreatePolicy(name="bare", model="m", tokenizer="tiny"))
    with pytest.raises(Conflict, match="has no backends") as error:
        async with client.updating("bare"):
            raise AssertionError
    assert error.value.field == "backends"


async def test_a_pause_that_fails_ends_it(client: Client, controls: FakeControls) -> None:
    controls.gate.clear()
    begun = await client.updates("pol").begin(UpdateMode.DRAIN, 60)
    controls.away.add("http://a")
    controls.gate.set()
    with pytest.raises(LeaseLost, match="the pause failed: no backend answered"):
        await client.updates("pol").ready(begun.id)


async def test_the_synchronous_client(client: Client) -> None:
    url = client._transport.url

    def train() -> int:
        with SyncClient(url) as plain:
            aborted = plain.begin_update("pol", UpdateMode.KEEP)
            plain.abort_update(aborted)
            update = plain.begin_update("pol", UpdateMode.KEEP)
            return plain.commit_update(update, 2).version

    assert await asyncio.to_thread(train) == 2
