"""Reads: a few threads, a bounded queue in front of them, and a deadline for the wait in it.

The queue stands on the event loop and not in the threads' executor, whose own has no bound, gives up on
nobody, and runs work whose caller has long gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rollserve.errors import QueueFull, Unavailable

T = TypeVar("T")

READERS = 4
MAX_WAITING = 10_000
READER_WAIT_S = 30.0
RETRY_S = 2.0


class Readers:
    """First come, first served. ``waiting`` counts those who wait for a thread."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="rollserve-store-reader")
        self._places = asyncio.Semaphore(READERS)
        self._loop = asyncio.get_running_loop()
        self._open = True
        self.waiting = 0

    async def run(self, work: Callable[[], T]) -> T:
        """What ``work`` returns or raises, from a thread. A caller that is cancelled while it waits
        leaves the queue; later its work runs on, and what it finds is dropped. Raises ``QueueFull``
        when too many wait already, ``Unavailable`` when no thread came free in time or the store is
        closed."""
        await self._take_place()
        if not self._open:
            self._places.release()
            raise Unavailable("the store is closed")
        running = self._threads.submit(work)
        # The place is the thread's, not the caller's: who is cancelled does not free it any sooner.
        running.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._places.release))
        return await asyncio.wrap_future(running)

    async def _take_place(self) -> None:
        if not self._places.locked():
            await self._places.acquire()
            return
        if self.waiting >= MAX_WAITING:
            raise QueueFull(f"{self.waiting} reads are waiting already", retry_after_s=RETRY_S)
        self.waiting += 1
        try:
            async with asyncio.timeout(READER_WAIT_S):
                await self._places.acquire()
        except TimeoutError as error:
            raise Unavailable("too many reads are waiting", retry_after_s=RETRY_S) from error
        finally:
            self.waiting -= 1

    async def close(self) -> None:
        """What runs ends, what waits is refused. Idempotent."""
        self._open = False
        await asyncio.to_thread(self._threads.shutdown, wait=True)
