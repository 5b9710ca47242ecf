"""The feed of events: many readers, each with its own place, and the store read once for all of them.

While anybody listens one loop follows the store and keeps the newest events, ready to send, in memory;
a reader further behind reads from the store. Readers hold a cursor, never a queue, so that a slow one
costs nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rollserve.errors import InvalidInput, QueueFull
from rollserve.records.event import Event
from rollserve.rollouts.bell import Bell, heard
from rollserve.rollouts.ports import Ports

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FeedEvent:
    """``json`` is the event's record."""

    seq: int
    type: str
    run_id: str | None
    json: str


def _ready(event: Event) -> FeedEvent:
    return FeedEvent(event.seq, event.type, event.run_id, event.model_dump_json())


class EventFeed:
    """``happened`` is rung by whatever may have appended events."""

    _KEPT = 4096
    _PAGE = 500
    _GATHER_S = 0.02
    _LOOK_S = 5.0
    """Between looks when no bell rings."""

    def __init__(self, ports: Ports, *, happened: Bell) -> None:
        self._store = ports.store
        self._most = ports.settings.api.max_event_streams
        self._happened = happened
        self._fresh = Bell()
        self._wanted = Bell()
        self._recent: deque[FeedEvent] = deque(maxlen=self._KEPT)
        self._tail = 0
        self._readers = 0

    @property
    def readers(self) -> int:
        return self._readers

    def check_room(self) -> None:
        """Raises ``QueueFull`` when there are too many readers already."""
        if self._readers >= self._most:
            raise QueueFull(f"{self._most} readers of events already", retry_after_s=5.0)

    @asynccontextmanager
    async def reader(self) -> AsyncIterator[EventFeed]:
        """A place among the readers. Raises ``QueueFull`` when there are too many."""
        self.check_room()
        self._readers += 1
        self._wanted.ring()
        try:
            yield self
        finally:
            self._readers -= 1

    async def read(self, after: int, run_id: str | None = None) -> tuple[list[FeedEvent], int]:
        """Up to a page of events after ``after``, and the cursor for the next read."""
        if self._recent and self._recent[0].seq <= after + 1:
            return self._from_memory(after, run_id)
        tail = self._tail
        events = await self._store.list_events(after=after, limit=self._PAGE, run_id=run_id)
        last = events[-1].seq if events else after
        if len(events) < self._PAGE:
            last = max(last, tail)  # nothing of this run up to there
        return [_ready(event) for event in events], last

    def _from_memory(self, after: int, run_id: str | None) -> tuple[list[FeedEvent], int]:
        newer: list[FeedEvent] = []
        for event in reversed(self._recent):
            if event.seq <= after:
                break
            newer.append(event)
        page = newer[: -self._PAGE - 1 : -1]  # the oldest of them, in order
        last = page[-1].seq if page else after
        return [event for event in page if run_id is None or event.run_id == run_id], last

    async def check_cursor(self, after: int, field: str) -> None:
        """Raises ``InvalidInput`` for one beyond the newest event: of another data folder, say. It would wait
        for events that others have seen long ago."""
        if after and not await self._store.list_events(after=after - 1, limit=1):
            newest = await self._last_seq(0)
            hint = f"the newest event is {newest}: go on from there, or from 0 for all that are kept"
            raise InvalidInput(f"there is no event {after} yet", field=field, hint=hint)

    def listen(self) -> asyncio.Event:
        """Set when there is something new to read."""
        return self._fresh.listen()

    async def run(self) -> None:
        """Follow the store while there are readers; until cancelled."""
        behind = False
        while True:
            wanted = self._wanted.listen()
            if not self._readers:
                self._recent.clear()
                await wanted.wait()
                behind = True
            rung = self._happened.listen()
            try:
                if behind:
                    self._tail = await self._last_seq(self._tail)
                    behind = False
                    self._fresh.ring()
                more = await self._follow()
            except Exception:
                log.exception("could not read events")
                more = False
            if not more:
                await heard(rung, self._LOOK_S)
                await asyncio.sleep(self._GATHER_S)

    async def _follow(self) -> bool:
        events = await self._store.list_events(after=self._tail, limit=self._PAGE)
        if events:
            self._recent.extend(_ready(event) for event in events)
            self._tail = events[-1].seq
            self._fresh.ring()
        return len(events) == self._PAGE

    async def _last_seq(self, known: int) -> int:
        """The newest event's number, found by looking ahead in doubling steps and then halving."""
        step = 1
        while await self._store.list_events(after=known + step, limit=1):
            known += step
            step *= 2
        low, high = known, known + step
        while low < high:
            middle = (low + high) // 2
            if await self._store.list_events(after=middle, limit=1):
                low = middle + 1
            else:
                high = middle
        return low
