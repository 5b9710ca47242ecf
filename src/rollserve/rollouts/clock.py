"""Time, as something tests can hold, and the budgets that are made of it.

A budget of an attempt is *active* time: an attempt that waits for a slot, a paused policy or a busy
gateway is charged nothing. Only ``wall_s`` runs on regardless, so that nothing waits for ever.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol

from rollserve.errors import EpisodeFailure, LimitReached

Judge = Callable[[], Awaitable[EpisodeFailure | None]]
"""Asked when a budget has run out, before the body is stopped: what it returns is raised instead of
``LimitReached``. Must not raise, and bounds itself."""

_ROUNDING_S = 1e-6


class Cancellable(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """``now`` is wall-clock seconds since the epoch, ``monotonic`` never goes back."""

    def now(self) -> float: ...
    def monotonic(self) -> float: ...
    async def sleep(self, seconds: float) -> None: ...
    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Cancellable:
        """Call back on the running event loop, ``delay_s`` seconds from now."""


class SystemClock:
    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Cancellable:
        return asyncio.get_running_loop().call_later(max(0.0, delay_s), callback)


class _Interrupt:
    """Cancels the task inside a scope, and tells that from a cancel that came from elsewhere (the
    counting of ``asyncio.timeout``)."""

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._before = 0
        self.fired = False

    def enter(self) -> None:
        self._task = asyncio.current_task()
        self._before = 0 if self._task is None else self._task.cancelling()

    def fire(self) -> None:
        if self._task is not None and not self.fired:
            self.fired = True
            self._task.cancel()

    def caused(self, exc_type: type[BaseException] | None) -> bool:
        """On leaving: is the ``CancelledError`` in flight ours alone?"""
        task, self._task = self._task, None
        if not self.fired or task is None:
            return False
        return task.uncancel() <= self._before and exc_type is asyncio.CancelledError


class Deadline:
    """``async with Deadline(clock, seconds)``: wall time, for releases and waits. Raises
    ``TimeoutError``."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._interrupt = _Interrupt()
        self._alarm: Cancellable | None = None

    async def __aenter__(self) -> None:
        self._interrupt.enter()
        self._alarm = self._clock.call_later(self._seconds, self._interrupt.fire)

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        if self._interrupt.caused(exc_type):
            raise TimeoutError(f"not done within {self._seconds:g} s") from exc


class _Pause:
    def __init__(self, timer: ActiveTimer) -> None:
        self._timer = timer

    def __enter__(self) -> None:
        self._timer.stop_charging()

    def __exit__(self, *_: object) -> None:
        self._timer.resume_charging()


class ActiveTimer:
    """The clock of one attempt (``gateway.base.ActiveClock``): what it has used, and what is left.

    Active time is charged inside ``limit`` scopes and outside ``pause`` only. ``total_s`` bounds the
    sum over the scopes that count toward it; ``wall_s`` runs from the timer's making. No scope polls:
    each sleeps for what is left, looks again when it wakes, and sleeps on if pauses or refunds have moved
    its end.
    """

    def __init__(self, clock: Clock, *, total_s: float, wall_s: float) -> None:
        self._clock = clock
        self.total_s = total_s
        self.wall_s = wall_s
        self._born = clock.monotonic()
        self._charged = 0.0
        self._refunds: list[tuple[float, float]] = []
        self._mark = 0.0
        self._scopes: list[Limit] = []
        self._pauses = 0
        self._charging = 0

    @property
    def active_s(self) -> float:
        """Charged so far, over all scopes, and not taken back."""
        return self._ever_charged() - sum(end - start for start, end in self._refunds)

    @property
    def wall_left_s(self) -> float:
        return self.wall_s - (self._clock.monotonic() - self._born)

    @property
    def paused(self) -> bool:
        return self._pauses > 0

    @property
    def _running(self) -> bool:
        return self._pauses == 0 and self._charging > 0

    def pause(self) -> AbstractContextManager[None]:
        """Time inside is not charged. Pauses may nest and overlap."""
        return _Pause(self)

    def refundable(self) -> Callable[[], None]:
        """Call what is returned to take back what was charged since; where refunds overlap, once."""
        since = self._ever_charged()
        return lambda: self._refund(since)

    def _refund(self, since: float) -> None:
        """Refunds are kept as stretches of charged time, apart and in order; none ends after now."""
        until = self._ever_charged()
        while self._refunds and self._refunds[-1][1] >= since:
            since = min(since, self._refunds.pop()[0])
        self._refunds.append((since, until))

    def _ever_charged(self) -> float:
        running = self._clock.monotonic() - self._mark if self._running else 0.0
        return self._charged + running

    def limit(
        self, name: str, seconds: float, *, within_total: bool = True, judge: Judge | None = None
    ) -> Limit:
        """``async with``: charge active time, and raise ``LimitReached(name)`` when ``seconds`` of it
        are used up, ``LimitReached("total_s")`` when the attempt's are (unless not ``within_total``),
        ``LimitReached("wall_s")`` at the ceiling. Before one of the first two, ``judge`` is asked; the
        body goes on meanwhile, charged to nothing."""
        return Limit(self, self._clock, name, seconds, within_total=within_total, judge=judge)

    def ceiling(self) -> Limit:
        """``async with``: a wait that is charged to nothing; only ``wall_s`` holds."""
        return Limit(self, self._clock, "wall_s", None, within_total=False)

    def stop_charging(self) -> None:
        self._settle()
        self._pauses += 1

    def resume_charging(self) -> None:
        self._settle()
        self._pauses -= 1
        if self._pauses == 0:
            for scope in self._scopes:
                scope.resumed()

    def enter(self, scope: Limit) -> None:
        self._settle()
        self._scopes.append(scope)
        self._charging += scope.charges

    def leave(self, scope: Limit) -> None:
        self._settle()
        self._scopes.remove(scope)
        self._charging -= scope.charges

    def _settle(self) -> None:
        """Book what ran since the last mark, before what decides on running changes."""
        now = self._clock.monotonic()
        if self._running:
            self._charged += now - self._mark
        self._mark = now


class Limit:
    """One scope of an ``ActiveTimer``; see ``ActiveTimer.limit``. ``used_s`` is what it charged."""

    def __init__(
        self,
        timer: ActiveTimer,
        clock: Clock,
        name: str,
        seconds: float | None,
        *,
        within_total: bool,
        judge: Judge | None = None,
    ) -> None:
        self._timer = timer
        self._clock = clock
        self._name = name
        self._seconds = seconds
        self._within_total = within_total
        self._judge = judge
        self._judging: asyncio.Task[None] | None = None
        self._verdict: EpisodeFailure | None = None
        self._interrupt = _Interrupt()
        self._alarm: Cancellable | None = None
        self._asleep_for_pause = False
        self._started = 0.0
        self._reached = ""
        self.used_s = 0.0

    @property
    def charges(self) -> bool:
        return self._seconds is not None

    async def __aenter__(self) -> Limit:
        self._started = self._timer.active_s
        name, left = self._nearest()
        if left <= 0:
            raise self._error(name)
        self._interrupt.enter()
        self._timer.enter(self)
        self._arm(left)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._timer.leave(self)
        self.used_s = max(0.0, self._timer.active_s - self._started)
        ours = self._interrupt.caused(exc_type)
        if self._judging is not None:
            self._judging.cancel()
            await asyncio.wait({self._judging})
        if ours:
            raise (self._verdict or self._error(self._reached)) from exc

    def resumed(self) -> None:
        """Charging goes on: wake for the budget again, if a pause had put that off."""
        if self._asleep_for_pause and not self._interrupt.fired:
            if self._alarm is not None:
                self._alarm.cancel()
            self._arm(self._nearest()[1])

    def _nearest(self) -> tuple[str, float]:
        """The limit that runs out first, were charging to go on from now, and what is left of it."""
        wall = ("wall_s", self._timer.wall_left_s)
        if self._seconds is None or self._timer.paused:
            return wall
        return min(wall, self._budget(self._seconds), key=lambda pair: pair[1])

    def _budget(self, seconds: float) -> tuple[str, float]:
        """The nearest of those that count active time."""
        active = self._timer.active_s
        nearest = (self._name, seconds - (active - self._started))
        if self._within_total:
            nearest = min(nearest, ("total_s", self._timer.total_s - active), key=lambda pair: pair[1])
        return nearest

    def _arm(self, delay_s: float) -> None:
        self._asleep_for_pause = self._timer.paused
        self._alarm = self._clock.call_later(max(0.0, delay_s), self._wake)

    def _wake(self) -> None:
        name, left = self._nearest()
        if left > _ROUNDING_S:
            self._arm(left)
        elif name == "wall_s" or self._judge is None or self._seconds is None:
            self._reach(name)
        else:
            self._judging = asyncio.get_running_loop().create_task(self._ask(self._judge, self._seconds))

    async def _ask(self, judge: Judge, seconds: float) -> None:
        """Meanwhile the ceiling alone holds. Refunds may have moved the end when the verdict comes."""
        with self._timer.pause():
            self._arm(self._timer.wall_left_s)
            verdict = await judge()
            name, left = self._budget(seconds)
            if self._interrupt.fired or (verdict is None and left > _ROUNDING_S):
                return
            self._verdict = verdict
            self._reach(name)

    def _reach(self, name: str) -> None:
        self._reached = name
        self._interrupt.fire()

    def _error(self, name: str) -> LimitReached:
        allowed = {"wall_s": self._timer.wall_s, "total_s": self._timer.total_s}.get(name, self._seconds)
        return LimitReached(name, f"{name}={allowed or 0:g} is used up")
