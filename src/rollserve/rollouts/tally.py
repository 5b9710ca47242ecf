"""Counters that only grow, and the delay of the event loop: what the live view is made of."""

from __future__ import annotations

import asyncio
from collections import Counter, deque


class Tally:
    """Counters by name since the server's start."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, name: str, by: int = 1) -> None:
        self._counts[name] += by

    def counts(self) -> dict[str, float]:
        return {name: float(count) for name, count in self._counts.items()}


class LoopLag:
    """How late the event loop wakes a sleeper: 99th percentile over about the last minute."""

    _PERIOD_S = 0.05
    _SAMPLES = 1200

    def __init__(self) -> None:
        self._late_ms: deque[float] = deque(maxlen=self._SAMPLES)

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self._PERIOD_S
            await asyncio.sleep(self._PERIOD_S)
            self._late_ms.append(max(0.0, (loop.time() - due) * 1000))

    @property
    def p99_ms(self) -> float:
        ordered = sorted(self._late_ms)
        return ordered[int(len(ordered) * 0.99)] if ordered else 0.0
