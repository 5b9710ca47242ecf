"""Which backend the pool chooses for a session: stickiness, shares, weights, turns, slow start."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from rollserve.errors import BackendError, ContextTooLong
from rollserve.testing.scripted import Fault

from .pool_bench import BROKEN, Ask, Bench, closing, record


async def test_sessions_stay_where_they_are(bench: Bench, ask: Ask) -> None:
    bench.serve("a", "b", "c")
    homes = {f"s{n}": (await bench.pool.generate(f"s{n}", ask())).backend_id for n in range(9)}
    assert Counter(homes.values()) == {"a": 3, "b": 3, "c": 3}
    for _ in range(3):
        for session, home in homes.items():
            assert (await bench.pool.generate(session, ask())).backend_id == home


async def test_300_at_once_through_three_are_balanced(bench: Bench, ask: Ask) -> None:
    bench.serve("a", "b", "c")
    bench.hold("a", "b", "c")
    calls = await bench.begin(ask, 300)
    assert bench.in_flight() == {"a": 100, "b": 100, "c": 100}
    done = await bench.let_go(calls)
    assert Counter(routed.backend_id for routed in done) == {"a": 100, "b": 100, "c": 100}
    assert bench.in_flight() == {"a": 0, "b": 0, "c": 0}


async def test_a_new_backend_takes_its_share_and_no_more(bench: Bench, ask: Ask) -> None:
    bench.serve("a", "b")
    bench.hold("a", "b")
    calls = await bench.begin(ask, 40)
    bench.serve("a", "b", "c")
    bench.hold("c")
    calls += await bench.begin(ask, 80, "t")
    assert bench.in_flight() == {"a": 40, "b": 40, "c": 40}
    await bench.let_go(calls)


async def test_sticky_sessions_leave_a_backend_that_is_far_busier(bench: Bench, ask: Ask) -> None:
    bench.serve("a")
    for n in range(40):
        await bench.pool.generate(f"s{n}", ask())
    bench.serve("a", "b")
    bench.hold("a", "b")
    calls = await bench.begin(ask, 40)
    shares = bench.in_flight()
    assert sum(shares.values()) == 40
    assert shares["b"] >= 10
    await bench.let_go(calls)


async def test_in_flight_returns_to_zero_however_calls_end(bench: Bench, ask: Ask) -> None:
    bench.serve("a")
    bench.engines["a"].faults.extend([BROKEN, Fault(kind="drop")])
    with pytest.raises(BackendError):
        await bench.pool.generate("s", ask("r0"))
    call = asyncio.create_task(bench.pool.generate("s", ask("r1")))
    await bench.clock.advance(1.0)
    await call
    with pytest.raises(ContextTooLong):
        await bench.pool.generate("s", ask("r2", token_ids=[3] * 40_000))
    bench.hold("a")
    call = asyncio.create_task(bench.pool.generate("s", ask("r3")))
    await bench.clock.settle()
    assert bench.in_flight() == {"a": 1}
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert bench.in_flight() == {"a": 0}
    assert bench.engines["a"].aborted == 1


async def test_release_forgets_the_session(bench: Bench, ask: Ask) -> None:
    bench.serve("a")
    await bench.pool.generate("s", ask())
    assert bench.pool.stats()["a"]["sessions"] == 1
    bench.pool.release("s")
    bench.pool.release("s")
    assert bench.pool.stats()["a"]["sessions"] == 0
    assert bench.pool.stats()["a"]["generated_tokens"] == 16


async def test_shares_follow_weights(bench: Bench, ask: Ask) -> None:
    heavy = record("b", weight=3.0)
    bench.pool.update([record("a"), heavy])
    bench.hold("a", "b")
    calls = await bench.begin(ask, 80)
    assert bench.in_flight() == {"a": 20, "b": 60}
    await bench.let_go(calls)


async def test_in_turn_is_by_weight_however_busy_and_for_good(ask: Ask) -> None:
    async with closing(Bench(routing="in_turn", imbalance=0)) as bench:
        heavy = record("b", weight=3.0)
        bench.pool.update([record("a"), heavy])
        bench.hold("a")
        calls = await bench.begin(ask, 8)
        calls += await bench.begin(ask, 8, "t")
        assert bench.in_flight() == {"a": 4, "b": 0}
        bench.engines["a"].gate.set()
        first = {call.backend_id for call in await asyncio.gather(*calls[:8])}
        assert first == {"a", "b"}
        homes = [(await bench.pool.generate(f"s{n}", ask())).backend_id for n in range(8)]
        assert homes == [call.result().backend_id for call in calls[:8]]


async def test_one_that_comes_later_has_its_turn_and_not_all(ask: Ask) -> None:
    async with closing(Bench(routing="in_turn")) as bench:
        bench.serve("a")
        for n in range(10):
            await bench.pool.generate(f"s{n}", ask())
        bench.serve("a", "b")
        new = Counter([(await bench.pool.generate(f"t{n}", ask())).backend_id for n in range(10)])
        assert new == {"a": 5, "b": 5}


async def test_to_the_least_busy_whatever_backend_a_session_had(ask: Ask) -> None:
    async with closing(Bench(routing="least_busy")) as bench:
        bench.serve("a", "b")
        bench.hold("a", "b")
        calls = [asyncio.create_task(bench.pool.generate("s", ask(f"r{n}"))) for n in range(4)]
        await bench.clock.settle()
        assert bench.in_flight() == {"a": 2, "b": 2}
        await bench.let_go(calls)


async def test_another_weight_is_the_same_backend(bench: Bench, ask: Ask) -> None:
    bench.serve("a")
    await bench.pool.generate("s", ask())
    bench.pool.update([record("a", weight=2.0)])
    assert bench.pool.stats()["a"]["sessions"] == 1
    assert not bench.backends["a"].closed


async def test_a_heavy_home_is_not_left_for_its_fair_lead(bench: Bench, ask: Ask) -> None:
    heavy = record("b", weight=10.0)
    bench.pool.update([heavy])
    for n in range(20):
        await bench.pool.generate(f"s{n}", ask())
    bench.pool.update([record("a"), heavy])
    bench.hold("a", "b")
    calls = [*await bench.begin(ask, 1, "x"), *await bench.begin(ask, 20)]
    assert bench.in_flight()["b"] >= 18
    await bench.let_go(calls)


async def test_a_new_backend_begins_with_a_small_share_that_grows(ask: Ask) -> None:
    async with closing(Bench(slow_start_s=30.0)) as bench:
        bench.serve("a", "b")
        await bench.clock.advance(60)
        bench.hold("a", "b")
        calls = await bench.begin(ask, 40)
        bench.serve("a", "b", "c")
        bench.hold("c")
        calls += await bench.begin(ask, 20, "t")
        assert bench.in_flight()["c"] <= 4, "a tenth of a share of twenty to thirty"
        await bench.clock.advance(30)
        calls += await bench.begin(ask, 60, "u")
        assert bench.in_flight() == {"a": 40, "b": 40, "c": 40}
        await bench.let_go(calls)


async def test_a_fleet_that_is_all_new_shares_evenly(ask: Ask) -> None:
    async with closing(Bench(slow_start_s=30.0)) as bench:
        bench.serve("a", "b", "c")
        bench.hold("a", "b", "c")
        calls = await bench.begin(ask, 30)
        assert bench.in_flight() == {"a": 10, "b": 10, "c": 10}
        await bench.let_go(calls)


async def test_one_that_is_back_from_failure_starts_slowly(ask: Ask) -> None:
    async with closing(Bench(slow_start_s=30.0)) as bench:
        bench.serve("a", "b")
        bench.down("b", times=3)
        for n in range(8):
            await bench.pool.generate(f"f{n}", ask(f"f{n}"))
        assert bench.state("b") == "failed"
        await bench.clock.advance(60)
        bench.up("b")
        await bench.clock.advance(60)
        await bench.pool.generate("trial", ask("trial"))
        await bench.pool.generate("trial2", ask("trial2"))
        assert bench.state("b") == "ok"
        bench.hold("a", "b")
        calls = await bench.begin(ask, 40)
        assert bench.in_flight()["b"] <= 5
        await bench.let_go(calls)


async def test_churn_leaks_no_count_and_no_new_backend_takes_everything(ask: Ask) -> None:
    """Calls that end well, fail, are cancelled; sessions that come and go; backends that come and go."""
    rng = random.Random(1)
    async with closing(Bench(slow_start_s=5.0, quiet_s=1e6, silent_s=1e6)) as bench:
        serving = ["b0", "b1", "b2"]
        bench.serve(*serving)
        for step in range(12):
            before = Counter({name: engine.started for name, engine in bench.engines.items()})
            calls = [
                asyncio.create_task(bench.pool.generate(f"s{step}-{n % 40}", ask(f"r{step}-{n}")))
                for n in range(120)
            ]
            await bench.clock.settle(3)
            for call in rng.sample(calls, 20):
                call.cancel()
            for name in serving[:2]:
                bench.engines[name].faults.extend([BROKEN, Fault(kind="drop")])
            for _ in range(20):
                await bench.clock.advance(0.5)
            assert all(call.done() for call in calls)
            assert set(bench.in_flight().values()) == {0}
            took = Counter({name: bench.engines[name].started for name in serving}) - before
            assert max(took.values()) <= 0.6 * sum(took.values()), (step, took)
            for n in range(40):
                bench.pool.release(f"s{step}-{n}")
            assert {numbers["sessions"] for numbers in bench.pool.stats().values()} == {0}
            serving = [*serving[1:], f"b{step + 3}"]
            bench.serve(*serving)
            bench.hold()
