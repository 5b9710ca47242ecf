"""What a trainer sees of groups that are cut short, and of runs that are over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollserve.client import Client, RemoteError, SyncClient, SyncRun
from rollserve.errors import FailureKind
from rollserve.records.control import GroupRule, StalenessRule, TaskSource
from rollserve.records.policy import BackendState
from rollserve.testing.fake_payloads import FakePayloads
from rollserve.testing.fakes_server import FakeExecutor, completes, ended, failed
from rollserve.testing.server_room import Room, a_room, a_task
from rollserve.wire import OpenRun, RegisterBackend


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[Room]:
    payloads = FakePayloads()
    async with a_room(tmp_path, FakeExecutor(), payloads=payloads) as room:
        yield room


async def test_the_reason_for_each_missing_rollout(client: Client, room: Room) -> None:
    run = await client.open_run(OpenRun(policy="pol"))
    rule = GroupRule(oversample=1, min_usable=1, stragglers="cancel")
    await run.submit([a_task()], num_rollouts=2, rule=rule)
    await room.started(3)
    _, broken, good = room.executor.history
    room.executor.end(broken.attempt_id, ended(broken, failure=failed(FailureKind.AGENT, "crash")))
    await room.until(lambda: room.executor.acks)
    room.executor.end(good.attempt_id, ended(good, reward=0.5))
    groups = run.groups()
    group = await anext(groups)
    assert group.rewards == [None, None, 0.5]
    assert group.missing == {
        0: "cancelled: straggler: the others were enough, and it had not ended",
        1: "agent: crash: agent trouble",
    }
    await groups.aclose()


async def test_the_stream_ends_with_the_source(client: Client, room: Room) -> None:
    room.executor.play = completes(room.payloads)
    source = TaskSource(tasks=tuple(a_task(instruction=f"t{n}") for n in range(5)), num_rollouts=2)
    run = await client.open_run(OpenRun(policy="pol", source=source, staleness=StalenessRule()))
    taken = [group.group.task.instruction async for group in run.groups(prefetch=2)]
    assert sorted(taken) == [f"t{n}" for n in range(5)]
    status = await run.status()
    assert status.bins["tokens"]["delivered"].count == 10
    assert status.source is not None


async def test_the_stream_ends_with_the_run(client: Client, room: Room) -> None:
    room.executor.play = completes(room.payloads)
    run = await client.open_run(OpenRun(policy="pol"))
    await run.submit([a_task()], num_rollouts=1)
    seen = 0
    async for _ in run.groups():
        seen += 1
        await run.close()
    assert seen == 1


async def test_so_does_the_synchronous_one(client: Client, room: Room) -> None:
    room.executor.play = completes(room.payloads)
    source = TaskSource(tasks=(a_task(), a_task()), num_rollouts=1)
    run = await client.open_run(OpenRun(policy="pol", source=source))

    def train() -> int:
        with SyncClient(client._transport.url) as sync:
            handle = SyncRun(sync._loop, sync.call(sync.client.run(run.id)))
            return len(list(handle.groups()))

    assert await asyncio.to_thread(train) == 2


async def test_a_source_that_failed_is_an_error(client: Client, room: Room, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("{\n")
    run = await client.open_run(OpenRun(policy="pol", source=TaskSource(path="tasks.jsonl")))
    with pytest.raises(RemoteError) as caught:
        await anext(run.groups())
    assert caught.value.remote_code == "source_failed"
    assert "line 1" in caught.value.message


async def test_a_policy_and_its_backends_are_held_and_let_go(client: Client) -> None:
    await client.pause_policy("pol")
    assert (await client.policy("pol")).paused
    await client.resume_policy("pol")
    assert not (await client.policy("pol")).paused
    backend = await client.register_backend("pol", RegisterBackend(url="http://there"))
    await client.drain_backend("pol", backend.id)
    assert [each.state for each in await client.backends("pol")] == [BackendState.DRAINING]
    await client.remove_backend("pol", backend.id)
    assert await client.backends("pol") == []
