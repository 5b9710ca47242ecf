"""A clock that only moves when a test turns it."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from itertools import count


class FakeTimer:
    def __init__(self, callback: Callable[[], object]) -> None:
        self._callback: Callable[[], object] | None = callback

    @property
    def pending(self) -> bool:
        return self._callback is not None

    def cancel(self) -> None:
        self._callback = None

    def fire(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


class FakeClock:
    """``rollouts.clock.Clock`` by hand: ``await clock.advance(30)``."""

    def __init__(self, start: float = 1_700_000_000.0) -> None:
        self._start = start
        self._elapsed = 0.0
        self._order = count()
        self._timers: list[tuple[float, int, FakeTimer]] = []

    def now(self) -> float:
        return self._start + self._elapsed

    def monotonic(self) -> float:
        return self._elapsed

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> FakeTimer:
        timer = FakeTimer(callback)
        heapq.heappush(self._timers, (self._elapsed + max(0.0, delay_s), next(self._order), timer))
        return timer

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        timer = self.call_later(seconds, lambda: None if done.done() else done.set_result(None))
        try:
            await done
        finally:
            timer.cancel()

    @property
    def timers(self) -> int:
        """How many are still to fire."""
        return sum(timer.pending for _, _, timer in self._timers)

    async def settle(self, rounds: int = 25) -> None:
        """Let the event loop run what is ready, so that what waits on this clock waits."""
        for _ in range(rounds):
            await asyncio.sleep(0)

    async def advance(self, seconds: float) -> None:
        """Move on, firing timers at their time and letting the loop settle after each."""
        await self.settle()
        end = self._elapsed + seconds
        while self._timers and self._timers[0][0] <= end:
            due, _, timer = heapq.heappop(self._timers)
            if timer.pending:
                self._elapsed = max(self._elapsed, due)
                timer.fire()
                await self.settle()
        self._elapsed = end
        await self.settle()
