"""Wake-ups inside the server: whoever waits for something to happen listens to a bell instead of
asking the store again and again."""

from __future__ import annotations

import asyncio

from rollserve.rollouts.clock import Clock


class Bell:
    """``listen`` *before* looking; a ring between looking and waiting is then not lost."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def listen(self) -> asyncio.Event:
        """An event that the next ring sets."""
        return self._event

    def ring(self) -> None:
        self._event.set()
        self._event = asyncio.Event()


class Bells:
    """A bell for each key (a run's id); a key nobody listens to costs nothing. ``any`` rings with each."""

    def __init__(self) -> None:
        self._events: dict[str, asyncio.Event] = {}
        self.any = Bell()

    def listen(self, key: str) -> asyncio.Event:
        return self._events.setdefault(key, asyncio.Event())

    def ring(self, key: str) -> None:
        event = self._events.pop(key, None)
        if event is not None:
            event.set()
        self.any.ring()

    def ring_all(self) -> None:
        events, self._events = self._events, {}
        for event in events.values():
            event.set()
        self.any.ring()


async def heard(event: asyncio.Event, timeout_s: float | None) -> bool:
    """Wait for the event; False when ``timeout_s`` passed first."""
    if event.is_set():
        return True
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def heard_by(event: asyncio.Event, clock: Clock, due_s: float | None) -> None:
    """Wait for the event; no longer than ``due_s`` on ``clock``, which sets the event itself."""
    alarm = None if due_s is None else clock.call_later(due_s, event.set)
    try:
        await event.wait()
    finally:
        if alarm is not None:
            alarm.cancel()
