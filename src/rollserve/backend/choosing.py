"""Which backend a call goes to: the least busy by weight, unless its session has one that will do. Where
that is not wanted (``routing``): each call to the least busy, or sessions to backends in turn, however busy.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from rollserve.backend.member import Member
from rollserve.backend.roster import Roster


def _busy(member: Member, share: float) -> tuple[float, float]:
    return member.in_flight / share, (len(member.sessions) + 1) / share


class Choosing:
    """``place`` remembers where a session is, until it is released."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._places: dict[str, Member] = {}
        self._turns: dict[str, float] = {}
        """By backend: the sessions it was given, divided by its share (stride scheduling)."""

    def able(self, failed: Container[str], now: float) -> list[Member]:
        """Those that take calls, were they to have room; untried ones if there are any. Where only slow ones
        are left, they have to do."""
        members = self._roster.members.values()
        able = [member for member in members if member.takes(now)]
        able = able or [member for member in members if member.takes(now, slow=True)]
        return [member for member in able if member.id not in failed] or able

    def choose(self, session_id: str, able: list[Member], now: float) -> Member | None:
        """None when all are full."""
        settings = self._roster.settings
        shares = {each: each.share(now, settings.slow_start_s) for each in able if each.room > 0}
        if not shares:
            return None
        if probed := [each for each in shares if each.half_open]:
            return probed[0]
        home = self._places.get(session_id)
        if settings.routing == "in_turn":
            return home if home is not None and home in shares else self._next(shares)
        least = min(shares, key=lambda each: _busy(each, shares[each]))
        if home is None or home not in shares or settings.routing == "least_busy":
            return least
        fair = least.in_flight * shares[home] / shares[least]
        return home if home.in_flight - fair <= max(settings.imbalance, fair) else least

    def _next(self, shares: Mapping[Member, float]) -> Member:
        """In turn, by share. One that was not there before is as far as the one furthest behind."""
        start = min((self._turns[each.id] for each in shares if each.id in self._turns), default=0.0)
        members = self._roster.members.values()
        self._turns = {each.id: self._turns.get(each.id, start) for each in members}
        chosen = min(shares, key=lambda each: self._turns[each.id] + 1 / shares[each])
        self._turns[chosen.id] += 1 / shares[chosen]
        return chosen

    def place(self, session_id: str, member: Member) -> None:
        home = self._places.get(session_id)
        if home is member:
            return
        if home is not None:
            home.sessions.discard(session_id)
        self._places[session_id] = member
        member.sessions.add(session_id)

    def release(self, session_id: str) -> None:
        member = self._places.pop(session_id, None)
        if member is not None:
            member.sessions.discard(session_id)
