"""One backend as the pool sees it: its state, what is in flight on it, and when it may be tried again."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, Protocol

from rollserve.backend.base import Backend, BackendHealth
from rollserve.backend.concurrency import Concurrency, Reading
from rollserve.backend.homing import Pace
from rollserve.backend.latency import Latency
from rollserve.records import policy
from rollserve.records.policy import BackendState

START_SHARE = 0.1

Routing = Literal["sticky", "least_busy", "in_turn"]


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
    sent to. ``routing``: a session has a backend that it goes back to, the least busy one when it came
    (``sticky``), none (``least_busy``), or one that it was given in turn, whatever that is busy with
    (``in_turn``). A sticky session leaves its backend when that has more than ``imbalance`` calls in flight
    beyond (and more than twice) its fair number: what the least busy has, in proportion to their weights. A
    backend that is new, or back from failure, has ``START_SHARE`` of its weight at first and all of it after
    ``slow_start_s``. A backend on which nothing has moved for ``quiet_s`` while calls are in flight has its
    health asked. A backend that is ``outlier_ratio`` (0: off) times slower than its peers
    (``backend.latency``, looked at every ``outlier_s``) takes no calls for ``outlier_rest_s``, doubled each
    time in a row up to ``outlier_max_s``; then one call at a time, until one is fast enough. No more than
    ``outlier_share`` of the backends are out together, failed ones included. A generation that gives no sign
    of life for ``silent_s`` (a token when it is streamed, the whole answer when it is not) is given up.
    ``concurrency`` bounds the calls on a backend: a number, ``off``, or ``auto`` (``backend.concurrency``,
    fed every ``metrics_s``). A session whose backend is full waits for it as long as its prefix is worth
    (``backend.homing``), where reading a token of a prompt costs ``read_cost`` of sampling one (0: never)."""

    wait_s: float = 60.0
    strikes_to_fail: int = 3
    max_tries: int = 4
    retry_first_s: float = 0.1
    retry_max_s: float = 5.0
    probe_first_s: float = 0.5
    probe_max_s: float = 30.0
    busy_max_s: float = 30.0
    routing: Routing = "sticky"
    imbalance: int = 8
    slow_start_s: float = 30.0
    concurrency: int | Literal["auto", "off"] = "auto"
    metrics_s: float = 2.0
    read_cost: float = 0.1
    outlier_ratio: float = 3.0
    outlier_s: float = 5.0
    outlier_rest_s: float = 30.0
    outlier_max_s: float = 300.0
    outlier_share: float = 0.34
    quiet_s: float = 120.0
    silent_s: float = 600.0
    close_s: float = 10.0


Pause = Callable[[], AbstractContextManager[None]]
Cut = Literal["left", "silent"]


class Health(StrEnum):
    """``trial``: its health answers again; one call at a time until the first succeeds. ``slow``: far slower
    than its peers; once it has rested, one call at a time until one is fast enough."""

    OK = "ok"
    TRIAL = "trial"
    SLOW = "slow"
    FAILED = "failed"


@dataclass(slots=True, eq=False, kw_only=True)
class InFlight:
    """One generation. ``moved_at`` is its last sign of life (its start, a token); ``finished_before``
    what had succeeded on its backend when it began; ``cut`` why the pool has cancelled it. ``frozen``: its
    engine stands still, and so does its caller's time."""

    session_id: str
    request_id: str
    pause: Pause
    task: asyncio.Task[Any] | None
    moved_at: float
    finished_before: int
    started_at: float
    first_at: float | None = None
    stood: bool = False
    cut: Cut | None = None
    frozen: AbstractContextManager[None] | None = None

    def stop(self, why: Cut) -> None:
        """The call sees why in ``cut``. Once: the first reason stays."""
        if self.task is not None and self.cut is None:
            self.cut = why
            self.task.cancel()

    def freeze(self) -> None:
        self.stood = True
        if self.frozen is None:
            self.frozen = self.pause()
            self.frozen.__enter__()

    def thaw(self, now: float) -> None:
        frozen, self.frozen = self.frozen, None
        self.moved_at = now
        if frozen is not None:
            frozen.__exit__(None, None, None)


class Member:
    """``in_flight`` is the number of entries in ``calls``: there is no counter that could leak. ``since`` is
    when it began to take calls (again), ``most`` the most that were in flight since its metrics were last
    looked at, ``reading`` when that was and what its token counter showed. ``awaited`` are calls in line of
    sessions that are at home here, ``promised`` those that were called from the line and come now."""

    def __init__(
        self, record: policy.Backend, backend: Backend, now: float, bound: Concurrency | int | None = None
    ) -> None:
        self.record = record
        self.bound = bound
        self.most = 0
        self.reading: tuple[float, int] | None = None
        self.backend = backend
        self.health = Health.OK
        self.error: str | None = None
        self.strikes = 0
        self.relapses = 0
        self.reviver: asyncio.Task[None] | None = None
        self.rest_until = now
        self.moved_at = now
        self.since = now
        self.removed = False
        self.sessions: set[str] = set()
        self.calls: set[InFlight] = set()
        self.awaited: set[Hashable] = set()
        self.promised: set[Hashable] = set()
        self.pace = Pace()
        self.succeeded = 0
        self.failures = 0
        self.generated_tokens = 0
        self.latency = Latency()
        self.slow_until = now
        self.ejections = 0
        self.ejections_in_a_row = 0

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def in_flight(self) -> int:
        return len(self.calls)

    @property
    def limit(self) -> int | None:
        """How many calls may be in flight; None for any number."""
        return self.bound.limit if isinstance(self.bound, Concurrency) else self.bound

    @property
    def room(self) -> float:
        taken = self.in_flight + len(self.promised)
        return math.inf if self.limit is None else self.limit - taken

    @property
    def load(self) -> int:
        """Calls that are there, and those that want to be."""
        return self.in_flight + len(self.promised) + len(self.awaited)

    def learn(self, health: BackendHealth, now: float) -> None:
        """Of its metrics. An engine that says nothing of its throughput is not bounded."""
        most, self.most = self.most, self.in_flight
        if not isinstance(self.bound, Concurrency):
            return
        rate, count = health.tokens_per_s, health.generated_tokens
        if rate is None and count is None:
            self.bound = None
            return
        if rate is None:
            before, self.reading = self.reading, (now, count or 0)
            if before is None or now <= before[0]:
                return
            rate = max(0, (count or 0) - before[1]) / (now - before[0])
        reading = Reading(tokens_per_s=rate, kv_use=health.kv_use, preemptions=health.preemptions)
        self.bound.observe(reading, most)

    @property
    def ordered_off(self) -> bool:
        """Whether the server wants no call to go there."""
        return self.record.state in (BackendState.DRAINING, BackendState.FENCED)

    def share(self, now: float, slow_start_s: float) -> float:
        """Its weight, less what a slow start holds back."""
        age = now - self.since
        started = 1.0 if age >= slow_start_s else max(START_SHARE, age / slow_start_s)
        return self.record.spec.weight * started

    def takes(self, now: float, *, slow: bool = False) -> bool:
        """Whether a call may go to it now; with ``slow`` also while it is only slow."""
        if self.removed or self.ordered_off or self.rest_until > now or self.health is Health.FAILED:
            return False
        if self.health is Health.SLOW and (slow or self.slow_until > now):
            return slow
        return self.health is Health.OK or not (self.calls or self.promised)

    @property
    def half_open(self) -> bool:
        """It is slow, and the next call goes there to see whether it still is."""
        return self.health is Health.SLOW and not (self.calls or self.promised)

    def recover(self, now: float) -> None:
        """From failure or slowness: what it was like before says nothing any more."""
        self.health, self.error, self.since = Health.OK, None, now
        self.latency = Latency()

    def eject(self, why: str, until: float) -> None:
        self.health, self.error, self.slow_until = Health.SLOW, why, until
        self.ejections += 1
        self.ejections_in_a_row += 1

    @contextmanager
    def call(self, session_id: str, request_id: str, pause: Pause, now: float) -> Iterator[InFlight]:
        """Counts a call of the current task as in flight, whatever way it ends."""
        if not self.calls:
            self.moved_at = now
        call = InFlight(
            session_id=session_id,
            request_id=request_id,
            pause=pause,
            task=asyncio.current_task(),
            moved_at=now,
            finished_before=self.succeeded,
            started_at=now,
        )
        self.calls.add(call)
        self.most = max(self.most, len(self.calls))
        try:
            yield call
        finally:
            self.calls.remove(call)
            call.thaw(call.moved_at)

    def moved(self, call: InFlight, now: float) -> None:
        self.moved_at = call.moved_at = now

    def interrupt(self) -> None:
        """Cancel what is in flight; it is sent elsewhere."""
        for call in self.calls:
            call.stop("left")

    def stats(self) -> dict[str, Any]:
        return {
            "state": self.record.state.value if self.ordered_off else self.health.value,
            "in_flight": self.in_flight,
            "limit": self.limit,
            "sessions": len(self.sessions),
            "generated_tokens": self.generated_tokens,
            "calls": self.succeeded,
            "failures": self.failures,
            "ejections": self.ejections,
            "error": self.error,
        }


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
