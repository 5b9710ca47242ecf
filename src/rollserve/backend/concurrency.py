"""How many calls may run on a backend at once, from what its engine says of itself. Pure.

    grow  ──rate no longer follows──▶  hold  ──now and then──▶  a step up, or down  ──▶  hold
      ▲                                 │ the rate is another one now: it is another backend
      └─────────────────────────────────┘
    any   ──cache nearly full, or a preemption──▶  a step down at once, then hold

An engine that runs more requests samples more tokens, up to where its arithmetic is used up; then more
requests only wait for each other. Where its key-value cache runs out earlier, it preempts: it throws away
what it had computed. So the bound grows while throughput grows, and backs off before the cache is full.

Rates are means over a span (``SPAN`` looks) at one bound, after a look in which what changed takes hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

START = 64
LEAST = 1
MOST = 16_384

GROW = 1.5
STEP = 1.2

WORTH = 0.06
"""Of what was added, so much must come back as throughput for it to be worth growing on."""

LOSS = 0.03
"""Throughput that a step may cost and not be taken back: less is noise."""

OTHER = 0.25
"""So much more or less than what was known at this bound is another backend, or another load."""

KV_HIGH = 0.92
KV_ROOM = 0.85
"""Above ``KV_HIGH`` the bound backs off, above ``KV_ROOM`` it does not grow."""

BACK_OFF = 0.9
PREEMPTED = 0.75
SPAN = 3
HOLD = 10
"""Looks until it is tried again whether another bound is better."""

OVER = 1.05
FULL = 0.9
"""A bound of which less is used limits nothing, and teaches nothing."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What an engine says at one time. ``tokens_per_s`` is what it samples, over all who use it; ``kv_use``
    from 0 to 1 and ``preemptions`` (since its start) are None where it does not tell."""

    tokens_per_s: float
    kv_use: float | None = None
    preemptions: int | None = None


class Phase(StrEnum):
    GROW = "grow"
    HOLD = "hold"
    UP = "up"
    DOWN = "down"


class Concurrency:
    """``limit`` is the bound. ``observe`` at even intervals (a few seconds)."""

    def __init__(self, start: int = START, least: int = LEAST, most: int = MOST) -> None:
        self._least, self._most = least, most
        self._bound = float(min(most, max(least, start)))
        self._before = self._bound
        self._known: float | None = None
        self._rates: list[float] = []
        self._settling = True
        self._held = 0
        self._turn = 0
        self._preemptions: int | None = None
        self.phase = Phase.GROW

    @property
    def limit(self) -> int:
        return round(self._bound)

    def observe(self, reading: Reading, in_flight: int) -> int:
        """The bound from now on. ``in_flight`` is what was there at most since the last look."""
        if self._pressed(reading, in_flight):
            return self.limit
        if in_flight < FULL * self.limit:
            self._rates.clear()
            return self.limit
        if self._settling:
            self._settling = False
            return self.limit
        self._rates.append(reading.tokens_per_s)
        if len(self._rates) >= SPAN:
            rate = sum(self._rates) / len(self._rates)
            self._rates.clear()
            self._learn(rate, room=reading.kv_use is None or reading.kv_use < KV_ROOM)
        return self.limit

    # ── the cache

    def _pressed(self, reading: Reading, in_flight: int) -> bool:
        """Back off before, or at the latest when, the engine preempts; not again while what is over the
        bound is still ending."""
        count, before = reading.preemptions, self._preemptions
        self._preemptions = count
        preempted = count is not None and before is not None and count > before
        full = reading.kv_use is not None and reading.kv_use > KV_HIGH
        if not (preempted or full):
            return False
        if in_flight > self.limit * OVER:
            self._settling = True
            self._rates.clear()
            return True
        self._hold(self._bound * (PREEMPTED if preempted else BACK_OFF), None)
        return True

    # ── the rate

    def _learn(self, rate: float, *, room: bool) -> None:
        if rate <= 0:
            self._step(Phase.DOWN, 1 / STEP, rate)
            return
        match self.phase:
            case Phase.GROW:
                self._grown(rate, room=room)
            case Phase.HOLD:
                self._holding(rate, room=room)
            case Phase.UP:
                better = self._known is None or rate > self._known * (1 + WORTH * (STEP - 1))
                self._hold(*((self._bound, rate) if better else (self._before, self._known)))
                if better and room:
                    self._step(Phase.UP, STEP, rate)
            case Phase.DOWN:
                better = self._known is None or rate > self._known * (1 + LOSS)
                self._hold(*((self._bound, rate) if better else (self._before, self._known)))
                if better:
                    self._step(Phase.DOWN, 1 / STEP, rate)

    def _grown(self, rate: float, *, room: bool) -> None:
        known = self._known
        if known is not None and rate < known * (1 - LOSS):
            self._bound = self._before
            self._step(Phase.DOWN, 1 / GROW, known)
        elif not room or (known is not None and rate < known * (1 + WORTH * (GROW - 1))):
            self._hold(self._bound, rate)
        else:
            self._step(Phase.GROW, GROW, rate)

    def _holding(self, rate: float, *, room: bool) -> None:
        known = self._known
        if known is not None and abs(rate - known) > OTHER * known:
            up = rate > known and room
            self._step(Phase.GROW if up else Phase.DOWN, GROW if up else 1 / STEP, rate)
            return
        self._known = rate if known is None else 0.7 * known + 0.3 * rate
        self._held += SPAN
        if self._held >= HOLD:
            self._turn += 1
            up = bool(self._turn % 2) and room
            self._step(Phase.UP if up else Phase.DOWN, STEP if up else 1 / STEP, self._known)

    def _step(self, phase: Phase, factor: float, known: float) -> None:
        self._before, self._known, self.phase = self._bound, known, phase
        moved = self._bound * factor
        if factor > 1:
            moved = max(moved, self._bound + 1)
        self._set(moved)

    def _hold(self, bound: float, known: float | None) -> None:
        self._known, self._held, self.phase = known, 0, Phase.HOLD
        self._set(bound)

    def _set(self, bound: float) -> None:
        self._bound = min(float(self._most), max(float(self._least), bound))
        self._settling = True
        self._rates.clear()
