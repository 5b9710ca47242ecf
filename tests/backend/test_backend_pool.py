"""The pool over scripted backends in process, on a clock that the test turns."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from msgspec import structs

from rollserve.backend.base import Backend, BackendHealth, GenerateRequest, Routed
from rollserve.backend.member import PoolSettings
from rollserve.backend.pool import BackendPool
from rollserve.errors import BackendError, BackendUnavailable, ContextTooLong
from rollserve.records import policy
from rollserve.records.policy import BackendInfo, BackendKind, BackendSpec, BackendState
from rollserve.records.update import UpdateMode, WeightUpdate
from rollserve.rollouts.clock import ActiveTimer
from rollserve.testing.clock import FakeClock
from rollserve.testing.scripted import Fault, ScriptedBackend, ScriptedEngine

Ask = Callable[..., GenerateRequest]
PLAIN = {"slow_start_s": 0.0, "concurrency": "off"}
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

    def __init__(self, **settings: float | str) -> None:
        self.clock = FakeClock()
        self.engines: dict[str, ScriptedEngine] = {}
        self.backends: dict[str, ScriptedBackend] = {}
        self.reports: list[tuple[str, bool]] = []
        self.pool = BackendPool(
            model="scripted",
            make=self._make,
            settings=PoolSettings(**{**PLAIN, **settings}),  # type: ignore[arg-type]  # test sugar
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


@asynccontextmanager
async def closing(made: Bench) -> AsyncIterator[Bench]:
    yield made
    for engine in made.engines.values():
        engine.gate.set()
    ending = asyncio.create_task(made.pool.close())
    while not ending.done():
        await made.clock.advance(1.0)
    await ending


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with closing(Bench()) as made:
        yield made


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


# ── silence


@pytest.fixture
async def quick() -> AsyncIterator[Bench]:
    async with closing(Bench(silent_s=30)) as made:
        yield made


def hang(bench: Bench, *names: str, after_tokens: int = 0) -> None:
    for name in names:
        bench.engines[name].chunk_tokens = 1
        bench.engines[name].faults.append(Fault(kind="hang", after_tokens=after_tokens))


async def test_a_silent_generation_is_stopped_and_sent_elsewhere(quick: Bench, ask: Ask) -> None:
    quick.serve("a", "b")
    hang(quick, "a")
    call = asyncio.create_task(quick.pool.generate("s", ask(), lambda ids, logprobs: None))
    await quick.clock.advance(29.9)
    assert not call.done()
    assert quick.in_flight() == {"a": 1, "b": 0}
    await quick.clock.advance(0.2)
    assert (await call).backend_id == "b"
    assert quick.engines["a"].aborted == 1
    assert quick.in_flight() == {"a": 0, "b": 0}
    assert quick.pool.stats()["a"]["failures"] == 1
    assert quick.state("a") == "ok", "one strike"


async def test_silence_after_tokens_is_an_error(quick: Bench, ask: Ask) -> None:
    quick.serve("a", "b")
    quick.hold("a")
    hang(quick, "a", after_tokens=2)
    got: list[int] = []
    call = asyncio.create_task(quick.pool.generate("s", ask(), lambda ids, logprobs: got.extend(ids)))
    await quick.clock.advance(20)
    quick.engines["a"].gate.set()
    await quick.clock.advance(29.9)
    assert len(got) == 2
    assert not call.done(), "counted from the newest token"
    await quick.clock.advance(0.2)
    with pytest.raises(BackendUnavailable, match="backend a took a call and then said nothing for 30 s"):
        await call
    assert quick.engines["b"].started == 0


async def test_a_whole_answer_must_come_within_the_silence(quick: Bench, ask: Ask) -> None:
    """The same backend is not waited for a second time."""
    quick.serve("a")
    quick.hold("a")
    call = asyncio.create_task(quick.pool.generate("s", ask()))
    await quick.clock.advance(30.1)
    with pytest.raises(BackendUnavailable, match="said nothing"):
        await call
    assert quick.engines["a"].started == quick.engines["a"].aborted == 1


async def test_three_silent_generations_fail_the_backend(quick: Bench, ask: Ask) -> None:
    quick.serve("a")
    quick.hold("a")
    calls = [asyncio.create_task(quick.pool.generate(f"s{n}", ask(f"r{n}"))) for n in range(3)]
    await quick.clock.settle()
    quick.engines["a"].unhealthy = "gone"
    await quick.clock.advance(30.1)
    assert quick.state("a") == "failed"
    await asyncio.gather(*calls, return_exceptions=True)


async def test_lost_tries_are_refunded_and_no_others(quick: Bench, ask: Ask) -> None:
    now, refunds = quick.clock.monotonic, []

    def refundable() -> Callable[[], None]:
        since = now()
        return lambda: refunds.append(now() - since)

    quick.serve("a", "b")
    await quick.pool.generate("s", ask("r0"), refundable=refundable)
    assert refunds == []
    quick.pool.release("s")
    hang(quick, "a")
    call = asyncio.create_task(quick.pool.generate("s", ask("r1"), refundable=refundable))
    await quick.clock.advance(31)
    await call
    assert refunds == [30]
    quick.hold("b")
    call = asyncio.create_task(quick.pool.generate("s", ask("r2"), refundable=refundable))
    await quick.clock.advance(7)
    quick.serve("a")
    await call
    assert refunds == [30, 7], "removed under the call"
    quick.engines["a"].faults.append(DOWN)
    call = asyncio.create_task(quick.pool.generate("s", ask("r3"), refundable=refundable))
    await quick.clock.advance(7)
    await call
    assert refunds == [30, 7, 0]


async def test_a_lost_try_does_not_burn_the_agents_time(quick: Bench, ask: Ask) -> None:
    timer = ActiveTimer(quick.clock, total_s=1000, wall_s=1000)
    quick.serve("a", "b")
    hang(quick, "a")

    async def run() -> None:
        async with timer.limit("run_s", 35):
            await quick.pool.generate("s", ask(), pause=timer.pause, refundable=timer.refundable)
            await quick.clock.sleep(20)

    running = asyncio.create_task(run())
    await quick.clock.advance(60)
    await running
    assert timer.active_s == pytest.approx(20)


class Out:
    """A call that is out on backend ``a`` while its agent's time runs out."""

    def __init__(self, bench: Bench, ask: Ask) -> None:
        self.bench = bench
        bench.serve("a")
        bench.hold("a")
        self.engine = bench.engines["a"]
        self.call = asyncio.create_task(bench.pool.generate("s", ask()))

    async def judge(self, *, meanwhile: Callable[[], object] = lambda: None) -> BackendUnavailable | None:
        """``meanwhile`` is done between the two looks."""
        question = asyncio.create_task(self.bench.pool.stalled("s", 100))
        await self.bench.clock.settle()
        meanwhile()
        await self.bench.clock.advance(1)
        assert question.done()
        return await question


@pytest.fixture
async def out(bench: Bench, ask: Ask) -> AsyncIterator[Out]:
    made = Out(bench, ask)
    yield made
    made.call.cancel()
    await asyncio.gather(made.call, return_exceptions=True)


async def test_nothing_out_is_nobodys_fault(out: Out) -> None:
    assert await out.bench.pool.stalled("another", 100) is None
    assert out.bench.backends["a"].health_checks == 0


async def test_a_sick_backend_is_to_blame_at_once(out: Out) -> None:
    await out.bench.clock.advance(3)
    out.engine.unhealthy = "engine is dead"
    error = await out.judge()
    assert error is not None
    assert "backend a was silent for 3 s" in error.message
    assert "engine is dead" in error.message
    assert not out.call.done(), "judging ends no call"


async def test_a_health_that_breaks_is_a_sick_backend(out: Out) -> None:
    def broken() -> object:
        raise ZeroDivisionError("oops")

    out.bench.backends["a"].health = broken  # type: ignore[assignment,method-assign]  # a third party's
    error = await out.judge()
    assert error is not None
    assert "oops" in error.message


async def test_an_engine_that_samples_nothing_is_to_blame(out: Out) -> None:
    await out.bench.clock.advance(40)
    error = await out.judge()
    assert error is not None
    assert "silent for 41 s" in error.message
    assert "samples nothing" in error.message


async def test_an_engine_at_work_is_slow_and_no_more(out: Out) -> None:
    def sample() -> None:
        out.engine.generated_tokens += 1

    await out.bench.clock.advance(99)
    assert await out.judge(meanwhile=sample) is None


async def test_a_long_prompt_may_be_read_for_a_while(out: Out) -> None:
    await out.bench.clock.advance(8)
    assert await out.judge() is None


async def test_a_call_that_comes_back_meanwhile_is_no_stall(out: Out) -> None:
    await out.bench.clock.advance(99)
    assert await out.judge(meanwhile=out.engine.gate.set) is None
    assert (await out.call).backend_id == "a"


async def test_a_token_of_the_call_itself_is_a_sign_of_life(bench: Bench, ask: Ask) -> None:
    bench.serve("a")
    bench.hold("a")
    hang(bench, "a", after_tokens=2)
    bench.engines["a"].counts_tokens = False
    call = asyncio.create_task(bench.pool.generate("s", ask(), lambda ids, logprobs: None))
    await bench.clock.advance(99)
    question = asyncio.create_task(bench.pool.stalled("s", 100))
    await bench.clock.settle()
    bench.engines["a"].gate.set()
    await bench.clock.advance(1)
    assert await question is None
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


@pytest.mark.parametrize(("silent_s", "blamed"), [(48, False), (50, True)])
async def test_without_a_counter_half_the_time_in_silence_is_to_blame(
    out: Out, silent_s: float, blamed: bool
) -> None:
    out.engine.counts_tokens = False
    await out.bench.clock.advance(silent_s)
    error = await out.judge()
    assert (error is not None) is blamed
    if error is not None:
        assert error.hint is not None
        assert "raise run_s or lower max_tokens" in error.hint


async def test_without_a_counter_others_that_come_back_tell(out: Out, ask: Ask) -> None:
    out.engine.counts_tokens = False
    other = asyncio.create_task(out.bench.pool.generate("other", ask("r2")))
    await out.bench.clock.advance(90)
    assert await out.judge() is not None
    out.engine.abort(["r2"])
    await out.bench.clock.settle()
    await other
    assert await out.judge() is None


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


# ── weights and slow start


async def test_shares_follow_weights(bench: Bench, ask: Ask) -> None:
    heavy = record("b")
    heavy = heavy.model_copy(update={"spec": heavy.spec.model_copy(update={"weight": 3.0})})
    bench.pool.update([record("a"), heavy])
    bench.hold("a", "b")
    calls = [asyncio.create_task(bench.pool.generate(f"s{n}", ask(f"r{n}"))) for n in range(80)]
    await bench.clock.settle()
    assert bench.in_flight() == {"a": 20, "b": 60}
    for engine in bench.engines.values():
        engine.gate.set()
    await asyncio.gather(*calls)


async def test_another_weight_is_the_same_backend(bench: Bench, ask: Ask) -> None:
    bench.serve("a")
    await bench.pool.generate("s", ask())
    heavier = record("a").model_copy(update={"spec": record("a").spec.model_copy(update={"weight": 2.0})})
    bench.pool.update([heavier])
    assert bench.pool.stats()["a"]["sessions"] == 1
    assert not bench.backends["a"].closed


async def test_a_heavy_home_is_not_left_for_its_fair_lead(bench: Bench, ask: Ask) -> None:
    heavy = record("b")
    heavy = heavy.model_copy(update={"spec": heavy.spec.model_copy(update={"weight": 10.0})})
    bench.pool.update([heavy])
    for n in range(20):
        await bench.pool.generate(f"s{n}", ask())
    bench.pool.update([record("a"), heavy])
    bench.hold("a", "b")
    calls = [asyncio.create_task(bench.pool.generate("x", ask("x0")))]
    calls += [asyncio.create_task(bench.pool.generate(f"s{n}", ask(f"r{n}"))) for n in range(20)]
    await bench.clock.settle()
    assert bench.in_flight()["b"] >= 18
    for engine in bench.engines.values():
        engine.gate.set()
    await asyncio.gather(*calls)


async def test_a_new_backend_begins_with_a_small_share_that_grows(ask: Ask) -> None:
    async with closing(Bench(slow_start_s=30.0)) as bench:
        bench.serve("a", "b")
        await bench.clock.advance(60)
        bench.hold("a", "b")
        calls = [asyncio.create_task(bench.pool.generate(f"s{n}", ask(f"r{n}"))) for n in range(40)]
        await bench.clock.settle()
        bench.serve("a", "b", "c")
        bench.hold("c")
        calls += [asyncio.create_task(bench.pool.generate(f"t{n}", ask(f"q{n}"))) for n in range(20)]
        await bench.clock.settle()
        assert bench.in_flight()["c"] <= 4, "a tenth of a share of twenty to thirty"
        await bench.clock.advance(30)
        calls += [asyncio.create_task(bench.pool.generate(f"u{n}", ask(f"p{n}"))) for n in range(60)]
        await bench.clock.settle()
        assert bench.in_flight() == {"a": 40, "b": 40, "c": 40}
        for engine in bench.engines.values():
            engine.gate.set()
        await asyncio.gather(*calls)


async def test_a_fleet_that_is_all_new_shares_evenly(ask: Ask) -> None:
    async with closing(Bench(slow_start_s=30.0)) as bench:
        bench.serve("a", "b", "c")
        bench.hold("a", "b", "c")
        calls = [asyncio.create_task(bench.pool.generate(f"s{n}", ask(f"r{n}"))) for n in range(30)]
        await bench.clock.settle()
        assert bench.in_flight() == {"a": 10, "b": 10, "c": 10}
        for engine in bench.engines.values():
            engine.gate.set()
        await asyncio.gather(*calls)


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
        calls = [asyncio.create_task(bench.pool.generate(f"s{n}", ask(f"r{n}"))) for n in range(40)]
        await bench.clock.settle()
        assert bench.in_flight()["b"] <= 5
        for engine in bench.engines.values():
            engine.gate.set()
        await asyncio.gather(*calls)


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


# ── updates of the weights


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

    async def deaf(request_ids: list[str]) -> None:
        """As a server whose abort does nothing."""

    bench.backends["a"].abort = deaf  # type: ignore[method-assign]
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


# ── how many at once


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
        assert not bench.pool._line.waits


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
        plain = backend.health

        async def health() -> BackendHealth:
            seen = await plain()
            tokens = int(bench.clock.monotonic() * 1000)
            return structs.replace(seen, kv_use=min(1.0, len(engine.running) / 20), generated_tokens=tokens)

        backend.health = health  # type: ignore[method-assign]
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
