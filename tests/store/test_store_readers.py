"""The queue in front of the readers' threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from rollserve.errors import QueueFull, Unavailable
from rollserve.store import readers as readers_module
from rollserve.store.readers import READERS, Readers
from rollserve.store.sql import SqlStore
from rollserve.testing.held_readers import HeldReaders
from rollserve.testing.store_facts import make_group, open_run


@pytest.fixture
async def readers() -> AsyncIterator[Readers]:
    readers = Readers()
    yield readers
    await readers.close()


@pytest.fixture
async def held(readers: Readers) -> AsyncIterator[HeldReaders]:
    async with HeldReaders(readers) as held:
        yield held


async def test_what_waits_is_answered_in_turn(readers: Readers, held: HeldReaders) -> None:
    order: list[int] = []
    waiting = [asyncio.create_task(readers.run(partial(order.append, n))) for n in range(20)]
    await asyncio.sleep(0)
    assert readers.waiting == 20
    held.go()
    await asyncio.gather(*waiting)
    assert (sorted(order), readers.waiting) == (list(range(20)), 0)


async def test_one_too_many_is_told_at_once(
    readers: Readers, held: HeldReaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers_module, "MAX_WAITING", 2)
    waiting = [asyncio.create_task(readers.run(lambda: True)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull) as caught:
        await readers.run(lambda: True)
    assert caught.value.retry_after_s
    held.go()
    assert await asyncio.gather(*waiting) == [True, True]
    assert await readers.run(lambda: True)


async def test_nobody_waits_for_ever(
    readers: Readers, held: HeldReaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers_module, "READER_WAIT_S", 0.01)
    ran: list[int] = []
    with pytest.raises(Unavailable) as caught:
        await readers.run(partial(ran.append, 1))
    assert (caught.value.status, bool(caught.value.retry_after_s), readers.waiting) == (503, True, 0)
    held.go()
    await readers.run(partial(ran.append, 2))
    assert ran == [2]  # work whose caller was sent away is not done


async def test_a_cancelled_caller_leaves_the_queue_and_frees_no_thread(
    readers: Readers, held: HeldReaders
) -> None:
    ran: list[int] = []
    waits = asyncio.create_task(readers.run(partial(ran.append, 1)))
    await asyncio.sleep(0)
    for task in (waits, held.works[0]):
        task.cancel()
    await asyncio.gather(waits, held.works[0], return_exceptions=True)
    assert readers.waiting == 0
    later = asyncio.create_task(readers.run(partial(ran.append, 2)))
    await asyncio.sleep(0.01)
    assert (readers.waiting, ran) == (1, [])  # the thread still works for who has gone
    held.go()
    await later
    assert ran == [2]


async def test_closing_refuses_what_waits(readers: Readers, held: HeldReaders) -> None:
    waits = asyncio.create_task(readers.run(lambda: True))
    await asyncio.sleep(0)
    closing = asyncio.create_task(readers.close())
    await asyncio.sleep(0)
    held.go()
    with pytest.raises(Unavailable):
        await waits
    await closing


async def test_failures_are_the_callers(readers: Readers) -> None:
    def fail() -> None:
        raise KeyError("x")

    for _ in range(3 * READERS):
        with pytest.raises(KeyError):
            await readers.run(fail)


async def test_reads_and_submits_of_the_store_stand_in_one_bounded_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqlStore(f"sqlite:///{tmp_path / 's.db'}")
    await store.open()
    run = await open_run(store)
    assert store._readers is not None
    monkeypatch.setattr(readers_module, "MAX_WAITING", 0)
    async with HeldReaders(store._readers):
        for work in (store.get_run(run.id), store.submit_groups(run.id, [make_group()])):
            with pytest.raises(QueueFull):
                await work
    assert await store.get_run(run.id) == run
    await store.close()
