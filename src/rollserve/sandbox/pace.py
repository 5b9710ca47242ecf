"""At most so many at once on a machine, whatever the number of processes: a lock file for each.

The kernel lets go of a lock when its process ends in any way, so no place is ever lost.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rollserve.sandbox.locking import holding

_PAUSE_S = 0.02


class HostPace:
    """``folder`` is shared by those who are paced together. Waiting has no deadline of its own: whoever waits
    has one, and may be cancelled."""

    def __init__(self, folder: Path, at_once: int) -> None:
        self._folder = folder
        self._at_once = at_once
        self._mine = asyncio.Semaphore(at_once)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        async with self._mine:  # in order among those of this process
            lock = await self._taken()
            try:
                yield
            finally:
                os.close(lock)

    async def _taken(self) -> int:
        self._folder.mkdir(parents=True, exist_ok=True)
        while True:
            for number in range(self._at_once):
                lock = holding(_opened(self._folder / f"start-{number}"))
                if lock is not None:
                    return lock
            await asyncio.sleep(_PAUSE_S)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
