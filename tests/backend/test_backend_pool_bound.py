"""How many calls a backend gets at once, and who waits for what."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from rollserve.backend.base import BackendHealth
from rollserve.errors import BackendUnavailable
from rollserve.rollouts.clock import ActiveTimer

from .pool_bench import Ask, Bench, closing


async def test_calls_over_the_bound_wait_in_order_and_uncharged(ask: Ask) -> None:
    async with closing(Bench(concurrency=2)) as bench:
        bench.serve("a")
        bench.hold("a")
        timer = ActiveTimer(bench.clock, total_s=1e6, wall_s=1e6)
        calls = [asyncio.create_task(bench.pool.generate(f"s{n}", ask(f"r{n}"))) for n in range(5)]
        await bench.clock.settle()
        async with timer.limit("run_s", 50):
            last = asyncio.create_task(bench.pool.generate("last", ask("last"), pause=timer.pause))
            await bench.clock.advance(500)
            assert bench.in_flight() == {"a": 2}, "and nothing fails for want of a backend"
            for done in range(5):
                bench.engines["a"].abort([f"r{done}"])
                await bench.clock.settle()
                assert calls[done].done()
            bench.engines["a"].gate.set()
            await last
        assert timer.active_s == pytest.approx(0)
        assert [request.request_id for request in bench.engines["a"].seen] == [
            *(f"r{n}" for n in range(5)),
            "last",
        ]


async def test_a_full_home_is_left_for_one_with_room(ask: Ask) -> None:
    async with closing(Bench(concurrency=1)) as bench:
        bench.serve("a")
        await bench.pool.generate("s", ask("r0"))
        await bench.pool.generate("t", ask("r1"))
        bench.serve("a", "b")
        bench.hold("a")
        first = asyncio.create_task(bench.pool.generate("s", ask("r2")))
        await bench.clock.settle()
        assert (await bench.pool.generate("t", ask("r3"))).backend_id == "b"
        bench.engines["a"].gate.set()
        assert (await first).backend_id == "a"


async def test_a_place_is_not_lost_with_who_was_called(ask: Ask) -> None:
    async with closing(Bench(concurrency=1)) as bench:
        bench.serve("a")
        bench.hold("a")
        calls = [asyncio.create_task(bench.pool.generate(f"s{n}", ask(f"r{n}"))) for n in range(4)]
        await bench.clock.settle()
        calls[0].cancel()
        calls[1].cancel()
        await bench.clock.settle()
        calls[2].cancel()
        bench.engines["a"].gate.set()
        assert (await calls[3]).backend_id == "a"
        assert bench.in_flight() == {"a": 0}
        assert not bench.pool._roster.line.waits


async def test_those_who_wait_go_to_a_backend_that_comes(ask: Ask) -> None:
    async with closing(Bench(concurrency=1)) as bench:
        bench.serve("a")
        bench.hold("a")
        calls = [asyncio.create_task(bench.pool.generate(f"s{n}", ask(f"r{n}"))) for n in range(3)]
        await bench.clock.settle()
        bench.serve("a", "b")
        done, _ = await asyncio.wait(calls[1:], timeout=5)
        assert {call.result().backend_id for call in done} == {"b"}
        bench.engines["a"].gate.set()
        await calls[0]


async def test_those_who_wait_are_told_when_all_fail(ask: Ask) -> None:
    async with closing(Bench(concurrency=1, wait_s=20)) as bench:
        bench.serve("a")
        bench.hold("a")
        calls = [asyncio.create_task(bench.pool.generate(f"s{n}", ask(f"r{n}"))) for n in range(3)]
        await bench.clock.settle()
        bench.serve()
        await bench.clock.advance(30)
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(each) for each in found] == [BackendUnavailable] * 3


async def test_the_bound_follows_the_engines_metrics(ask: Ask) -> None:
    """An engine whose cache holds 20 calls: the pool finds that, and its calls keep coming back."""
    async with closing(Bench(concurrency="auto", metrics_s=2.0)) as bench:
        bench.serve("a")
        engine, backend = bench.engines["a"], bench.backends["a"]

        def busy(seen: BackendHealth) -> BackendHealth:
            tokens = int(bench.clock.monotonic() * 1000)
            return structs.replace(seen, kv_use=min(1.0, len(engine.running) / 20), generated_tokens=tokens)

        backend.tells = busy
        bench.hold("a")
        calls = [asyncio.create_task(bench.pool.generate(f"s{n}", ask(f"r{n}"))) for n in range(300)]
        await bench.clock.settle()
        assert bench.in_flight() == {"a": 64}
        for _ in range(200):
            await bench.clock.advance(1.0)
            engine.abort(list(engine.running)[:1])
        assert 10 <= bench.pool.stats()["a"]["limit"] <= 19
        for _ in range(60):
            engine.gate.set()
            await bench.clock.advance(1.0)
        assert all(call.done() for call in calls)


async def test_off_is_off(ask: Ask) -> None:
    async with closing(Bench(concurrency="off")) as bench:
        bench.serve("a")
        bench.hold("a")
        calls = [asyncio.create_task(bench.pool.generate(f"s{n}", ask(f"r{n}"))) for n in range(300)]
        await bench.clock.settle()
        assert bench.in_flight() == {"a": 300}
        assert bench.pool.stats()["a"]["limit"] is None
        bench.engines["a"].gate.set()
        await asyncio.gather(*calls)


async def test_an_engine_without_metrics_is_not_bounded(ask: Ask) -> None:
    async with closing(Bench(concurrency="auto")) as bench:
        bench.serve("a")
        bench.engines["a"].counts_tokens = False
        bench.hold("a")
        calls = [asyncio.create_task(bench.pool.generate(f"s{n}", ask(f"r{n}"))) for n in range(100)]
        await bench.clock.advance(5)
        assert bench.in_flight() == {"a": 100}
        bench.engines["a"].gate.set()
        await asyncio.gather(*calls)
