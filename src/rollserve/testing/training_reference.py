"""What an engine and a trainer could reach together at best, by discrete-event simulation.

Independent of the service, and idealised: nothing takes time but a rollout on the engine, whose slots run
one each, and a step of the trainer. ``bench/idle_time.py`` puts the service beside it, with the same slots,
times and bounds.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Draw = Callable[[], float]
"""Seconds of one rollout."""

Use = Literal["synchronous", "one-step-off", "asynchronous"]


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Batches of ``groups`` of ``rollouts``, a step of ``update_s`` seconds for each, an engine that runs
    ``slots`` rollouts at once.

    *synchronous*: a batch is asked for when the step before it is over. *one-step-off*: when the step
    before it begins. *asynchronous*: groups are started in order, up to ``window`` batches ahead, and taken
    as they finish; one whose first rollout began more than ``staleness`` versions ago is thrown away, and
    another is started for it."""

    use: Use
    groups: int
    rollouts: int
    slots: int
    update_s: float
    staleness: int = 0
    window: int = 0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """``ends_s``: when each step was over; ``waits_s``: how long the trainer waited before each;
    ``thrown``: groups that were too old."""

    ends_s: tuple[float, ...]
    waits_s: tuple[float, ...]
    thrown: int

    def rate(self, skip: int) -> float:
        """Steps a second, without the first ``skip`` (at least 1)."""
        return (len(self.ends_s) - skip) / (self.ends_s[-1] - self.ends_s[skip - 1])

    def idle(self, skip: int) -> float:
        """The share of that time for which the trainer waited."""
        return sum(self.waits_s[skip:]) / (self.ends_s[-1] - self.ends_s[skip - 1])


@dataclass(slots=True)
class _Group:
    left: int
    begun: int = -1
    """The version at which its first rollout began."""


class _Simulation:
    def __init__(self, loop: Loop, draw: Draw) -> None:
        self._loop = loop
        self._draw = draw
        self._now = 0.0
        self._version = 0
        self._started = 0
        self._waiting_since: float | None = 0.0
        """None while the trainer is in a step."""
        self._queued: deque[_Group] = deque()
        """One entry a rollout that has no slot yet."""
        self._ready: list[_Group] = []
        self._ends: list[tuple[float, int, _Group | None]] = []
        """What ends next, the soonest first; None is the trainer's step."""
        self._count = 0
        self._running = 0
        self.thrown = 0
        self.ends_s: list[float] = []
        self.waits_s: list[float] = []

    def run(self, steps: int) -> Outcome:
        while len(self.ends_s) < steps:
            self._take()
            self._ask()
            self._begin()
            self._advance()
        return Outcome(
            ends_s=tuple(self.ends_s), waits_s=tuple(self.waits_s[: len(self.ends_s)]), thrown=self.thrown
        )

    def _take(self) -> None:
        if self._waiting_since is None:
            return
        if self._loop.use == "asynchronous":
            oldest = self._version - self._loop.staleness
            fresh = [group for group in self._ready if group.begun >= oldest]
            self.thrown += len(self._ready) - len(fresh)
            self._ready = fresh
        if len(self._ready) < self._loop.groups:
            return
        del self._ready[: self._loop.groups]
        self.waits_s.append(self._now - self._waiting_since)
        self._waiting_since = None
        self._ends_at(self._now + self._loop.update_s, None)

    def _ask(self) -> None:
        ahead = {
            "synchronous": 0,
            "one-step-off": 0 if self._waiting_since is not None else 1,
            "asynchronous": self._loop.window,
        }[self._loop.use]
        while self._started < (self._version + 1 + ahead) * self._loop.groups + self.thrown:
            self._started += 1
            group = _Group(self._loop.rollouts)
            self._queued.extend([group] * self._loop.rollouts)

    def _begin(self) -> None:
        while self._queued and self._running < self._loop.slots:
            group = self._queued.popleft()
            if group.begun < 0:
                group.begun = self._version
            self._running += 1
            self._ends_at(self._now + self._draw(), group)

    def _ends_at(self, at: float, group: _Group | None) -> None:
        self._count += 1
        heapq.heappush(self._ends, (at, self._count, group))

    def _advance(self) -> None:
        self._now, _, group = heapq.heappop(self._ends)
        if group is None:
            self._version += 1
            self.ends_s.append(self._now)
            self._waiting_since = self._now
            return
        self._running -= 1
        group.left -= 1
        if not group.left:
            self._ready.append(group)


def simulate(loop: Loop, draw: Draw, steps: int) -> Outcome:
    """``steps`` steps of the loop, from nothing in flight."""
    return _Simulation(loop, draw).run(steps)
