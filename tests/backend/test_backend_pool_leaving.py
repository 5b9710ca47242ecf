"""Backends that leave the pool, or are held while their weights are updated."""

from __future__ import annotations

import asyncio

import pytest

from rollserve.errors import BackendUnavailable
from rollserve.records.policy import BackendState
from rollserve.records.update import UpdateMode, WeightUpdate
from rollserve.rollouts.clock import ActiveTimer
from rollserve.testing.scripted import Fault

from .pool_bench import Ask, Bench, closing, record


async def test_removal_sends_what_is_in_flight_elsewhere(bench: Bench, ask: Ask) -> None:
    bench.serve("a")
    bench.hold("a")
    calls = [asyncio.create_task(bench.pool.generate(f"s{n}", ask(f"r{n}"))) for n in range(5)]
    await bench.clock.settle()
    bench.serve("b")
    assert {(await call).backend_id for call in calls} == {"b"}
    await bench.clock.settle()
    assert bench.engines["a"].aborted == 5
    assert bench.backends["a"].closed
    assert list(bench.pool.stats()) == ["b"]


async def test_removal_after_tokens_is_an_error(bench: Bench, ask: Ask) -> None:
    bench.serve("a", "b")
    bench.engines["a"].chunk_tokens = bench.engines["b"].chunk_tokens = 1
    for engine in bench.engines.values():
        engine.faults.append(Fault(kind="hang", after_tokens=2))
    first = asyncio.Event()
    call = asyncio.create_task(
        bench.pool.generate("s", ask(), lambda ids, logprobs: first.set() if ids else None)
    )
    await first.wait()
    bench.serve()
    with pytest.raises(BackendUnavailable, match="was removed in the middle"):
        await call


async def test_cancel_during_removal_is_a_cancel(bench: Bench, ask: Ask) -> None:
    bench.serve("a", "b")
    bench.hold("a", "b")
    call = asyncio.create_task(bench.pool.generate("s", ask()))
    await bench.clock.settle()
    bench.serve("c")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_draining_finishes_what_it_has(bench: Bench, ask: Ask) -> None:
    bench.serve("a")
    bench.hold("a")
    call = asyncio.create_task(bench.pool.generate("s", ask("r1")))
    await bench.clock.settle()
    bench.pool.update([record("a", BackendState.DRAINING), record("b")])
    assert (await bench.pool.generate("s", ask("r2"))).backend_id == "b", "a sticky session moves too"
    assert not call.done()
    assert bench.state("a") == "draining"
    bench.engines["a"].gate.set()
    assert (await call).backend_id == "a"
    assert bench.engines["a"].aborted == 0


async def test_another_address_is_another_backend(bench: Bench, ask: Ask) -> None:
    bench.serve("a")
    await bench.pool.generate("s", ask())
    bench.pool.update([record("a", url="http://elsewhere")])
    assert (await bench.pool.generate("s", ask())).backend_id == "a"
    assert bench.engines["elsewhere"].started == 1
    await bench.clock.settle()
    assert bench.backends["a"].closed


async def test_close_ends_calls_and_is_final(bench: Bench, ask: Ask) -> None:
    bench.serve("a")
    bench.hold("a")
    held = asyncio.create_task(bench.pool.generate("s", ask()))
    await bench.clock.settle()
    await bench.pool.close()
    with pytest.raises(BackendUnavailable, match="closed"):
        await held
    with pytest.raises(BackendUnavailable, match="closed"):
        await bench.pool.generate("s", ask())
    assert bench.backends["a"].closed
    bench.serve("b")
    assert bench.pool.stats() == {}


def update(mode: UpdateMode, name: str = "up1") -> WeightUpdate:
    return WeightUpdate(
        id=name, policy="p", mode=mode, lease_s=60, begun_at=0, expires_at=60, from_version=0, weights=0,
        backends=["a"],
    )  # fmt: skip


async def test_nothing_is_sent_while_an_update_is_open(bench: Bench, ask: Ask) -> None:
    bench.serve("a")
    bench.pool.hold(update(UpdateMode.DRAIN))
    timer = ActiveTimer(bench.clock, total_s=50, wall_s=1e6)
    async with timer.limit("run_s", 50):
        call = asyncio.create_task(bench.pool.generate("s", ask(), pause=timer.pause))
        await bench.clock.advance(300)
        assert not call.done(), "longer than the wait for a backend"
        assert bench.engines["a"].started == 0
        assert bench.pool.stats()["a"]["held"] == "up1"
        bench.pool.hold(None)
        await call
    assert bench.pool.stats()["a"]["held"] == ""
    assert timer.active_s == 0


async def test_draining_calls_end_as_usual(bench: Bench, ask: Ask) -> None:
    bench.serve("a")
    bench.hold("a")
    call = asyncio.create_task(bench.pool.generate("s", ask()))
    await bench.clock.settle()
    bench.pool.hold(update(UpdateMode.DRAIN))
    bench.engines["a"].gate.set()
    assert (await call).generation.finish_reason == "stop"


async def test_abort_stops_what_is_in_flight_with_what_it_had(bench: Bench, ask: Ask) -> None:
    bench.serve("a")
    bench.engines["a"].chunk_tokens = 1
    bench.engines["a"].faults.append(Fault(kind="hang", after_tokens=2))
    call = asyncio.create_task(bench.pool.generate("s", ask()))
    await bench.clock.settle()
    bench.pool.hold(update(UpdateMode.ABORT))
    await bench.clock.advance(1)
    routed = await call
    assert routed.generation.finish_reason == "abort"
    assert len(routed.generation.token_ids) == 2


async def test_one_that_does_not_stop_is_cut_and_made_again(bench: Bench, ask: Ask) -> None:
    bench.serve("a")
    bench.hold("a")
    call = asyncio.create_task(bench.pool.generate("s", ask()))
    await bench.clock.settle()
    bench.backends["a"].heeds_aborts = False
    bench.pool.hold(update(UpdateMode.ABORT))
    await bench.clock.advance(11)
    assert bench.engines["a"].aborted == 1
    assert not call.done()
    bench.engines["a"].gate.set()
    bench.pool.hold(None)
    assert (await call).generation.finish_reason == "stop"
    assert bench.engines["a"].started == 2


async def test_kept_calls_stand_still_with_their_callers_time(ask: Ask) -> None:
    async with closing(Bench(silent_s=30, quiet_s=20)) as bench:
        bench.serve("a")
        bench.hold("a")
        timer = ActiveTimer(bench.clock, total_s=1e6, wall_s=1e6)
        async with timer.limit("run_s", 1e5):
            call = asyncio.create_task(bench.pool.generate("s", ask(), pause=timer.pause))
            await bench.clock.advance(10)
            bench.pool.hold(update(UpdateMode.KEEP))
            bench.pool.hold(update(UpdateMode.KEEP))
            await bench.clock.advance(500)
            assert not call.done(), "its silence is the update's"
            assert await bench.pool.stalled("s", 100) is None
            assert bench.state("a") == "ok"
            bench.pool.hold(None)
            await bench.clock.advance(5)
            bench.engines["a"].gate.set()
            await call
        assert timer.active_s == pytest.approx(15)


async def test_a_kept_call_that_is_cancelled_gives_its_time_back(bench: Bench, ask: Ask) -> None:
    bench.serve("a")
    bench.hold("a")
    timer = ActiveTimer(bench.clock, total_s=1e6, wall_s=1e6)
    call = asyncio.create_task(bench.pool.generate("s", ask(), pause=timer.pause))
    await bench.clock.settle()
    bench.pool.hold(update(UpdateMode.KEEP))
    assert timer.paused
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not timer.paused


async def test_a_fenced_backend_is_left_at_once(bench: Bench, ask: Ask) -> None:
    bench.serve("a")
    bench.hold("a")
    call = asyncio.create_task(bench.pool.generate("s", ask()))
    await bench.clock.settle()
    bench.pool.update([record("a", BackendState.FENCED), record("b")])
    assert (await call).backend_id == "b"
    assert bench.state("a") == "fenced"
    bench.pool.update([record("a"), record("b")])
    assert bench.state("a") == "ok"
