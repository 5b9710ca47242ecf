"""Backends that are far slower than their peers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Callable

import pytest

from rollserve.backend.base import Backend, GenerateRequest, Generation, TokenSink
from rollserve.backend.latency import ENOUGH, Latency, Sample, outliers, sample, slow
from rollserve.backend.member import PoolSettings
from rollserve.backend.pool import BackendPool
from rollserve.records import policy
from rollserve.records.policy import BackendInfo, BackendKind, BackendSpec
from rollserve.testing.clock import FakeClock
from rollserve.testing.scripted import ScriptedBackend, ScriptedEngine

Ask = Callable[..., GenerateRequest]


def seen(first_s: float | None, token_s: float | None, calls: int = ENOUGH) -> Latency:
    return Latency(calls=calls, first_s=first_s, token_s=token_s)


def test_times_of_a_call() -> None:
    assert sample(10.0, 11.0, 13.0, 5) == Sample(1.0, 0.5)
    assert sample(10.0, None, 13.0, 6) == Sample(None, 0.5)
    assert sample(10.0, 11.0, 11.0, 1) == Sample(1.0, None)
    assert sample(10.0, None, 11.0, 0) == Sample(None, None)


def test_smoothed_and_counted() -> None:
    found = Latency()
    found.add(Sample(1.0, None))
    found.add(Sample(2.0, 0.1))
    assert (found.calls, found.token_s) == (2, 0.1)
    assert found.first_s == pytest.approx(1.1)


def test_the_odd_one_is_named_with_why() -> None:
    fleet = {"a": seen(0.5, 0.01), "b": seen(0.6, 0.01), "c": seen(2.0, 0.01), "d": seen(0.5, 0.05)}
    assert outliers(fleet, 3.0) == [
        ("c", "2 s for a first token, where the others take 0.5 s"),
        ("d", "0.05 s for a token, where the others take 0.01 s"),
    ]


def test_too_few_calls_or_peers_say_nothing() -> None:
    one, slow_one = seen(0.1, 0.001), seen(9.0, 1.0)
    assert outliers({"a": one, "b": slow_one}, 3.0) == []
    assert outliers({"a": one, "b": one, "c": seen(9.0, 1.0, calls=ENOUGH - 1)}, 3.0) == []
    assert outliers({"a": one, "b": seen(0.1, 0.001, calls=1), "c": slow_one}, 3.0) == []
    assert slow(slow_one, [one, one], 3.0) is not None


def test_a_little_is_not_slow() -> None:
    fast = seen(0.01, 0.0005)
    assert outliers({"a": fast, "b": fast, "c": seen(0.2, 0.004)}, 3.0) == []


class Paced(ScriptedBackend):
    """Each answer takes so many seconds of the test's clock."""

    def __init__(self, clock: FakeClock, seconds: dict[str, float], name: str) -> None:
        super().__init__(ScriptedEngine())
        self._clock = clock
        self._seconds = seconds
        self._name = name

    async def generate(self, request: GenerateRequest, on_tokens: TokenSink | None = None) -> Generation:
        await self._clock.advance(self._seconds[self._name])
        return await super().generate(request, on_tokens)


class Fleet:
    """A pool over backends with a speed each; calls one after the other."""

    def __init__(self, **seconds: float) -> None:
        self.clock = FakeClock()
        self.seconds = seconds
        self.pool = BackendPool(
            model="scripted",
            make=self._make,
            settings=PoolSettings(slow_start_s=0.0, concurrency="off"),
            clock=self.clock,
            rng=random.Random(0),
        )
        self.pool.update([_record(name) for name in seconds])
        self._sessions = 0

    def _make(self, spec: BackendSpec, model: str) -> Backend:
        return Paced(self.clock, self.seconds, spec.url.removeprefix("http://"))

    async def ask(self, ask: Ask, times: int) -> Counter[str]:
        """Each in a session of its own, which stays."""
        went: Counter[str] = Counter()
        for _ in range(times):
            self._sessions += 1
            routed = await self.pool.generate(f"s{self._sessions}", ask(f"r{self._sessions}"))
            went[routed.backend_id] += 1
        return went

    def states(self) -> dict[str, str]:
        return {name: facts["state"] for name, facts in self.pool.stats().items()}

    def ejections(self) -> int:
        return sum(facts["ejections"] for facts in self.pool.stats().values())


def _record(name: str) -> policy.Backend:
    spec = BackendSpec(url=f"http://{name}", kind=BackendKind.SCRIPTED)
    return policy.Backend(
        id=name, policy="p", spec=spec, info=BackendInfo(engine="scripted", models=["scripted"])
    )


@pytest.fixture
async def fleets() -> AsyncIterator[Callable[..., Fleet]]:
    made: list[Fleet] = []

    def make(**seconds: float) -> Fleet:
        made.append(Fleet(**seconds))
        return made[-1]

    yield make
    for fleet in made:
        await fleet.pool.close()


async def test_a_slow_one_is_left_and_taken_back_by_one_call_at_a_time(
    fleets: Callable[..., Fleet], ask: Ask
) -> None:
    fleet = fleets(a=0.1, b=0.1, c=2.0)
    assert (await fleet.ask(ask, 3 * ENOUGH))["c"] == ENOUGH
    await fleet.clock.advance(6.0)
    assert fleet.states() == {"a": "ok", "b": "ok", "c": "slow"}
    assert "where the others take" in fleet.pool.stats()["c"]["error"]
    assert set(await fleet.ask(ask, 30)) == {"a", "b"}
    await fleet.clock.advance(30.0)
    assert (await fleet.ask(ask, 30))["c"] == 1, "one call to see, and it is as slow as before"
    assert fleet.ejections() == 2
    await fleet.clock.advance(30.0)
    assert "c" not in await fleet.ask(ask, 30), "the second time it rests for longer"
    fleet.seconds["c"] = 0.1
    await fleet.clock.advance(30.0)
    assert (await fleet.ask(ask, 30))["c"] > 5
    assert fleet.states()["c"] == "ok"
    assert fleet.pool.stats()["c"]["error"] is None


async def test_no_more_than_a_share_are_out_together(fleets: Callable[..., Fleet], ask: Ask) -> None:
    fleet = fleets(a=0.1, b=0.1, c=0.1, d=2.0, e=3.0)
    await fleet.ask(ask, 5 * ENOUGH)
    await fleet.clock.advance(6.0)
    states = fleet.states()
    assert [states[name] for name in "abc"] == ["ok"] * 3
    assert sorted(states[name] for name in "de") == ["ok", "slow"]


async def test_slow_ones_do_where_there_are_no_others(fleets: Callable[..., Fleet], ask: Ask) -> None:
    fleet = fleets(a=0.1, b=0.1, c=2.0)
    await fleet.ask(ask, 3 * ENOUGH)
    await fleet.clock.advance(6.0)
    assert fleet.states()["c"] == "slow"
    draining = policy.BackendState.DRAINING
    fleet.pool.update(
        [_record(name).model_copy(update={"state": draining}) for name in "ab"] + [_record("c")]
    )
    assert set(await fleet.ask(ask, 3)) == {"c"}


async def test_all_as_slow_is_nobodys_fault(fleets: Callable[..., Fleet], ask: Ask) -> None:
    fleet = fleets(a=2.0, b=2.0, c=2.0)
    await fleet.ask(ask, 3 * ENOUGH)
    await fleet.clock.advance(6.0)
    assert set(fleet.states().values()) == {"ok"}
