"""Backends that nobody uses are looked at all the same, and what is shown of them has an age."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import pytest

from rollserve.backend.base import BackendHealth
from rollserve.errors import InvalidInput, NotFound
from rollserve.executor.base import BackendReport, WorkerStats
from rollserve.records.policy import Backend, BackendInfo, BackendSpec, BackendState
from rollserve.rollouts.bell import Bell
from rollserve.rollouts.checkups import Checkups
from rollserve.rollouts.policies import Policies
from rollserve.rollouts.templates import Templates
from rollserve.testing.clock import FakeClock
from rollserve.testing.fakes_server import probe_backend
from rollserve.testing.scripted import ScriptedBackend, ScriptedEngine
from rollserve.testing.server_room import Room


class Engine:
    """One that may be down, or serve another model (``serves``). ``looks`` counts all, ``probes`` those that
    may sample. Addresses with "hung" in them never answer."""

    def __init__(self) -> None:
        self.up = True
        self.serves: str | None = None
        self.looks = 0
        self.probes = 0

    def open(self, spec: BackendSpec, model: str) -> ScriptedBackend:
        self.looks += 1
        engine = ScriptedEngine(model=self.serves or model)
        engine.unhealthy = None if self.up else "connection refused"
        return Hung(engine) if "hung" in spec.url else ScriptedBackend(engine, model=model)

    async def probe(self, spec: BackendSpec, model: str) -> BackendInfo:
        self.looks += 1
        self.probes += 1
        if not self.up:
            raise InvalidInput("connection refused", field="url")
        info = await probe_backend(spec, model)
        return info.model_copy(update={"models": [self.serves or model]})


class Hung(ScriptedBackend):
    async def look(self) -> BackendHealth:
        await asyncio.Event().wait()
        raise AssertionError("it never answers")


class Gated(ScriptedBackend):
    """Answers once ``gate`` opens; without an engine it is gone by then."""

    def __init__(self, gate: asyncio.Event, engine: ScriptedEngine | None) -> None:
        super().__init__(engine)
        self._gate, self._there = gate, engine is not None

    async def look(self) -> BackendHealth:
        await self._gate.wait()
        if not self._there:
            raise NotFound("no such backend")
        return await super().look()


class CutOff(Checkups):
    """What it sees of a backend can't be told just when the places of others are given to the next."""

    async def report(self, report: BackendReport) -> None:
        for _ in range(2):
            await asyncio.sleep(0)
        raise RuntimeError("the store is gone")


class LastOfTheFirst(Engine):
    """Of the first 16 that are looked at, the last one is there; later ones hang."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    def open(self, spec: BackendSpec, model: str) -> ScriptedBackend:
        self.looks += 1
        if self.looks > 16:
            return Hung(ScriptedEngine())
        return Gated(self.gate, ScriptedEngine(model=model) if self.looks == 16 else None)


class Bench:
    def __init__(self, room: Room, *, engine: Engine | None = None, kind: type[Checkups] = Checkups) -> None:
        self.room, self.engine, self.clock = room, engine or Engine(), FakeClock()
        ports = replace(
            room.core._ports, probe_backend=self.engine.probe, open_backend=self.engine.open, clock=self.clock
        )
        policies = Policies(ports, Templates(ports, happened=Bell()), changed=Bell(), happened=Bell())
        self.checkups = kind(ports, policies, room.core._shared.fleet)

    async def backend(self) -> Backend:
        await self.room.run()
        return await self.room.core.policies.register("pol", BackendSpec(url="http://b:1"))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        running = asyncio.create_task(self.checkups.run())
        try:
            yield
        finally:
            running.cancel()
            await asyncio.wait([running])

    async def look(self) -> None:
        await self.checkups._round()

    async def state(self, backend: Backend) -> BackendState:
        return (await self.room.store.get_backend(backend.id)).state


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.005)


@pytest.fixture
def bench(room: Room) -> Bench:
    return Bench(room)


async def test_a_dead_one_is_found_and_heals(bench: Bench) -> None:
    backend = await bench.backend()
    bench.engine.up = False
    await bench.look()
    seen = await bench.room.store.get_backend(backend.id)
    assert (seen.state, seen.error) == (BackendState.FAILED, "connection refused")
    assert bench.engine.probes == 0, "it is for free while all is well"
    bench.engine.up = True
    await bench.look()
    assert bench.engine.probes == 1
    assert await bench.state(backend) is BackendState.ACTIVE


async def test_one_in_whose_place_another_model_is_served_is_found_and_heals(bench: Bench) -> None:
    backend = await bench.backend()
    bench.engine.serves = "another"
    await bench.look()
    seen = await bench.room.store.get_backend(backend.id)
    assert seen.state is BackendState.FAILED
    assert "does not serve the model" in (seen.error or "")
    assert "another" in (seen.error or "")
    await bench.look()
    assert await bench.state(backend) is BackendState.FAILED
    bench.engine.serves = None
    await bench.look()
    assert await bench.state(backend) is BackendState.ACTIVE


async def test_those_that_hang_hold_up_no_look_at_the_others(bench: Bench) -> None:
    await bench.room.run()
    register = bench.room.core.policies.register
    for number in range(80):
        await register("pol", BackendSpec(url=f"http://hung{number}"))
    last = await register("pol", BackendSpec(url="http://b:1"))
    async with bench.running():
        await until(lambda: bench.checkups.age_s(last.id) is not None)


async def test_a_round_that_is_cut_off_takes_no_place_from_the_next(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollserve.rollouts.checkups._PLACE_S", 3600.0)
    engine = LastOfTheFirst()
    bench = Bench(room, engine=engine, kind=CutOff)
    await room.run()
    for number in range(32):
        await room.core.policies.register("pol", BackendSpec(url=f"http://b{number}"))
    cut = asyncio.create_task(bench.look())
    await until(lambda: engine.looks == 16)
    engine.gate.set()
    with pytest.raises(ExceptionGroup):
        await cut
    engine.looks = 16
    async with bench.running():
        await until(lambda: engine.looks == 32)


async def test_it_looks_at_the_start_and_every_so_often(bench: Bench) -> None:
    await bench.backend()
    async with bench.running():
        await until(lambda: bench.engine.looks == 1 and bench.clock.timers == 1)
        await bench.clock.advance(11)
        assert bench.engine.looks == 1
        await bench.clock.advance(8)
        await until(lambda: bench.engine.looks == 2)


async def test_what_stands_still_is_not_taken_for_dead(bench: Bench) -> None:
    backend = await bench.backend()
    await bench.room.core.policies.set_paused("pol", True)
    bench.engine.up = False
    await bench.look()
    assert await bench.state(backend) is BackendState.ACTIVE
    assert bench.checkups.age_s(backend.id) is None


async def test_one_that_is_at_work_is_not_taken_for_dead(bench: Bench) -> None:
    backend = await bench.backend()
    fleet = bench.room.core._shared.fleet
    await until(lambda: len(fleet.describe()) > 0)
    stats = WorkerStats(at=0.0, stages={}, counters={}, loop_lag_ms_p99=0.0, rss_mb=1.0, cpu_s=0.0)
    bench.engine.up = False
    fleet.heard("w1", msgspec.structs.replace(stats, backends={backend.id: {"in_flight": 2}}))
    await bench.look()
    assert await bench.state(backend) is BackendState.ACTIVE
    fleet.heard("w1", msgspec.structs.replace(stats, backends={backend.id: {"in_flight": 0}}))
    await bench.look()
    assert await bench.state(backend) is BackendState.FAILED


async def test_one_that_drains_is_left_alone(bench: Bench) -> None:
    backend = await bench.backend()
    await bench.room.core.policies.drain("pol", backend.id)
    await bench.look()
    assert (bench.engine.looks, await bench.state(backend)) == (0, BackendState.DRAINING)


async def test_the_age_is_of_the_last_sight_of_it(bench: Bench) -> None:
    backend = await bench.backend()
    assert bench.checkups.age_s(backend.id) is None
    await bench.look()
    await bench.clock.advance(5)
    assert bench.checkups.age_s(backend.id) == 5
    await bench.checkups.report(BackendReport(backend_id=backend.id, ok=False, detail="it said 500"))
    assert (bench.checkups.age_s(backend.id), await bench.state(backend)) == (0, BackendState.FAILED)


async def test_the_state_at_a_glance_has_its_age(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollserve.rollouts.status.Status._FRESH_S", 0.0)
    await room.run()
    backend = await room.core.policies.register("pol", BackendSpec(url="http://b:1"))
    [shown] = (await room.core.status.snapshot()).backends
    assert (shown["state"], shown["age_s"]) == ("active", None)
    await room.core._behind.checkups.report(BackendReport(backend_id=backend.id, ok=False, detail="gone"))
    [shown] = (await room.core.status.snapshot()).backends
    assert (shown["state"], shown["error"]) == ("failed", "gone")
    assert shown["age_s"] < 60
