"""The line alone: who is offered a place before whom, and who is held up by nobody."""

from __future__ import annotations

import math

from rollserve.backend.line import SENIOR_S, Choice, Line, Standing
from rollserve.backend.member import Member
from rollserve.backend.tries import Tries
from rollserve.testing.scripted import ScriptedBackend, ScriptedEngine

from .pool_bench import record


def member(name: str, limit: int = 1) -> Member:
    return Member(record(name), ScriptedBackend(ScriptedEngine(), model="scripted"), 0.0, limit)


class Hall:
    """A line before backends; who has a home goes nowhere else until ``patient_until``, but as the last one
    where its home has more than it ``bears``."""

    def __init__(self, *members: Member, patient_until: float = math.inf, bears: float = math.inf) -> None:
        self.line = Line()
        self.bears = bears
        self.members = members
        self.patient_until = patient_until
        self.stands: dict[str, Standing] = {}

    def join(
        self, name: str, home: Member | None = None, *, since: float | None = None, now: float = 0.0
    ) -> None:
        self.stands[name] = self.line.join(Tries(name, deadline=1e9), home, since, now)

    def let_in(self, now: float = 0.0) -> tuple[dict[str, str], float]:
        """Who was called where, and when to look again."""

        def choose(attempt: Tries, last: bool) -> Choice:
            free = [each for each in self.members if each.room > 0]
            home = self.stands[attempt.session_id].home
            if home is None or now >= self.patient_until:
                return Choice(free[0] if free else None)
            if last and home.load > self.bears:
                return Choice(free[0])
            return Choice(home) if home in free else Choice(None, self.patient_until)

        again_at = self.line.let_in(choose, lambda: any(each.room > 0 for each in self.members))
        called = {name: each.called.result() for name, each in self.stands.items() if each.called.done()}
        return {name: each.id for name, each in called.items() if each is not None}, again_at


async def test_a_place_is_promised_once_and_to_the_first() -> None:
    a = member("a")
    hall = Hall(a)
    for name in ("one", "two"):
        hall.join(name)
    assert hall.let_in() == ({"one": "a"}, math.inf)
    assert hall.let_in() == ({"one": "a"}, math.inf)
    assert a.room == 0
    hall.line.leave(hall.stands["one"])
    assert a.room == 1
    assert hall.let_in()[0] == {"one": "a", "two": "a"}


async def test_who_waits_for_home_holds_up_nobody_and_keeps_its_turn() -> None:
    a, b = member("a", 0), member("b", 1)
    hall = Hall(a, b, patient_until=5.0)
    hall.join("home", a)
    hall.join("stranger")
    hall.join("late")
    assert hall.let_in() == ({"stranger": "b"}, math.inf), "nothing is free that it could go to later"
    hall.line.leave(hall.stands["stranger"])
    assert hall.let_in(now=5.0)[0] == {"stranger": "b", "home": "b"}, "before the late one"


async def test_a_long_line_for_one_home_spreads_where_nobody_else_takes_the_place() -> None:
    a, b = member("a", 0), member("b", 1)
    hall = Hall(a, b, patient_until=5.0, bears=1)
    hall.join("home", a)
    hall.join("neighbour", a)
    hall.join("stranger")
    assert hall.let_in()[0] == {"stranger": "b"}, "who loses nothing by it"
    hall.line.leave(hall.stands["stranger"])
    assert hall.let_in()[0] == {"stranger": "b", "home": "b"}
    hall.line.leave(hall.stands["home"])
    assert hall.let_in() == ({"stranger": "b", "home": "b"}, 5.0), "one is no line"


async def test_a_full_house_asks_nobody() -> None:
    a = member("a", 0)
    hall = Hall(a, patient_until=5.0)
    hall.join("home", a)
    assert hall.let_in() == ({}, math.inf), "no place went by: its patience is not asked for"


async def test_sessions_that_came_first_go_first_but_pass_nobody_for_long() -> None:
    a = member("a", 0)
    hall = Hall(a)
    hall.join("new", now=100.0)
    hall.join("old", since=50.0, now=110.0)
    hall.join("newer", now=120.0)
    hall.join("oldest", since=0.0, now=100.0 + SENIOR_S + 1)
    order: list[str] = []
    a.bound = 1
    for _ in range(4):
        called, _ = hall.let_in()
        (name,) = called.keys() - order
        order.append(name)
        hall.line.leave(hall.stands[name])
    assert order == ["old", "new", "oldest", "newer"]


async def test_who_stands_again_is_where_it_was() -> None:
    a = member("a", 0)
    hall = Hall(a)
    for name in ("one", "two"):
        hall.join(name)
    hall.line.dismiss()
    assert not hall.line.waits
    assert [each.called.result() for each in hall.stands.values()] == [None, None]
    for name in ("two", "one"):
        attempt = hall.stands[name].attempt
        hall.line.leave(hall.stands[name])
        hall.stands[name] = hall.line.join(attempt, None, None, 50.0)
    hall.join("three")
    a.bound = 1
    assert hall.let_in()[0] == {"one": "a"}


async def test_nothing_is_left_of_who_has_left() -> None:
    a = member("a", 1)
    hall = Hall(a)
    for name in ("called", "dismissed", "stands"):
        hall.join(name, a)
    assert (len(a.awaited), a.load) == (3, 3)
    hall.let_in()
    assert (len(a.awaited), len(a.promised), a.load) == (2, 1, 3)
    for standing in hall.stands.values():
        hall.line.leave(standing)
        hall.line.leave(standing)
    assert (len(a.awaited), len(a.promised), a.load) == (0, 0, 0)
    assert not hall.line.waits
