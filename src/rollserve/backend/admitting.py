"""Who goes to a backend, and who stands in line for one. Calls are let in whenever something may have become
free, and when the first who waits for its home has waited enough."""

from __future__ import annotations

import asyncio
import math

from rollserve.backend.choosing import Choosing
from rollserve.backend.member import Member
from rollserve.backend.roster import Roster
from rollserve.backend.tries import Tries


class Admitting:
    def __init__(self, roster: Roster, choosing: Choosing) -> None:
        self._roster = roster
        self._choosing = choosing
        self._alarm: asyncio.Task[None] | None = None
        self._alarm_at = math.inf

    async def admit(self, attempt: Tries) -> Member | None:
        """None when it has to look again, at what has changed. A cancel gives its place to the next."""
        line, session, now = self._roster.line, attempt.session_id, self._roster.clock.monotonic()
        if not line.waits:
            choice = self._choosing.choose(attempt, now, last=True)
            if choice.member is not None:
                return choice.member
        standing = line.join(attempt, self._choosing.home(session), self._choosing.since(session), now)
        came = False
        try:
            self.let_in()
            if not standing.called.done():
                with attempt.pause():
                    await standing.called
            member, came = standing.called.result(), True
        finally:
            line.leave(standing)
            if not came:
                self.let_in()
        return member if member is not None and self._open(member) else None

    def _open(self, member: Member) -> bool:
        """What has happened since it was called may have closed it."""
        return self._roster.held is None and member.takes(self._roster.clock.monotonic(), slow=True)

    def let_in(self) -> None:
        """Those who stand in line, as far as there is room."""
        if not self._roster.line.waits or self._roster.held is not None:
            return
        now = self._roster.clock.monotonic()
        able = self._choosing.able((), now)
        self._ring_at(
            self._roster.line.let_in(
                lambda attempt, last: self._choosing.choose(attempt, now, last=last),
                lambda: any(member.room > 0 for member in able),
            )
        )

    def _ring_at(self, at: float) -> None:
        """At the latest: one that rings too early finds nothing to do, and is set anew."""
        if at >= self._alarm_at:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = at
        self._alarm = self._roster.own(self._ring())

    async def _ring(self) -> None:
        await self._roster.clock.sleep(self._alarm_at - self._roster.clock.monotonic())
        self._alarm, self._alarm_at = None, math.inf
        self.let_in()
