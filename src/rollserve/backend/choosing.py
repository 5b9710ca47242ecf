"""Which backend a call goes to: the least busy by weight, unless its session has one that will do. Where
that is not wanted (``routing``): each call to the least busy, or sessions to backends in turn, however busy.
A session that has a backend waits for it when that is full, as ``homing`` says.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from rollserve.backend.base import Generation
from rollserve.backend.homing import Prefix, read, sampled, worth_s
from rollserve.backend.line import Choice
from rollserve.backend.member import Member
from rollserve.backend.roster import Roster
from rollserve.backend.tries import Tries

Shares = Mapping[Member, float]


def _busy(member: Member, share: float) -> tuple[float, float]:
    return member.load / share, (len(member.sessions) + 1) / share


@dataclass(slots=True)
class _Home:
    member: Member
    since: float
    prefix: Prefix = field(default_factory=Prefix)


class Choosing:
    """``place`` remembers where a session is, and since when it has been anywhere, until it is released."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._homes: dict[str, _Home] = {}
        self._turns: dict[str, float] = {}
        """By backend: the sessions it was given, divided by its share (stride scheduling)."""

    def able(self, failed: Container[str], now: float) -> list[Member]:
        """Those that take calls, were they to have room; untried ones if there are any. Where only slow ones
        are left, they have to do."""
        members = self._roster.members.values()
        able = [member for member in members if member.takes(now)]
        able = able or [member for member in members if member.takes(now, slow=True)]
        return [member for member in able if member.id not in failed] or able

    def home(self, session_id: str) -> Member | None:
        """None also where sessions have none."""
        home = self._homes.get(session_id)
        return None if home is None or self._roster.settings.routing == "least_busy" else home.member

    def since(self, session_id: str) -> float | None:
        """When its first call went anywhere; None while it has not."""
        home = self._homes.get(session_id)
        return None if home is None else home.since

    def choose(self, attempt: Tries, now: float, *, last: bool) -> Choice:
        """Nobody where all are full, or where it waits for its home. A home that takes no calls (dead,
        ejected, draining, fenced, resting) is not waited for; nor one with far too much to do, where nobody
        else would take the place (``last``)."""
        able = self.able(attempt.failed, now)
        shares = {each: each.share(now, self._roster.settings.slow_start_s) for each in able if each.room > 0}
        if not shares:
            return Choice(None)
        if probed := [each for each in shares if each.half_open]:
            return Choice(probed[0])
        home = self._homes.get(attempt.session_id)
        if home is None or self.home(attempt.session_id) not in able:
            return Choice(self._other(shares))
        if (last or home.member in shares) and self._too_busy(home.member, shares, now):
            return Choice(self._least(shares))
        if home.member in shares:
            return Choice(home.member)
        ends_at = attempt.patience.ends_at(self._worth_s(home, attempt, shares), now)
        return Choice(None, ends_at) if ends_at > now else Choice(self._other(shares))

    def _worth_s(self, home: _Home, attempt: Tries, shares: Shares) -> float:
        """Read where the call would go; a backend that has answered nothing yet is taken to be like home."""
        token_s = self._least(shares).pace.token_s or home.member.pace.token_s
        tokens = home.prefix.of(attempt.prompt_tokens, attempt.salt)
        return worth_s(tokens, token_s, self._roster.settings.read_cost)

    def _least(self, shares: Shares) -> Member:
        return min(shares, key=lambda each: _busy(each, shares[each]))

    def _too_busy(self, home: Member, shares: Shares, now: float) -> bool:
        """Beyond its fair number: what the least busy has (calls, and who waits for it), by their shares."""
        settings = self._roster.settings
        if settings.routing == "in_turn":
            return False
        least = self._least(shares)
        fair = least.load * home.share(now, settings.slow_start_s) / shares[least]
        return home.load - fair > max(settings.imbalance, fair)

    def _other(self, shares: Shares) -> Member:
        return self._next(shares) if self._roster.settings.routing == "in_turn" else self._least(shares)

    def _next(self, shares: Shares) -> Member:
        """In turn, by share. One that was not there before is as far as the one furthest behind."""
        start = min((self._turns[each.id] for each in shares if each.id in self._turns), default=0.0)
        members = self._roster.members.values()
        self._turns = {each.id: self._turns.get(each.id, start) for each in members}
        chosen = min(shares, key=lambda each: self._turns[each.id] + 1 / shares[each])
        self._turns[chosen.id] += 1 / shares[chosen]
        return chosen

    def place(self, session_id: str, member: Member) -> None:
        home = self._homes.get(session_id)
        if home is not None and home.member is member:
            return
        if home is not None:
            home.member.sessions.discard(session_id)
        since = self._roster.clock.monotonic() if home is None else home.since
        self._homes[session_id] = _Home(member, since)
        member.sessions.add(session_id)

    def keep(self, attempt: Tries, member: Member, generation: Generation) -> None:
        """What the call has left in that backend's prefix cache, where its session is still there."""
        home = self._homes.get(attempt.session_id)
        if home is not None and home.member is member:
            prompt = attempt.prompt_tokens
            tokens = read(generation) if prompt is None else prompt
            home.prefix.add(tokens + sampled(generation), attempt.salt)

    def release(self, session_id: str) -> None:
        home = self._homes.pop(session_id, None)
        if home is not None:
            home.member.sessions.discard(session_id)
