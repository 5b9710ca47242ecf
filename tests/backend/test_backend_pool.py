"""The pool over scripted backends in process, on a clock that the test turns."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable

import pytest

from rollserve.backend.base import Backend, GenerateRequest, Routed
from rollserve.backend.member import PoolSettings
from rollserve.backend.pool import BackendPool
from rollserve.errors import BackendError, BackendUnavailable, ContextTooLong
from rollserve.records import policy
from rollserve.records.policy import BackendInfo, BackendKind, BackendSpec, BackendState
from rollserve.testing.clock import FakeClock
from rollserve.testing.scripted import Fault, ScriptedBackend, ScriptedEngine

Ask = Callable[..., GenerateRequest]
DOWN = Fault(kind="status", status=503, message="down")
BROKEN = Fault(kind="status", status=500, message="broken")


def record(name: str, state: BackendState = BackendState.ACTIVE, url: str | None = None) -> policy.Backend:
    return policy.Backend(
        id=name,
        policy="p",
        spec=BackendSpec(url=url or f"http://{name}", kind=BackendKind.SCRIPTED),
        info=BackendInfo(engine="scripted", models=["scripted"]),
        state=state,
    )


class Bench:
    """A pool, its clock, and the engine behind each backend by name."""

    def __init__(self, **settings: float) -> None:
        self.clock = FakeClock()
        self.engines: dict[str, ScriptedEngine] = {}
        self.backends: dict[str, ScriptedBackend] = {}
        self.reports: list[tuple[str, bool]] = []
        self.pool = BackendPool(
            model="scripted",
            make=self._make,
            settings=PoolSettings(**settings),  # type: ignore[arg-type]  # test sugar
            on_report=lambda backend_id, ok, detail: self.reports.append((backend_id, ok)),
            clock=self.clock,
            rng=random.Random(0),
        )

    def _make(self, spec: BackendSpec, model: str) -> Backend:
        name = spec.url.removeprefix("http://")
        engine = self.engines.setdefault(name, ScriptedEngine())
        self.backends[name] = ScriptedBackend(engine, model=model)
        return self.backends[name]

    def serve(self, *names: str) -> None:
        self.pool.update([record(name) for name in names])

    def down(self, *names: str, times: int = 100) -> None:
        for name in names:
            self.engines[name].faults.extend([DOWN] * times)
            self.engines[name].unhealthy = "down"

    def up(self, *names: str) -> None:
        for name in names:
            self.engines[name].faults.clear()
            self.engines[name].unhealthy = None

    def hold(self, *names: str) -> None:
        for name in names:
            self.engines[name].gate.clear()

    def in_flight(self) -> dict[str, int]:
        return {name: numbers["in_flight"] for name, numbers in self.pool.stats().items()}

    def state(self, name: str) -> str:
        return str(self.pool.stats()[name]["state"])


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    for engine in made.engines.values():
        engine.gate.set()
    closing = asyncio.create_task(made.pool.close())
    while not closing.done():
        await made.clock.advance(1.0)
    await closing


# ── choosing


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
    calls = [asyncio.create_task(bench.pool.generate(f"s{n}", ask(f"r{n}"))) for n in range(300)]
    await bench.clock.settle()
    assert bench.in_flight() == {"a": 100, "b": 100, "c": 100}
    for engine in bench.engines.values():
        engine.gate.set()
    done = await asyncio.gather(*calls)
    assert Counter(routed.backend_id for routed in done) == {"a": 100, "b": 100, "c": 100}
    assert bench.in_flight() == {"a": 0, "b": 0, "c": 0}


async def test_a_new_backend_takes_its_share_and_no_more(bench: Bench, ask: Ask) -> None:
    bench.serve("a", "b")
    bench.hold("a", "b")
    calls = [asyncio.create_task(bench.pool.generate(f"s{n}", ask(f"r{n}"))) for n in range(40)]
    await bench.clock.settle()
    bench.serve("a", "b", "c")
    bench.hold("c")
    calls += [asyncio.create_task(bench.pool.generate(f"t{n}", ask(f"q{n}"))) for n in range(80)]
    await bench.clock.settle()
    assert bench.in_flight() == {"a": 40, "b": 40, "c": 40}
    for engine in bench.engines.values():
        engine.gate.set()
    await asyncio.gather(*calls)


async def test_sticky_sessions_leave_a_backend_that_is_far_busier(bench: Bench, ask: Ask) -> None:
    bench.serve("a")
    for n in range(40):
        await bench.pool.generate(f"s{n}", ask())
    bench.serve("a", "b")
    bench.hold("a", "b")
    calls = [asyncio.create_task(bench.pool.generate(f"s{n}", ask(f"r{n}"))) for n in range(40)]
    await bench.clock.settle()
    shares = bench.in_flight()
    assert sum(shares.values()) == 40
    assert shares["b"] >= 10
    for engine in bench.engines.values():
        engine.gate.set()
    await asyncio.gather(*calls)


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


# ── failing over


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


async def test_a_busy_backend_rests_and_is_not_failed(bench: Bench, ask: Ask) -> None:
    bench.serve("a")
    busy = Fault(kind="status", status=429, message="queue full", retry_after_s=5)
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


# ── none active


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


# ── recovery


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


# ── leaving


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
    call = asyncio.create_task(bench.pool.generate("s", ask(), lambda ids, logprobs: first.set()))
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
