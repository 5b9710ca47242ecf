"""Lists are read to their end, however many pages that takes."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from rollserve.api.app import make_app
from rollserve.api.auth import Auth
from rollserve.build.http import HttpServer, bind, url_of
from rollserve.client import Client, Unreachable, listing
from rollserve.config import ApiSettings
from rollserve.errors import FailureKind, Unauthenticated
from rollserve.records.rollout import RolloutState
from rollserve.records.run import RetrySettings, RunState
from rollserve.store.payload import AttemptPayload
from rollserve.testing.fake_payloads import FakePayloads
from rollserve.testing.fakes_server import FakeExecutor, ended, failed, fails
from rollserve.testing.server_room import Room, a_room
from rollserve.wire import CreatePolicy, OpenRun, RegisterBackend

QUICK = RetrySettings(max_attempts=5, backoff_s=0.001, max_backoff_s=0.001)


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[Room]:
    async with a_room(tmp_path, FakeExecutor()) as room:
        yield room


@pytest.fixture
async def client(room: Room, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    monkeypatch.setattr(listing, "PAGE", 2)
    sock = bind("127.0.0.1", 0)
    server = HttpServer(make_app(room.core, ApiSettings(), Auth(room.store, required=False)), sock)
    await server.start()
    async with Client(url_of(sock)) as client:
        yield client
    await server.stop()


async def test_every_page(client: Client, room: Room) -> None:
    await client.create_policy(CreatePolicy(name="pol", model="m", tokenizer="tiny"))
    urls = [f"http://b:{n}" for n in range(1, 6)]
    for url in urls:
        await client.register_backend("pol", RegisterBackend(url=url))
    assert [backend.spec.url for backend in await client.backends("pol")] == urls
    run = await client.open_run(OpenRun(policy="pol", retry=QUICK))
    for name in ("c", "b", "a"):
        await run.commit(name, epoch=0)
    assert [checkpoint.name for checkpoint in await run.checkpoints()] == ["c", "b", "a"]


async def test_a_group_its_rollouts_and_their_attempts(client: Client, room: Room) -> None:
    room.executor.play = fails(failed(FailureKind.INFRASTRUCTURE))
    run = await room.run(retry=QUICK)
    [group] = await room.submit(run, rollouts=3)
    await room.ended(group, RolloutState.FAILED)
    await room.until(lambda: len(room.executor.history) == 15)

    async def over() -> bool:
        return (await client.group(group.id)).counts["failed"] == 3

    await room.until(over)
    rollouts = [rollout async for rollout in client.rollouts(group_id=group.id)]
    assert [rollout.index for rollout in rollouts] == [0, 1, 2]
    attempts = [attempt async for attempt in client.attempts(rollouts[1].id)]
    assert [attempt.epoch for attempt in attempts] == [1, 2, 3, 4, 5]
    status = await client.rollout(rollouts[1].id)
    assert (status.attempts, status.last_attempt) == (5, attempts[-1])


async def test_the_whole_log(client: Client, room: Room) -> None:
    assert isinstance(room.payloads, FakePayloads)
    run = await room.run()
    [group] = await room.submit(run)
    await room.started(1)
    [start] = room.executor.history
    lines = [(float(n), f"line {n}") for n in range(5)]
    ref = room.payloads.keep(f"{run.id}/{start.attempt_id}", AttemptPayload(log=lines))
    room.executor.end(start.attempt_id, ended(start, payload=ref))
    await room.ended(group, RolloutState.COMPLETED)
    assert await client.log(start.attempt_id) == lines


async def test_refused_events_are_an_error_and_no_empty_stream(room: Room) -> None:
    sock = bind("127.0.0.1", 0)
    server = HttpServer(make_app(room.core, ApiSettings(), Auth(room.store, required=True)), sock)
    await server.start()
    async with Client(url_of(sock)) as client, aclosing(client.events()) as events:
        with pytest.raises(Unauthenticated):
            await anext(events)
    await server.stop()


async def test_runs_and_policies_come_in_pages(client: Client, room: Room) -> None:
    for name in ("b", "a"):
        await client.create_policy(CreatePolicy(name=name, model="m", tokenizer="tiny"))
    first = await client.policies(limit=1)
    second = await client.policies(limit=1, cursor=first.next)
    assert [each.spec.name for each in (*first.items, *second.items)] == ["a", "b"]
    opened = [await client.open_run(OpenRun(policy="a")) for _ in range(3)]
    assert (await opened[0].pause()).state is RunState.PAUSED
    assert (await opened[0].resume()).state is RunState.OPEN
    closed = await opened[1].close()
    assert (closed.run.state, closed.ended, closed.stopping) == (RunState.CLOSED, 0, 0)
    newest = await client.runs(newest=True, state=RunState.OPEN, limit=1)
    older = await client.runs(newest=True, state=RunState.OPEN, limit=1, cursor=newest.next)
    assert [run.id for run in (*newest.items, *older.items)] == [opened[2].id, opened[0].id]
    assert older.next is None


async def test_nobody_at_the_address_is_told_from_a_busy_server() -> None:
    with socket.socket() as taken:  # bound and not listening: it refuses
        taken.bind(("127.0.0.1", 0))
        async with Client(f"http://127.0.0.1:{taken.getsockname()[1]}", patience_s=0) as client:
            with pytest.raises(Unreachable, match="no answer from"):
                await client.status()
