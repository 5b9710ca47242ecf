"""A call whose session's backend is full: how long it waits for it, and whom that holds up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from msgspec import structs

from rollserve.backend.base import Routed
from rollserve.records.policy import BackendState
from rollserve.records.update import UpdateMode, WeightUpdate

from .pool_bench import Ask, Bench, closing, record

PROMPT = [*range(3, 84)]

WORTH_S = 1.9
"""Of the 3 tokens and the 16 that the first call of a session leaves in its backend's cache, where a token
takes 1 s."""

UPDATE = WeightUpdate(
    id="u",
    policy="p",
    mode=UpdateMode.DRAIN,
    lease_s=100.0,
    begun_at=0.0,
    expires_at=1e9,
    from_version=0,
    weights=0,
    backends=["a", "b"],
)


class Town:
    """Backends for one call at a time (``limit``), where calls take as long as a test says."""

    def __init__(self, bench: Bench, ask: Ask) -> None:
        self.bench = bench
        self._ask = ask
        self.calls: list[asyncio.Task[Routed]] = []

    def first(self, session: str, request_id: str) -> asyncio.Task[Routed]:
        return self._begin(session, request_id, [5, 6, 7], "")

    def call(self, session: str, request_id: str, salt: str = "") -> asyncio.Task[Routed]:
        return self._begin(session, request_id, PROMPT, salt)

    def _begin(self, session: str, request_id: str, ids: list[int], salt: str) -> asyncio.Task[Routed]:
        request = structs.replace(self._ask(request_id, ids), cache_salt=salt)
        self.calls.append(asyncio.create_task(self.bench.pool.generate(session, request)))
        return self.calls[-1]

    async def settle_in(self, *sessions: str) -> None:
        """The first call of each, of 16 s for 16 tokens, on the only backend that is there."""
        (name,) = self.bench.engines
        for session in sessions:
            self.bench.hold(name)
            first = self.first(session, f"{session}-first")
            await self.bench.clock.advance(16.0)
            self.bench.engines[name].gate.set()
            assert (await first).backend_id == name
        self.bench.hold(name)

    async def fill(self, session: str = "t") -> None:
        """A call on the only backend that stays there."""
        self.call(session, "fills")
        await self.bench.clock.settle()

    async def end(self, name: str, request_id: str) -> None:
        self.bench.engines[name].abort([request_id])
        await self.bench.clock.settle()

    async def promise(self, name: str, request_id: str) -> None:
        """End a call, up to where its place is another's who does not know yet."""
        self.bench.engines[name].abort([request_id])
        for _ in range(100):
            await asyncio.sleep(0)
            if self.bench.pool._roster.members[name].promised:
                return
        raise AssertionError("nobody was called")

    def running(self) -> dict[str, list[str]]:
        return {name: sorted(engine.running) for name, engine in self.bench.engines.items()}

    async def close(self) -> None:
        for call in self.calls:
            call.cancel()
        await asyncio.gather(*self.calls, return_exceptions=True)


@pytest.fixture
async def town(ask: Ask) -> AsyncIterator[Town]:
    """On ``a`` sessions ``s`` and ``t`` are at home; it is full, and ``b`` has just come."""
    async with closing(Bench(concurrency=1)) as bench:
        made = Town(bench, ask)
        bench.serve("a")
        await made.settle_in("s", "t")
        await made.fill("t")
        bench.serve("a", "b")
        bench.hold("b")
        yield made
        await made.close()


async def test_a_call_waits_for_its_home_and_goes_there(town: Town) -> None:
    call = town.call("s", "waits")
    await town.bench.clock.advance(WORTH_S - 0.1)
    assert town.running() == {"a": ["fills"], "b": []}
    await town.end("a", "fills")
    assert town.running() == {"a": ["waits"], "b": []}
    await town.end("a", "waits")
    assert (await call).backend_id == "a"


async def test_and_elsewhere_when_it_has_waited_for_what_its_prefix_is_worth(town: Town) -> None:
    call = town.call("s", "waits")
    await town.bench.clock.advance(WORTH_S - 0.1)
    assert town.running() == {"a": ["fills"], "b": []}
    await town.bench.clock.advance(0.2)
    assert town.running() == {"a": ["fills"], "b": ["waits"]}
    await town.end("b", "waits")
    assert (await call).backend_id == "b"
    again = town.call("s", "again")
    await town.bench.clock.settle()
    assert town.running() == {"a": ["fills"], "b": ["again"]}, "it is at home there now"
    await town.end("b", "again")
    await again


async def test_the_wait_is_uncharged(town: Town) -> None:
    paused = 0.0

    class Pause:
        def __enter__(self) -> None:
            self.at = town.bench.clock.monotonic()

        def __exit__(self, *_: object) -> None:
            nonlocal paused
            paused += town.bench.clock.monotonic() - self.at

    request = town._ask("waits", PROMPT)
    call = asyncio.create_task(town.bench.pool.generate("s", request, pause=Pause))
    town.calls.append(call)
    await town.bench.clock.advance(5.0)
    assert paused == pytest.approx(WORTH_S)


async def test_who_waits_for_home_holds_up_nobody(town: Town) -> None:
    town.call("s", "waits")
    await town.bench.clock.settle()
    new = town.call("new", "new")
    await town.bench.clock.settle()
    assert town.running() == {"a": ["fills"], "b": ["new"]}
    await town.end("b", "new")
    assert (await new).backend_id == "b"
    assert town.running() == {"a": ["fills"], "b": []}


async def test_a_new_call_does_not_take_the_place_that_was_waited_for(town: Town) -> None:
    town.call("s", "waits")
    await town.bench.clock.settle()
    town.bench.engines["a"].abort(["fills"])
    town.call("new", "new")
    town.call("t", "t-next")
    await town.bench.clock.settle()
    assert town.running() == {"a": ["waits"], "b": ["new"]}


async def test_places_go_to_whose_home_it_is_while_all_is_full(town: Town) -> None:
    """Who is first in line lets a place elsewhere go by, and has the next one at home."""
    homes = [town.first("u", "u-first"), town.first("v", "v-first")]
    await town.bench.clock.advance(16.0)
    await town.end("b", "u-first")
    await town.bench.clock.advance(16.0)
    await town.end("b", "v-first")
    assert {(await home).backend_id for home in homes} == {"b"}
    town.call("v", "fills-b")
    for session in ("u", "s"):
        town.call(session, f"{session}-next")
        await town.bench.clock.settle()
    assert town.running() == {"a": ["fills"], "b": ["fills-b"]}
    await town.end("a", "fills")
    assert town.running() == {"a": ["s-next"], "b": ["fills-b"]}
    await town.end("b", "fills-b")
    assert town.running() == {"a": ["s-next"], "b": ["u-next"]}


async def test_an_update_of_the_weights_is_no_wait_for_home(town: Town) -> None:
    town.call("s", "waits")
    await town.bench.clock.advance(WORTH_S - 0.1)
    town.bench.pool.hold(UPDATE)
    await town.bench.clock.advance(30.0)
    assert town.running() == {"a": ["fills"], "b": []}
    town.bench.pool.hold(None)
    await town.bench.clock.advance(WORTH_S - 0.1)
    assert town.running() == {"a": ["fills"], "b": []}
    await town.bench.clock.advance(0.2)
    assert town.running() == {"a": ["fills"], "b": ["waits"]}


async def test_a_long_line_for_one_home_spreads_at_once(ask: Ask) -> None:
    """The rule for imbalance counts who waits: no backend stands idle for the love of a prefix."""
    async with closing(Bench(concurrency=4, imbalance=4)) as bench:
        town = Town(bench, ask)
        bench.serve("a")
        await town.settle_in(*(f"s{n}" for n in range(9)))
        bench.serve("a", "b")
        bench.hold("b")
        for n in range(9):
            town.call(f"s{n}", f"r{n}")
        await bench.clock.settle()
        assert bench.in_flight() == {"a": 4, "b": 3}
        await bench.clock.advance(WORTH_S + 0.1)
        assert bench.in_flight() == {"a": 4, "b": 4}
        await town.close()


async def test_a_place_goes_to_a_new_session_before_it_spreads_a_long_line(ask: Ask) -> None:
    async with closing(Bench(concurrency=1, imbalance=1)) as bench:
        town = Town(bench, ask)
        bench.serve("a")
        sessions = [f"s{n}" for n in range(5)]
        await town.settle_in(*sessions)
        await town.fill("s0")
        bench.serve("a", "b")
        bench.hold("b")
        town.call("fills-b", "fills-b")
        await bench.clock.settle()
        for session in sessions[1:]:
            town.call(session, session)
        town.call("new", "new")
        await bench.clock.settle()
        await town.end("b", "fills-b")
        assert town.running() == {"a": ["fills"], "b": ["new"]}
        await town.end("b", "new")
        assert town.running() == {"a": ["fills"], "b": ["s1"]}, "nobody else would take it"
        await town.close()


async def test_nothing_is_waited_for_under_other_weights(town: Town) -> None:
    town.call("s", "waits", salt="new weights")
    await town.bench.clock.settle()
    assert town.running() == {"a": ["fills"], "b": ["waits"]}


async def test_a_home_that_takes_no_calls_is_not_waited_for(town: Town) -> None:
    town.call("s", "waits")
    await town.bench.clock.settle()
    town.bench.pool.update([record("a", BackendState.DRAINING), record("b")])
    await town.bench.clock.settle()
    assert town.running() == {"a": ["fills"], "b": ["waits"]}


async def test_nor_is_one_that_fails_meanwhile(town: Town) -> None:
    town.call("s", "waits")
    await town.bench.clock.settle()
    town.bench.pool.update([record("a", BackendState.FENCED), record("b")])
    await town.bench.clock.settle()
    assert town.running()["a"] == []
    assert len(town.running()["b"]) == 1, "of the two, since it takes one"


async def test_a_cancel_while_it_waits_leaves_nothing(town: Town) -> None:
    call = town.call("s", "waits")
    await town.bench.clock.settle()
    call.cancel()
    await town.bench.clock.advance(10.0)
    assert town.running() == {"a": ["fills"], "b": []}
    member = town.bench.pool._roster.members["a"]
    assert (len(member.awaited), len(member.promised)) == (0, 0)


async def test_a_place_that_was_promised_on_a_backend_that_goes_is_no_place(town: Town) -> None:
    town.call("s", "waits")
    await town.bench.clock.settle()
    await town.promise("a", "fills")
    town.bench.pool.update([record("a", BackendState.FENCED), record("b")])
    await town.bench.clock.settle()
    assert town.running() == {"a": [], "b": ["waits"]}


async def test_a_place_that_was_promised_to_who_does_not_come_is_the_next_ones(town: Town) -> None:
    gone = town.call("s", "gone")
    town.call("t", "next")
    await town.bench.clock.settle()
    await town.promise("a", "fills")
    gone.cancel()
    await town.bench.clock.settle()
    assert town.running() == {"a": ["next"], "b": []}


async def test_patience_0_is_none(ask: Ask) -> None:
    async with closing(Bench(concurrency=1, read_cost=0.0)) as bench:
        town = Town(bench, ask)
        bench.serve("a")
        await town.settle_in("s", "t")
        await town.fill("t")
        bench.serve("a", "b")
        bench.hold("b")
        town.call("s", "waits")
        await bench.clock.settle()
        assert town.running() == {"a": ["fills"], "b": ["waits"]}
        await town.close()
