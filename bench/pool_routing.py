"""What are stickiness, waiting for home and the bound on calls worth to a pool by itself?

``python bench/pool_routing.py [--seeds 3] [--only NAME …] [--json]``, a few seconds a case and seed.

The real pool on a clock that is turned by hand, over three engines that ``rollserve.testing.engine_model``
simulates: what ``bench/ablations.py`` measures with the whole service in real time, without the noise. As
many sessions as are given take turns without an end: each is a prompt of its own that grows by answer and
observation, a few turns or many; then comes the next. Each case is the whole less one setting.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rollserve.backend.base import GenerateRequest
from rollserve.backend.member import PoolSettings
from rollserve.backend.pool import BackendPool
from rollserve.records import policy
from rollserve.records.call import SamplingParams
from rollserve.records.policy import BackendInfo, BackendKind, BackendSpec, BackendState
from rollserve.testing.clock import FakeClock
from rollserve.testing.engine_model import STEP_S, Machine, SteppedBackend

PROMPT_TOKENS, OBSERVED_TOKENS = 600, 30
WARM_UP_S, WINDOW_S = 20.0, 60.0


@dataclass(frozen=True, kw_only=True)
class SetUp:
    """Engines with a cache of so many tokens each, at so many sampled tokens a second at most."""

    cache_tokens: int
    peaks: tuple[float, ...] = (3000, 2000, 1000)
    sessions: int = 48
    think_s: float = 0.0
    concurrency: Any = "auto"


SET_UPS = {
    "ample cache": SetUp(cache_tokens=16_000),
    "tight cache": SetUp(cache_tokens=8_000),
    "fixed bound": SetUp(cache_tokens=16_000, concurrency=12),
    "fixed bound, tools of 0.3 s": SetUp(cache_tokens=16_000, concurrency=6, sessions=24, think_s=0.3),
}
CASES: Mapping[str, Mapping[str, Any]] = {
    "whole": {},
    "no balancing": {"routing": "in_turn"},
    "no stickiness": {"routing": "least_busy"},
    "no waiting for home": {"read_cost": 0.0},
    "no bound": {"concurrency": "off"},
}


@dataclass
class World:
    set_up: SetUp
    settings: Mapping[str, Any]
    seed: int
    clock: FakeClock = field(default_factory=FakeClock)
    episodes: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        machines = [
            Machine(peak=each, half=4, cache_tokens=self.set_up.cache_tokens) for each in self.set_up.peaks
        ]
        self.backends = {str(number): SteppedBackend(machine) for number, machine in enumerate(machines)}
        chosen = {"concurrency": self.set_up.concurrency, **self.settings}
        self.pool = BackendPool(
            model="scripted",
            make=lambda spec, _: self.backends[spec.url.removeprefix("http://")],
            settings=PoolSettings(slow_start_s=0.0, outlier_ratio=0.0, **chosen),
            clock=self.clock,
            rng=random.Random(0),
        )
        self.pool.update([self._record(name) for name in self.backends])

    def _record(self, name: str) -> policy.Backend:
        return policy.Backend(
            id=name,
            policy="p",
            spec=BackendSpec(url=f"http://{name}", kind=BackendKind.SCRIPTED),
            info=BackendInfo(engine="scripted", models=["scripted"]),
            state=BackendState.ACTIVE,
        )

    async def sit(self, place: int) -> None:
        """One session after the other, until cancelled."""
        number = 0
        while True:
            await self._session(f"{place}-{number}")
            number += 1
            self.episodes += 1

    async def _session(self, session_id: str) -> None:
        ids = self._ids(PROMPT_TOKENS)
        for turn in range(min(24, 1 + round(self.rng.lognormvariate(0.9, 0.8)))):
            tokens = 30 + min(160, round(self.rng.lognormvariate(3.4, 0.6)))
            request = GenerateRequest(
                request_id=f"{session_id}-{turn}",
                model="scripted",
                token_ids=ids,
                sampling=SamplingParams(max_tokens=tokens),
            )
            routed = await self.pool.generate(session_id, request)
            ids = [*ids, *routed.generation.token_ids, *self._ids(OBSERVED_TOKENS)]
            if self.set_up.think_s:
                await self.clock.sleep(self.rng.expovariate(1 / self.set_up.think_s))
        self.pool.release(session_id)

    def _ids(self, tokens: int) -> list[int]:
        return [self.rng.getrandbits(40) for _ in range(tokens)]

    async def turn(self, seconds: float) -> None:
        end = self.clock.monotonic() + seconds
        while self.clock.monotonic() < end:
            for backend in self.backends.values():
                backend.simulation.step(STEP_S)
            await self.clock.advance(STEP_S)

    def counted(self) -> tuple[float, float, float, float]:
        models = [backend.simulation for backend in self.backends.values()]
        return (
            sum(model.sampled for model in models),
            sum(model.prompt_tokens for model in models),
            sum(model.hit_tokens for model in models),
            self.episodes,
        )


async def measure(set_up: SetUp, settings: Mapping[str, Any], seed: int) -> dict[str, float]:
    world = World(set_up, settings, seed)
    sessions = [asyncio.create_task(world.sit(place)) for place in range(set_up.sessions)]
    await world.turn(WARM_UP_S)
    before = world.counted()
    await world.turn(WINDOW_S)
    sampled, prompt, hits, episodes = (two - one for one, two in zip(before, world.counted(), strict=True))
    for session in sessions:
        session.cancel()
    await asyncio.gather(*sessions, return_exceptions=True)
    await world.pool.close()
    return {
        "tokens_per_s": sampled / WINDOW_S,
        "episodes_per_s": episodes / WINDOW_S,
        "prefix_hits": hits / max(1.0, prompt),
    }


async def main(options: argparse.Namespace) -> None:
    table: dict[str, dict[str, dict[str, float]]] = {}
    for name, set_up in SET_UPS.items():
        if options.only and name not in options.only:
            continue
        table[name] = {}
        rows = {
            case: [await measure(set_up, settings, seed) for seed in range(options.seeds)]
            for case, settings in CASES.items()
        }
        for case, rounds in rows.items():
            ratios = [
                one["tokens_per_s"] / base["tokens_per_s"]
                for one, base in zip(rounds, rows["whole"], strict=True)
            ]
            row = {each: round(median(one[each] for one in rounds), 3) for each in rounds[0]}
            spread = {"ratio": median(ratios), "ratio_least": min(ratios), "ratio_most": max(ratios)}
            table[name][case] = row | {each: round(value, 3) for each, value in spread.items()}
            if not options.json:
                print(f"{name:28} {case:20} {table[name][case]}", flush=True)
    if options.json:
        print(json.dumps(table))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=list(SET_UPS))
    parser.add_argument("--json", action="store_true")
    asyncio.run(main(parser.parse_args()))
