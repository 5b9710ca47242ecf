"""A store whose readers are all at work, until the test lets them go."""

from __future__ import annotations

import asyncio
import threading

from rollserve.store.readers import READERS, Readers


class HeldReaders:
    """``async with HeldReaders(readers)``: every thread is taken inside, or until ``go``."""

    def __init__(self, readers: Readers) -> None:
        self._readers = readers
        self._go = threading.Event()
        self._begun = threading.Semaphore(0)
        self.works: list[asyncio.Task[bool]] = []

    async def __aenter__(self) -> HeldReaders:
        self.works = [asyncio.create_task(self._readers.run(self._work)) for _ in range(READERS)]
        for _ in range(READERS):
            await asyncio.to_thread(self._begun.acquire)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.go()
        await asyncio.gather(*self.works, return_exceptions=True)

    def _work(self) -> bool:
        self._begun.release()
        return self._go.wait(60)

    def go(self) -> None:
        self._go.set()
