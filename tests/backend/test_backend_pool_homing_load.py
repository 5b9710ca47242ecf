"""Sessions on simulated engines under a bound that binds: what of their prefixes is read again, who waits."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from rollserve.backend.base import GenerateRequest
from rollserve.backend.homing import MOST_S
from rollserve.backend.line import SENIOR_S
from rollserve.backend.member import PoolSettings
from rollserve.backend.pool import BackendPool
from rollserve.records.call import SamplingParams
from rollserve.testing.clock import FakeClock
from rollserve.testing.engine_model import STEP_S, Machine, SteppedBackend

from .pool_bench import record

SESSIONS, BOUND = 24, 4


@dataclass
class Load:
    """Sessions without an end on two engines; each call's wait and backend are kept."""

    read_cost: float
    cache_tokens: int
    clock: FakeClock = field(default_factory=FakeClock)
    waits: list[float] = field(default_factory=list)
    answered: int = 0

    def __post_init__(self) -> None:
        machine = Machine(peak=2000, half=4, cache_tokens=self.cache_tokens)
        self.engines = {name: SteppedBackend(machine) for name in ("a", "b")}
        settings = PoolSettings(
            slow_start_s=0.0, outlier_ratio=0.0, concurrency=BOUND, read_cost=self.read_cost
        )
        self.pool = BackendPool(
            model="scripted",
            make=lambda spec, _: self.engines[spec.url.removeprefix("http://")],
            settings=settings,
            clock=self.clock,
        )
        self.pool.update([record(name) for name in self.engines])

    async def sit(self, place: int) -> None:
        rng, number = random.Random(place), 0
        while True:
            number += 1
            session_id, ids = f"{place}-{number}", [rng.getrandbits(40) for _ in range(400)]
            for turn in range(rng.randrange(2, 9)):
                sampling = SamplingParams(max_tokens=rng.randrange(20, 80))
                request = GenerateRequest(
                    request_id=f"{session_id}-{turn}", model="scripted", token_ids=ids, sampling=sampling
                )
                began = self.clock.monotonic()
                routed = await self.pool.generate(session_id, request)
                self.waits.append(self.clock.monotonic() - began)
                self.answered += 1
                ids = [*ids, *routed.generation.token_ids]
            self.pool.release(session_id)

    async def run(self, seconds: float) -> None:
        tasks = [asyncio.create_task(self.sit(place)) for place in range(SESSIONS)]
        while self.clock.monotonic() < seconds:
            for engine in self.engines.values():
                engine.simulation.step(STEP_S)
            await self.clock.advance(STEP_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.pool.close()

    @property
    def hits(self) -> float:
        """Share of the tokens of prompts that were not read again."""
        models = [engine.simulation for engine in self.engines.values()]
        return sum(model.hit_tokens for model in models) / sum(model.prompt_tokens for model in models)


@pytest.mark.parametrize("cache_tokens", [32_000, 6_000])
async def test_prefixes_are_kept_under_a_bound_that_binds(cache_tokens: int) -> None:
    """With room in the caches for all sessions, and with room for half of them."""
    homing, without = (Load(read_cost=each, cache_tokens=cache_tokens) for each in (0.1, 0.0))
    await homing.run(15.0)
    await without.run(15.0)
    assert homing.hits > 0.6
    assert homing.hits > without.hits + 0.15
    assert homing.answered > 1.1 * without.answered


async def test_nobody_waits_for_ever() -> None:
    load = Load(read_cost=0.1, cache_tokens=6_000)
    await load.run(60.0)
    assert load.answered > 1000
    assert max(load.waits) < MOST_S + SENIOR_S
    members = load.pool._roster.members
    assert not members
    assert not load.pool._roster.line.waits
