"""A trainer that comes back, and the one that it replaces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollserve.client import Client
from rollserve.errors import StaleEpoch
from rollserve.testing.fakes_server import FakeExecutor, completes
from rollserve.testing.server_room import Room, a_room, a_task
from rollserve.wire import OpenRun


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[Room]:
    async with a_room(tmp_path, FakeExecutor(play=completes())) as room:
        yield room


async def test_a_checkpoint_that_was_written_and_not_committed_is_passed_over(client: Client) -> None:
    run = await client.open_run(OpenRun(policy="pol"))
    await run.submit([a_task()] * 3, num_rollouts=1)
    groups = run.groups(auto_ack=False, prefetch=1)
    first = await anext(groups)
    await first.ack()
    await run.commit("one", epoch=0)
    second = await anext(groups)
    await second.ack()
    await groups.aclose()
    resumed = await run.resume_from(["one", "two"])
    assert resumed.checkpoint is not None
    assert (resumed.checkpoint.name, resumed.epoch) == ("one", 1)
    again = run.groups(auto_ack=False, prefetch=1, epoch=resumed.epoch)
    assert (await anext(again)).group.id == second.group.id
    await again.aclose()
    assert (await run.resume_from([])).checkpoint is None


async def test_a_stream_does_not_go_on_under_the_epoch_of_who_took_over(client: Client, room: Room) -> None:
    """It was opened without naming an epoch: it stays with the one of then, also while it waits."""
    run = await client.open_run(OpenRun(policy="pol"))
    await run.submit([a_task()], num_rollouts=1)
    groups = run.groups(auto_ack=False, prefetch=1)
    held = await anext(groups)
    waiting = asyncio.create_task(anext(groups))
    await room.until(lambda: room.core.deliveries.waiting == 1)
    await run.rewind()
    with pytest.raises(StaleEpoch):
        await held.ack()
    with pytest.raises(StaleEpoch):
        await waiting
    with pytest.raises(StaleEpoch):
        await run.commit("late", epoch=held.epoch)
    await groups.aclose()
