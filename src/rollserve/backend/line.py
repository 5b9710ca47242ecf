"""Those who wait for a place on a backend. Pure but for the futures of those who stand.

Each place is offered to one after the other, and goes to the first who takes it: who waits for another one
lets it go by, and holds up nobody. They stand by when their sessions came: sessions that take turns push each
other's prefixes out of a cache without room for all (sessions first come, first served: H. Li et al.,
"Continuum: Efficient and Robust Multi-Turn LLM Agent Scheduling with KV Cache Time-to-Live", 2025). But
nobody is passed by a call that comes more than ``SENIOR_S`` later. A ticket is for the whole call: who stands
again is where it was.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from typing import NamedTuple

from rollserve.backend.member import Member
from rollserve.backend.tries import Tries

SENIOR_S = 30.0

Ticket = tuple[float, int]


class Choice(NamedTuple):
    """Where a call goes now; None when it waits. Then it chooses otherwise at ``again_at``, if nothing
    changes before."""

    member: Member | None
    again_at: float = math.inf


@dataclass(slots=True, eq=False)
class Standing:
    """``called`` is the backend that it may go to, or None when it has to look for itself again."""

    attempt: Tries
    ticket: Ticket
    home: Member | None
    called: asyncio.Future[Member | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def stop_waiting(self) -> None:
        if self.home is not None:
            self.home.awaited.discard(self.attempt)


_ticket = attrgetter("ticket")


class Line:
    """A place that was promised is its backend's ``promised`` until who was called has left; who stands for
    its home is among that one's ``awaited``."""

    def __init__(self) -> None:
        self._standing: list[Standing] = []
        self._tickets = count()

    @property
    def waits(self) -> bool:
        return bool(self._standing)

    def join(self, attempt: Tries, home: Member | None, since: float | None, now: float) -> Standing:
        """``since`` its session has been here (None: it is new)."""
        if attempt.ticket is None:
            attempt.ticket = (max(now if since is None else since, now - SENIOR_S), next(self._tickets))
        standing = Standing(attempt, attempt.ticket, home)
        insort(self._standing, standing, key=_ticket)
        if home is not None:
            home.awaited.add(attempt)
        return standing

    def leave(self, standing: Standing) -> None:
        """Whatever became of it. Idempotent."""
        at = bisect_left(self._standing, standing.ticket, key=_ticket)
        if at < len(self._standing) and self._standing[at] is standing:
            del self._standing[at]
        standing.stop_waiting()
        called = standing.called
        if called.done() and not called.cancelled() and (member := called.result()) is not None:
            member.promised.discard(standing.attempt)

    def let_in(self, choose: Callable[[Tries, bool], Choice], free: Callable[[], bool]) -> float:
        """Call who may go, while a place is ``free``; places that nobody takes are offered once more, as the
        last (True): they would stay free. When to do so again if nothing changes before."""
        self._offer(lambda attempt: choose(attempt, False), free)
        return self._offer(lambda attempt: choose(attempt, True), free)

    def _offer(self, choose: Callable[[Tries], Choice], free: Callable[[], bool]) -> float:
        at, again_at = 0, math.inf
        while at < len(self._standing) and free():
            standing = self._standing[at]
            choice = choose(standing.attempt)
            again_at = min(again_at, choice.again_at)
            if choice.member is None:
                at += 1
                continue
            del self._standing[at]
            standing.stop_waiting()
            if not standing.called.done():
                choice.member.promised.add(standing.attempt)
                standing.called.set_result(choice.member)
        return again_at

    def dismiss(self) -> None:
        """Let all look for themselves again."""
        dismissed, self._standing = self._standing, []
        for standing in dismissed:
            standing.stop_waiting()
            if not standing.called.done():
                standing.called.set_result(None)
