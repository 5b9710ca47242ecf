"""Small writes leave together, large ones at once, and closing loses none."""

from __future__ import annotations

import asyncio

import pytest

from rollserve.build.gathering import GATHERED_BYTES, Gathered


class Recorded(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1)})
        self.writes: list[bytes] = []
        self.closed = self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 5


@pytest.fixture
async def under() -> Recorded:
    return Recorded()


@pytest.fixture
async def gathered(under: Recorded) -> Gathered:
    return Gathered(under, asyncio.get_running_loop())


async def test_small_writes_of_a_turn_are_one(gathered: Gathered, under: Recorded) -> None:
    gathered.write(b"head\r\n")
    gathered.write(bytearray(b"body"))
    assert under.writes == []
    assert gathered.get_write_buffer_size() == 15
    await asyncio.sleep(0)
    assert under.writes == [b"head\r\nbody"]
    gathered.write(b"next")
    await asyncio.sleep(0)
    assert under.writes == [b"head\r\nbody", b"next"]


async def test_what_is_large_goes_at_once_in_its_order(gathered: Gathered, under: Recorded) -> None:
    large = b"x" * GATHERED_BYTES
    gathered.write(b"head")
    gathered.write(large)
    assert under.writes == [b"head" + large]
    gathered.write(b"end")
    await asyncio.sleep(0)
    assert under.writes == [b"head" + large, b"end"]


async def test_closing_sends_what_waits_and_aborting_does_not(gathered: Gathered, under: Recorded) -> None:
    gathered.write(b"last")
    gathered.close()
    assert (under.writes, under.closed, gathered.is_closing()) == ([b"last"], True, True)
    gathered.write(b"late")
    await asyncio.sleep(0)
    assert under.writes == [b"last"]


async def test_aborting_drops_what_waits(gathered: Gathered, under: Recorded) -> None:
    gathered.write(b"lost")
    gathered.abort()
    await asyncio.sleep(0)
    assert (under.writes, under.aborted) == ([], True)
    assert gathered.get_extra_info("peername") == ("127.0.0.1", 1)
