"""One backend as the pool sees it: its state, what is in flight on it, and when it may be tried again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from rollserve.backend.base import Backend
from rollserve.records import policy
from rollserve.records.policy import BackendState


class Clock(Protocol):
    """Monotonic seconds, and a sleep on the same clock."""

    def monotonic(self) -> float: ...
    async def sleep(self, seconds: float) -> None: ...


class LoopClock:
    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """``wait_s`` bounds how long a call waits while no backend can take it. After
    ``strikes_to_fail`` failures in a row a backend is failed; its health is then asked after
    ``probe_first_s``, doubling up to ``probe_max_s``. ``max_tries`` bounds the backends one call is
    sent to. A session leaves its backend when that has more than ``imbalance`` calls in flight beyond
    (and more than twice) those of the least busy. A backend on which nothing has moved for ``quiet_s``
    while calls are in flight has its health asked."""

    wait_s: float = 60.0
    strikes_to_fail: int = 3
    max_tries: int = 4
    retry_first_s: float = 0.1
    retry_max_s: float = 5.0
    probe_first_s: float = 0.5
    probe_max_s: float = 30.0
    busy_max_s: float = 30.0
    imbalance: int = 8
    quiet_s: float = 120.0
    close_s: float = 10.0


class Health(StrEnum):
    """``trial``: its health answers again; one call at a time until the first succeeds."""

    OK = "ok"
    TRIAL = "trial"
    FAILED = "failed"


class Member:
    """``in_flight`` is the number of entries in ``calls``: there is no counter that could leak."""

    def __init__(self, record: policy.Backend, backend: Backend, now: float) -> None:
        self.record = record
        self.backend = backend
        self.health = Health.OK
        self.error: str | None = None
        self.strikes = 0
        self.relapses = 0
        self.reviver: asyncio.Task[None] | None = None
        self.rest_until = now
        self.moved_at = now
        self.removed = False
        self.sessions: set[str] = set()
        self.calls: dict[object, asyncio.Task[Any] | None] = {}
        self.interrupted: set[object] = set()
        self.succeeded = 0
        self.failures = 0
        self.generated_tokens = 0

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def in_flight(self) -> int:
        return len(self.calls)

    @property
    def draining(self) -> bool:
        return self.record.state is BackendState.DRAINING

    def takes(self, now: float) -> bool:
        """Whether a call may go to it now."""
        if self.removed or self.draining or self.rest_until > now or self.health is Health.FAILED:
            return False
        return self.health is Health.OK or not self.calls

    @contextmanager
    def call(self) -> Iterator[object]:
        """Counts a call of the current task as in flight, whatever way it ends."""
        token = object()
        self.calls[token] = asyncio.current_task()
        try:
            yield token
        finally:
            del self.calls[token]
            self.interrupted.discard(token)

    def interrupt(self) -> None:
        """Cancel what is in flight; each call sees its token in ``interrupted`` and is sent elsewhere."""
        for token, task in self.calls.items():
            if task is not None and token not in self.interrupted:
                self.interrupted.add(token)
                task.cancel()

    def stats(self) -> dict[str, Any]:
        return {
            "state": self.health.value if not self.draining else "draining",
            "in_flight": self.in_flight,
            "sessions": len(self.sessions),
            "generated_tokens": self.generated_tokens,
            "calls": self.succeeded,
            "failures": self.failures,
            "error": self.error,
        }


def backoff_s(attempt: int, first_s: float, max_s: float, rng: random.Random) -> float:
    """Exponential with full jitter above half: ``attempt`` counts from 0."""
    ceiling = min(max_s, first_s * 2.0 ** min(attempt, 30))
    return ceiling * (0.5 + rng.random() / 2)


async def wait_any(clock: Clock, event: asyncio.Event, seconds: float) -> None:
    """Until the event is set, or for so long."""
    waits: set[asyncio.Future[Any]] = {_task(event.wait), _task(lambda: clock.sleep(seconds))}
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _task(work: Callable[[], Awaitable[Any]]) -> asyncio.Future[Any]:
    return asyncio.ensure_future(work())
