"""Backends that say nothing: what is stopped, and whose time it was."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from rollserve.backend.base import BackendHealth
from rollserve.errors import BackendUnavailable
from rollserve.rollouts.clock import ActiveTimer
from rollserve.testing.scripted import Fault

from .pool_bench import DOWN, Ask, Bench, closing


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
    def broken(health: BackendHealth) -> BackendHealth:
        raise ZeroDivisionError("oops")

    out.bench.backends["a"].tells = broken
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
