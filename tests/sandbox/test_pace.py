"""At most so many at once on a machine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollserve.sandbox.pace import HostPace


async def test_two_processes_share_the_places(tmp_path: Path) -> None:
    ours, theirs = HostPace(tmp_path / "p", 2), HostPace(tmp_path / "p", 2)
    inside = most = 0

    async def one(pace: HostPace) -> None:
        nonlocal inside, most
        async with pace.place():
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.01)
            inside -= 1

    await asyncio.gather(*(one(pace) for pace in (ours, theirs) * 4))
    assert (most, inside) == (2, 0)


async def test_whoever_is_cancelled_takes_no_place(tmp_path: Path) -> None:
    pace, other = HostPace(tmp_path / "p", 1), HostPace(tmp_path / "p", 1)
    async with pace.place():
        waiting = asyncio.create_task(other.place().__aenter__())
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    async with asyncio.timeout(5), other.place():
        pass
