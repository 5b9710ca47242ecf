"""A worker and its server: what it answers, what it repeats, what it forgets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import pytest

from rollserve.errors import FailureKind
from rollserve.executor.base import (
    AckAttempt,
    AttemptEnded,
    CancelAttempt,
    FromWorker,
    PolicyView,
    Shutdown,
    StageChanged,
    WorkerHello,
    WorkerStats,
)
from rollserve.records.policy import Policy, PolicySpec
from rollserve.records.rollout import Attempt, RolloutState
from rollserve.rollouts.stages import StageSlots
from rollserve.rollouts.warm import WarmRuntime
from rollserve.rollouts.worker import Worker
from rollserve.sandbox.base import SandboxSpec
from rollserve.testing.attempt_bench import AttemptBench
from rollserve.testing.fakes_worker import hang

M = TypeVar("M")


class Server:
    """The other end: hears everything, in order."""

    def __init__(self) -> None:
        self.heard: list[FromWorker] = []
        self._news = asyncio.Event()

    def send(self, message: FromWorker) -> bool:
        self.heard.append(message)
        self._news.set()
        return True

    def all(self, kind: type[M]) -> list[M]:
        return [message for message in self.heard if isinstance(message, kind)]

    async def until(self, happened: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not happened():
                self._news.clear()
                await self._news.wait()

    async def ends(self, count: int = 1) -> list[Attempt]:
        await self.until(lambda: len(self.all(AttemptEnded)) >= count)
        return [ended.attempt() for ended in self.all(AttemptEnded)]


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
async def worker(bench: AttemptBench, server: Server) -> AsyncIterator[Worker]:
    worker = Worker(bench.fakes.ports, worker_id="w1", slots=StageSlots(), gateway_url="http://gw")
    await worker.start()
    worker.connect(server.send)
    yield worker
    await worker.stop(0)


async def test_hello_says_what_it_can_hold(worker: Worker, server: Server) -> None:
    hello = server.all(WorkerHello)[0]
    assert hello.worker_id == "w1"
    assert hello.capacity == 8 + 16 + 64 + 16
    assert hello.slots == {"init": 8, "ready": 16, "run": 64, "grade": 16}
    assert hello.runtimes == ["fake"]
    assert hello.gateway_url == "http://gw"


async def test_an_attempt_from_start_to_acknowledgement(
    worker: Worker, server: Server, bench: AttemptBench
) -> None:
    worker.handle(bench.start_message("a"))
    (attempt,) = await server.ends()
    assert attempt.outcome is RolloutState.COMPLETED
    assert attempt.worker_id == "w1"
    worker.handle(AckAttempt(attempt_id="a", accepted=True))
    again = Server()
    worker.connect(again.send)
    assert again.all(AttemptEnded) == []
    assert "run/a" in bench.fakes.payloads.kept


async def test_an_end_is_repeated_until_it_is_acknowledged(
    worker: Worker, server: Server, bench: AttemptBench
) -> None:
    worker.disconnect()
    worker.handle(bench.start_message("a"))
    await bench.clock.settle()
    assert server.all(AttemptEnded) == []
    for _ in range(2):
        again = Server()
        worker.connect(again.send)
        assert isinstance(again.heard[0], WorkerHello)
        assert [attempt.id for attempt in await again.ends()] == ["a"]


async def test_a_start_that_comes_twice_runs_once(
    worker: Worker, server: Server, bench: AttemptBench
) -> None:
    worker.handle(bench.start_message("a"))
    worker.handle(bench.start_message("a"))
    await server.ends()
    worker.handle(bench.start_message("a"))
    await bench.clock.settle()
    assert len(bench.fakes.runtime.made) == 1


async def test_the_payload_of_a_fenced_attempt_is_deleted(
    worker: Worker, server: Server, bench: AttemptBench
) -> None:
    worker.handle(bench.start_message("a"))
    await server.ends()
    worker.handle(AckAttempt(attempt_id="a", accepted=False))
    await bench.clock.settle()
    assert bench.fakes.payloads.kept == {}


async def test_a_cancel_reaches_its_attempt_alone(
    worker: Worker, server: Server, bench: AttemptBench
) -> None:
    bench.fakes.hooks.chat = hang
    worker.handle(bench.start_message("a"))
    worker.handle(bench.start_message("b"))
    worker.handle(CancelAttempt(attempt_id="nobody", reason="x"))
    await bench.clock.settle()
    worker.handle(CancelAttempt(attempt_id="a", reason="not wanted"))
    (attempt,) = await server.ends()
    assert (attempt.id, attempt.outcome) == ("a", RolloutState.CANCELLED)
    assert {sandbox.owner for sandbox in bench.fakes.runtime.open} == {"b"}


@pytest.mark.parametrize("broken", ["task", "segment"])
async def test_what_can_not_be_started_is_reported(
    worker: Worker, server: Server, bench: AttemptBench, broken: str
) -> None:
    start = bench.start_message("a")
    if broken == "task":
        start = type(start)(**{**_fields(start), "task_json": b"{}"})
    else:
        bench.fakes.payloads.open_error = OSError("disk full")
    worker.handle(start)
    (attempt,) = await server.ends()
    assert attempt.outcome is RolloutState.FAILED
    assert attempt.epoch == 1
    assert attempt.failure is not None
    assert attempt.failure.kind is FailureKind.INFRASTRUCTURE
    assert bench.fakes.payloads.live == {}


def _fields(message: Any) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


async def test_policies_go_to_the_gateway(worker: Worker, bench: AttemptBench) -> None:
    policy = Policy(spec=PolicySpec(name="p", model="m", tokenizer="tiny"))
    view = PolicyView(revision=1, policy_json=policy.model_dump_json().encode(), backends_json=[])
    worker.handle(view)
    assert bench.fakes.gateway.views == [view]


async def test_a_message_that_breaks_does_not_end_the_worker(
    worker: Worker, server: Server, bench: AttemptBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(view: PolicyView) -> None:
        raise ValueError("no such policy")

    monkeypatch.setattr(bench.fakes.gateway, "update_policy", broken)
    worker.handle(PolicyView(revision=1, policy_json=b"{}", backends_json=[]))
    worker.handle(bench.start_message("a"))
    assert (await server.ends())[0].reward == 1.0


async def test_only_the_newest_stage_of_an_attempt_is_sent(
    worker: Worker, server: Server, bench: AttemptBench
) -> None:
    bench.fakes.hooks.chat = hang
    worker.handle(bench.start_message("a"))
    await bench.clock.settle()
    assert server.all(StageChanged) == []
    await bench.clock.advance(0.2)
    assert [change.stage for change in server.all(StageChanged)] == ["run"]


async def test_stats_come_every_second(worker: Worker, server: Server, bench: AttemptBench) -> None:
    worker.handle(bench.start_message("a"))
    await server.ends()

    async def next_second() -> None:
        seen = len(server.all(WorkerStats))
        await bench.clock.advance(1.01)
        await server.until(lambda: len(server.all(WorkerStats)) > seen)

    for _ in range(3):
        await next_second()
    stats = server.all(WorkerStats)[-1]
    assert stats.stages["run"] == 0
    assert stats.counters["episodes"] == 1
    assert stats.counters["calls"] == 1
    assert stats.counters["sandbox_starts"] == 1
    assert "sessions" not in stats.counters
    assert stats.backends == {"b1": {"in_flight": 0}}
    assert stats.rss_mb > 1
    assert stats.cpu_s > 0


async def test_orphans_are_reaped_at_the_start_and_every_minute(worker: Worker, bench: AttemptBench) -> None:
    assert bench.fakes.runtime.reaps == 1
    await bench.clock.advance(61)
    assert bench.fakes.runtime.reaps == 2


async def test_a_reaper_that_fails_is_asked_again(
    worker: Worker, bench: AttemptBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    async def broken() -> int:
        asked.append(1)
        raise OSError("busy")

    monkeypatch.setattr(bench.fakes.runtime, "reap", broken)
    await bench.clock.advance(125)
    assert len(asked) == 2


async def test_shutdown_asks_whoever_runs_it(worker: Worker) -> None:
    worker.handle(Shutdown(grace_s=2.5))
    worker.handle(Shutdown(grace_s=9))
    assert await asyncio.wait_for(worker.shutdown, 10) == 2.5


async def test_stop_lets_what_ends_in_time_end_and_cleans_up_the_rest(
    worker: Worker, server: Server, bench: AttemptBench
) -> None:
    bench.fakes.agents.plays["slow"] = bench.fakes.agents.plays["tool"]
    for name, seconds in (("quick", 3), ("late", 1000)):
        bench.fakes.hooks.create = partial(bench.clock.sleep, seconds)
        worker.handle(bench.start_message(name))
        await bench.clock.settle()
    stopping = asyncio.create_task(worker.stop(5))
    await bench.clock.advance(6)
    await asyncio.wait_for(stopping, 10)
    assert [attempt.id for attempt in await server.ends()] == ["quick"]
    assert bench.fakes.leftovers == []
    worker.handle(bench.start_message("after"))
    await bench.clock.settle()
    assert len(server.all(AttemptEnded)) == 1


async def test_many_attempts_at_once(server: Server, bench: AttemptBench) -> None:
    slots = StageSlots(init=16, ready=16, run=512, grade=16)
    worker = Worker(bench.fakes.ports, worker_id="w2", slots=slots)
    await worker.start()
    worker.connect(server.send)
    for number in range(512):
        worker.handle(bench.start_message(f"a{number}"))
    attempts = await server.ends(512)
    assert all(attempt.reward == 1.0 for attempt in attempts)
    await worker.stop(0)
    assert bench.fakes.leftovers == []


async def test_the_fake_runtime_closes_what_is_open(bench: AttemptBench) -> None:
    await bench.fakes.runtime.create(SandboxSpec(), owner="x", ttl_s=1)
    await bench.fakes.runtime.close()
    assert bench.fakes.leftovers == []


async def test_a_sandbox_that_does_not_close_keeps_its_slot_and_is_tried_again(
    worker: Worker, server: Server, bench: AttemptBench
) -> None:
    tries: list[int] = []

    async def stuck() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise OSError("busy")

    bench.fakes.hooks.close_sandbox = stuck
    worker.handle(bench.start_message("a"))
    assert (await server.ends())[0].reward == 1.0
    assert len(tries) == 1

    async def held() -> int:
        seen = len(server.all(WorkerStats))
        await bench.clock.advance(1.01)
        await server.until(lambda: len(server.all(WorkerStats)) > seen)
        return server.all(WorkerStats)[-1].stages["run"]

    assert await held() == 1
    await bench.clock.advance(5)
    assert len(tries) == 2
    assert await held() == 1
    await bench.clock.advance(5)
    assert len(tries) == 3
    assert await held() == 0
    assert bench.fakes.leftovers == []


async def test_stats_count_what_was_made_ahead(server: Server, bench: AttemptBench) -> None:
    warm = WarmRuntime(bench.fakes.runtime, most=4, clock=bench.clock)
    ports = replace(bench.fakes.ports, runtimes={"fake": warm})
    worker = Worker(ports, worker_id="w1", slots=StageSlots())
    await worker.start()
    worker.connect(server.send)
    for name in ("a", "b"):
        worker.handle(bench.start_message(name))
        await server.ends(1 if name == "a" else 2)
    await bench.clock.advance(1.01)
    await server.until(lambda: bool(server.all(WorkerStats)))
    counters = server.all(WorkerStats)[-1].counters
    assert (counters["cold_starts"], counters["warm_starts"]) == (1, 1)
    assert counters["spares_made"] >= 2
    await worker.stop(0)
    await warm.close()
    assert bench.fakes.leftovers == []
