"""Readers of the API may crowd the store: what the server owes its workers and trainers is not lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rollserve.errors import FailureKind, QueueFull
from rollserve.executor.base import BackendReport
from rollserve.records.policy import BackendSpec, BackendState
from rollserve.records.rollout import RolloutState
from rollserve.rollouts import patience, scheduler
from rollserve.store import readers as readers_module
from rollserve.testing.fake_payloads import FakePayloads
from rollserve.testing.fakes_server import FakeExecutor, completes, ended, failed
from rollserve.testing.held_readers import HeldReaders
from rollserve.testing.server_room import MakeRoom, Room


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_FIRST_DELAY_S", 0.002)
    monkeypatch.setattr(patience, "_MAX_DELAY_S", 0.002)
    monkeypatch.setattr(scheduler.Scheduler, "_RETRY_S", 0.01)


@asynccontextmanager
async def crowded(room: Room, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """No read finds room."""
    assert room.store._readers is not None
    async with HeldReaders(room.store._readers):
        with monkeypatch.context() as patch:
            patch.setattr(readers_module, "MAX_WAITING", 0)
            with pytest.raises(QueueFull):
                await room.store.has_admin_key()
            yield


async def test_a_lost_attempt_ends_and_runs_again(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    run = await room.run()
    [group] = await room.submit(run)
    await room.started(1)
    async with crowded(room, monkeypatch):
        room.executor.kill("w1")
        await asyncio.sleep(0.05)
        assert len(room.executor.history) == 1
    await room.started(2)
    [first, _] = (await room.core.groups.attempts(room.executor.history[0].rollout_id)).items
    assert first.failure is not None
    assert first.failure.code == "worker_lost"
    room.executor.end(room.executor.history[1].attempt_id, ended(room.executor.history[1]))
    await room.ended(group, RolloutState.COMPLETED)


async def test_a_reported_end_is_taken(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    run = await room.run()
    [group] = await room.submit(run)
    await room.started(1)
    [start] = room.executor.history
    async with crowded(room, monkeypatch):
        stopped = ended(start, failure=failed(FailureKind.CANCELLED), outcome=RolloutState.CANCELLED)
        room.executor.end(start.attempt_id, stopped)
        await asyncio.sleep(0.05)
    await room.started(2)
    assert (await room.rollout(group)).epoch == 2


async def test_a_rollout_is_started_in_a_run_whose_settings_must_be_read(
    make_room: MakeRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_room(FakeExecutor(workers=0)) as room:
        run = await room.run()
        await room.submit(run)
        room.core.runs._specs.forget(run.id)
        async with crowded(room, monkeypatch):
            room.executor.join()
            await asyncio.sleep(0.05)
            assert room.executor.history == []
        await room.started(1)
        [attempt] = (await room.core.groups.attempts(room.executor.history[0].rollout_id)).items
        assert attempt.finished_at is None


async def test_what_a_worker_saw_of_a_backend_is_kept(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    await room.run()
    backend = await room.core.policies.register("pol", BackendSpec(url="http://b:1"))
    async with crowded(room, monkeypatch):
        room.executor.say("w1", BackendReport(backend_id=backend.id, ok=False, detail="gone"))
        await asyncio.sleep(0.05)

    async def told() -> bool:
        return (await room.store.get_backend(backend.id)).state is BackendState.FAILED

    await room.until(told)


async def test_samples_are_not_dropped(make_room: MakeRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    payloads = FakePayloads()
    async with make_room(FakeExecutor(play=completes(payloads)), payloads=payloads) as room:
        run = await room.run()
        [group] = await room.submit(run)
        rollout = await room.ended(group, RolloutState.COMPLETED)
        async with crowded(room, monkeypatch):
            making = asyncio.create_task(room.core._maker.make(rollout))
            await asyncio.sleep(0.05)
            assert not making.done()
        made = await making
        assert (len(made.samples), made.note) == (1, None)


async def test_the_state_at_a_glance_is_the_last_one_known(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollserve.rollouts.status.Status._FRESH_S", 0.0)
    await room.run()
    await room.core.policies.register("pol", BackendSpec(url="http://b:1"))
    before = await room.core.status.snapshot()
    assert len(before.backends) == 1
    async with crowded(room, monkeypatch):
        assert (await room.core.status.snapshot()).backends == before.backends
