"""A pool over scripted backends in process, on a clock that the test turns."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from rollserve.backend.base import Backend, GenerateRequest, Routed
from rollserve.backend.member import PoolSettings
from rollserve.backend.pool import BackendPool
from rollserve.records import policy
from rollserve.records.policy import BackendInfo, BackendKind, BackendSpec, BackendState
from rollserve.testing.clock import FakeClock
from rollserve.testing.scripted import Fault, ScriptedBackend, ScriptedEngine

Ask = Callable[..., GenerateRequest]


PLAIN: dict[str, Any] = {"slow_start_s": 0.0, "concurrency": "off"}


DOWN = Fault(kind="status", status=503, message="down")


BROKEN = Fault(kind="status", status=500, message="broken")


def record(
    name: str, state: BackendState = BackendState.ACTIVE, url: str | None = None, weight: float = 1.0
) -> policy.Backend:
    return policy.Backend(
        id=name,
        policy="p",
        spec=BackendSpec(url=url or f"http://{name}", kind=BackendKind.SCRIPTED, weight=weight),
        info=BackendInfo(engine="scripted", models=["scripted"]),
        state=state,
    )


class Bench:
    """A pool, its clock, and the engine behind each backend by name."""

    def __init__(self, **settings: Any) -> None:
        self.clock = FakeClock()
        self.engines: dict[str, ScriptedEngine] = {}
        self.backends: dict[str, ScriptedBackend] = {}
        self.reports: list[tuple[str, bool]] = []
        self.pool = BackendPool(
            model="scripted",
            make=self._make,
            settings=PoolSettings(**{**PLAIN, **settings}),
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

    async def begin(self, ask: Ask, many: int, session: str = "s") -> list[asyncio.Task[Routed]]:
        """A call for each of so many sessions; where they go is settled when this returns."""
        calls = [
            asyncio.create_task(self.pool.generate(f"{session}{n}", ask(f"{session}{n}")))
            for n in range(many)
        ]
        await self.clock.settle()
        return calls

    async def let_go(self, calls: list[asyncio.Task[Routed]]) -> list[Routed]:
        """What was held answers, everywhere."""
        for engine in self.engines.values():
            engine.gate.set()
        return await asyncio.gather(*calls)

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
