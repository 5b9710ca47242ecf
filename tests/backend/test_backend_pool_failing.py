"""Backends that fail: other tries, waits while there is none, and their way back."""

from __future__ import annotations

import asyncio

import pytest

from rollserve.backend.base import Routed
from rollserve.errors import BackendError, BackendUnavailable, ContextTooLong
from rollserve.records.policy import BackendState
from rollserve.testing.scripted import Fault

from .pool_bench import BROKEN, DOWN, Ask, Bench, record


async def test_a_dead_backend_is_left_for_another(bench: Bench, ask: Ask) -> None:
    bench.serve("a", "b")
    bench.down("a")
    for n in range(8):
        assert (await bench.pool.generate(f"s{n}", ask(f"r{n}"))).backend_id == "b"
    assert bench.state("a") == "failed"
    assert bench.reports == [("a", False)]


async def test_retries_have_their_own_request_id(bench: Bench, ask: Ask) -> None:
    """A server may still work on the first try under its id."""
    bench.serve("a", "b")
    bench.engines["a"].faults.append(DOWN)
    bench.engines["b"].faults.append(DOWN)
    call = asyncio.create_task(bench.pool.generate("s", ask("r")))
    await bench.clock.advance(1.0)
    await call
    seen = [request.request_id for name in "ab" for request in bench.engines[name].seen]
    assert len(seen) == len(set(seen)) == 3


async def test_one_wrong_answer_is_tried_elsewhere(bench: Bench, ask: Ask) -> None:
    bench.serve("a", "b")
    bench.engines["a"].faults.extend([BROKEN] * 3)
    for n in range(3):
        assert (await bench.pool.generate(f"s{n}", ask(f"r{n}"))).backend_id == "b"
        bench.pool.release(f"s{n}")
    assert bench.state("a") == "failed", "another backend served what this one could not"


async def test_a_request_that_fails_everywhere_fails_no_backend(bench: Bench, ask: Ask) -> None:
    bench.serve("a", "b")
    for n in range(5):
        for engine in bench.engines.values():
            engine.faults.append(BROKEN)
        with pytest.raises(BackendError, match="broken"):
            await bench.pool.generate(f"s{n}", ask(f"r{n}"))
    assert bench.state("a") == bench.state("b") == "ok"


async def test_tries_are_bounded(bench: Bench, ask: Ask) -> None:
    names = [f"n{n}" for n in range(9)]
    bench.serve(*names)
    for name in names:
        bench.engines[name].faults.append(DOWN)
    with pytest.raises(BackendUnavailable, match="down"):
        await bench.pool.generate("s", ask())
    assert sum(engine.started for engine in bench.engines.values()) == 4


async def test_no_retry_once_tokens_were_handed_over(bench: Bench, ask: Ask) -> None:
    bench.serve("a", "b")
    for engine in bench.engines.values():
        engine.chunk_tokens = 1
        engine.faults.append(Fault(kind="drop", after_tokens=2))
    got: list[int] = []
    with pytest.raises(BackendUnavailable):
        await bench.pool.generate("s", ask(), lambda ids, logprobs: got.extend(ids))
    assert len(got) == 2
    assert sum(engine.started for engine in bench.engines.values()) == 1


async def test_a_prompt_that_does_not_fit_is_not_retried(bench: Bench, ask: Ask) -> None:
    bench.serve("a", "b")
    with pytest.raises(ContextTooLong):
        await bench.pool.generate("s", ask(token_ids=[3] * 40_000))
    assert bench.state("a") == bench.state("b") == "ok"


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_backend_rests_and_is_not_failed(bench: Bench, ask: Ask, status: int) -> None:
    bench.serve("a")
    busy = Fault(kind="status", status=status, message="queue full", retry_after_s=5)
    bench.engines["a"].faults.extend([busy] * 4)
    call = asyncio.create_task(bench.pool.generate("s", ask()))
    await bench.clock.advance(4.9)
    assert bench.engines["a"].started == 1
    await bench.clock.advance(15.2)
    assert (await call).backend_id == "a"
    assert bench.engines["a"].started == 5
    assert bench.reports == []


async def test_busy_for_ever_ends_at_the_deadline(bench: Bench, ask: Ask) -> None:
    bench.serve("a")
    busy = Fault(kind="status", status=429, message="queue full", retry_after_s=10)
    bench.engines["a"].faults.extend([busy] * 100)
    call = asyncio.create_task(bench.pool.generate("s", ask()))
    await bench.clock.advance(70.0)
    with pytest.raises(BackendUnavailable, match="within 60 s"):
        await call


async def test_none_at_all_waits_and_then_says_so(bench: Bench, ask: Ask) -> None:
    call = asyncio.create_task(bench.pool.generate("s", ask()))
    await bench.clock.advance(59.0)
    assert not call.done()
    await bench.clock.advance(2.0)
    with pytest.raises(BackendUnavailable, match="no backend serves 'scripted'"):
        await call


async def test_a_backend_that_comes_while_waiting_takes_the_call(bench: Bench, ask: Ask) -> None:
    call = asyncio.create_task(bench.pool.generate("s", ask()))
    await bench.clock.advance(30.0)
    bench.serve("a")
    assert (await call).backend_id == "a"


async def test_all_dead_then_one_returns(bench: Bench, ask: Ask) -> None:
    bench.serve("a", "b")
    bench.down("a", "b")
    calls: list[asyncio.Task[Routed]] = []
    for n in range(6):
        calls.append(asyncio.create_task(bench.pool.generate(f"s{n}", ask(f"r{n}"))))
    await bench.clock.advance(20.0)
    assert bench.state("a") == bench.state("b") == "failed"
    survivors = [call for call in calls if not call.done()]
    assert survivors, "calls are held while no backend is active"
    bench.up("b")
    await bench.clock.advance(40.0)
    assert {(await call).backend_id for call in survivors} == {"b"}
    assert bench.reports[-1] == ("b", True)
    assert bench.state("b") == "ok"
    assert bench.state("a") == "failed"


async def fail(bench: Bench, ask: Ask, name: str) -> None:
    """Three strikes: ``name`` is failed, all else serves."""
    bench.down(name)
    for n in range(10):
        await bench.pool.generate(f"fail{n}", ask(f"fail{n}"))
        bench.pool.release(f"fail{n}")
    assert bench.state(name) == "failed"


async def test_health_is_asked_with_back_off(bench: Bench, ask: Ask) -> None:
    bench.serve("a", "b")
    await fail(bench, ask, "a")
    await bench.clock.advance(600.0)
    asked = bench.backends["a"].health_checks
    assert 20 <= asked <= 60
    assert bench.state("a") == "failed"


async def test_one_in_whose_place_another_model_is_served_stays_out(bench: Bench, ask: Ask) -> None:
    bench.serve("a", "b")
    await fail(bench, ask, "a")
    bench.up("a")
    bench.engines["a"].model = "another"
    await bench.clock.advance(600.0)
    assert bench.state("a") == "failed"
    bench.engines["a"].model = "scripted"
    await bench.clock.advance(60.0)
    assert bench.state("a") == "trial"


async def test_half_open_lets_one_call_through(bench: Bench, ask: Ask) -> None:
    bench.serve("a", "b")
    await fail(bench, ask, "a")
    bench.up("a")
    bench.hold("a", "b")
    await bench.clock.advance(1.0)
    assert bench.state("a") == "trial"
    calls = [asyncio.create_task(bench.pool.generate(f"s{n}", ask(f"r{n}"))) for n in range(10)]
    await bench.clock.settle()
    assert bench.in_flight() == {"a": 1, "b": 9}
    bench.engines["a"].gate.set()
    await bench.clock.settle()
    assert bench.state("a") == "ok"
    bench.engines["b"].gate.set()
    await asyncio.gather(*calls)


async def test_a_failed_trial_fails_it_again(bench: Bench, ask: Ask) -> None:
    bench.serve("a", "b")
    await fail(bench, ask, "a")
    bench.engines["a"].unhealthy = None
    await bench.clock.advance(1.0)
    assert bench.state("a") == "trial"
    assert (await bench.pool.generate("s", ask())).backend_id == "b"
    assert bench.state("a") == "failed"
    assert bench.reports == [("a", False), ("a", True), ("a", False)]


async def test_calls_on_a_backend_that_hung_are_sent_elsewhere(bench: Bench, ask: Ask) -> None:
    bench.serve("a", "b")
    bench.engines["a"].faults.append(Fault(kind="hang"))
    bench.engines["b"].faults.append(Fault(kind="hang"))
    stuck = [asyncio.create_task(bench.pool.generate(f"s{n}", ask(f"r{n}"))) for n in range(2)]
    await bench.clock.settle()
    assert bench.in_flight() == {"a": 1, "b": 1}
    bench.engines["a"].unhealthy = "not answering"
    await bench.clock.advance(400.0)
    assert bench.state("a") == "failed"
    (moved,) = [call for call in stuck if call.done()]
    assert (await moved).backend_id == "b"
    assert bench.in_flight() == {"a": 0, "b": 1}, "the one on a healthy backend may take its time"
    bench.engines["b"].abort(list(bench.engines["b"].running))
    await asyncio.gather(*stuck)


async def test_registered_as_failed_must_prove_itself(bench: Bench, ask: Ask) -> None:
    bench.pool.update([record("a", BackendState.FAILED)])
    call = asyncio.create_task(bench.pool.generate("s", ask()))
    await bench.clock.settle()
    assert not call.done()
    await bench.clock.advance(1.0)
    assert (await call).backend_id == "a"
    assert bench.reports == [("a", False), ("a", True)]


async def test_what_others_saw_does_not_overrule_what_we_see(bench: Bench, ask: Ask) -> None:
    bench.serve("a")
    await bench.pool.generate("s", ask())
    bench.pool.update([record("a", BackendState.FAILED)])
    assert (await bench.pool.generate("s", ask())).backend_id == "a"
