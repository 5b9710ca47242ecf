"""Does the bound on running calls find what a backend can do, and follow when it becomes another one?

``python bench/adaptive_concurrency.py``

Backends are simulated request by request, in steps of a quarter of a second: what runs samples tokens at a
rate that saturates, each token takes a place of the key-value cache, and when the cache is full the newest
requests lose what they had (a preemption: their prompt and answer are computed again). There is always more
work than the bound lets through. For each backend the best fixed bound comes from a sweep; the adaptive one
starts without knowing anything, and is measured from its start, learning included.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollserve.backend.concurrency import Concurrency, Reading

STEP_S = 0.25
LOOK_S = 2.0


@dataclass(frozen=True)
class Engine:
    """``peak`` tokens a second with infinitely many requests, half of it with ``half``; beyond ``knee``
    requests they get in each other's way. ``cache`` is in tokens (None: never the bound)."""

    name: str
    peak: float
    half: float
    cache: int | None
    knee: float | None = None
    prompt: int = 800
    answer: int = 400

    def rate(self, running: int) -> float:
        rate = self.peak * running / (running + self.half) if running else 0.0
        if self.knee is not None:
            rate /= 1 + (running / self.knee) ** 3
        return rate


ENGINES = (
    Engine("large, much memory", peak=24_000, half=120, cache=1_500_000),
    Engine("small, little memory", peak=2_400, half=12, cache=40_000),
    Engine("CPU, thrashes", peak=600, half=6, cache=None, knee=40, prompt=100, answer=60),
)


@dataclass
class Request:
    prompt: int
    left: float
    made: float = 0.0
    prefill: float = 0.0

    @property
    def held(self) -> float:
        return self.prompt + self.made


@dataclass
class World:
    """One engine under endless demand."""

    engine: Engine
    rng: random.Random
    running: list[Request] = field(default_factory=list)
    tokens: float = 0.0
    preemptions: int = 0

    def step(self, limit: int) -> None:
        while len(self.running) < limit:
            self.running.append(self._arrive())
        work = self.engine.rate(len(self.running)) * STEP_S
        share = work / max(1, len(self.running))
        for request in self.running:
            self._advance(request, share)
        self.running = [request for request in self.running if request.left > 0]
        self._preempt()

    def _arrive(self) -> Request:
        engine = self.engine
        prompt = int(engine.prompt * self.rng.uniform(0.5, 1.5))
        return Request(prompt, engine.answer * self.rng.uniform(0.4, 1.6), prefill=prompt / 20)

    def _advance(self, request: Request, share: float) -> None:
        """Reading a prompt is work, too, at a twentieth of the price a token."""
        read = min(share, request.prefill)
        request.prefill -= read
        made = min(share - read, request.left)
        request.left -= made
        request.made += made
        self.tokens += made

    def _preempt(self) -> None:
        """The newest have to read their context again once there is room."""
        if self.engine.cache is None:
            return
        held = sum(request.held for request in self.running)
        while held > self.engine.cache and len(self.running) > 1:
            request = self.running.pop()
            held -= request.held
            self.preemptions += 1
            self.tokens -= request.made

    @property
    def kv_use(self) -> float | None:
        if self.engine.cache is None:
            return None
        return min(1.0, sum(request.held for request in self.running) / self.engine.cache)


def fixed(engine: Engine, limit: int, seconds: float, seed: int) -> float:
    """Useful tokens a second."""
    world = World(engine, random.Random(seed))
    for _ in range(int(seconds / STEP_S)):
        world.step(limit)
    return world.tokens / seconds


def best_fixed(engine: Engine, seconds: float, seed: int) -> tuple[int, float]:
    limits = sorted({round(1.15**n) for n in range(54)})
    rates = {limit: fixed(engine, limit, seconds, seed) for limit in limits if limit <= 1500}
    best = max(rates, key=lambda limit: rates[limit])
    return best, rates[best]


@dataclass(frozen=True)
class Run:
    rate: float
    late: float
    limit: int
    preemptions: int


def adaptive(engines: Sequence[Engine], seconds: float, seed: int, noise: float = 0.03) -> list[Run]:
    """One machine over several backends, each for ``seconds``; the metrics are noisy."""
    rng = random.Random(seed)
    machine = Concurrency()
    runs = []
    for engine in engines:
        world = World(engine, rng)
        half_tokens, before = 0.0, 0.0
        steps, every = int(seconds / STEP_S), int(LOOK_S / STEP_S)
        most = 0
        for step in range(1, steps + 1):
            world.step(machine.limit)
            most = max(most, len(world.running))
            if step % every == 0:
                made = max(0.0, world.tokens - before) / LOOK_S * rng.gauss(1.0, noise)
                before = world.tokens
                machine.observe(
                    Reading(tokens_per_s=made, kv_use=world.kv_use, preemptions=world.preemptions),
                    most,
                )
                most = len(world.running)
            if step == steps // 2:
                half_tokens = world.tokens
        late = (world.tokens - half_tokens) / (seconds / 2)
        runs.append(Run(world.tokens / seconds, late, machine.limit, world.preemptions))
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    best = {engine.name: best_fixed(engine, 300.0, 0) for engine in ENGINES}
    for seed in range(options.seeds):
        for engine in ENGINES:
            (run,) = adaptive([engine], options.seconds, seed)
            print(json.dumps(_row(seed, engine, run, best[engine.name], "alone")))
        changing = [*ENGINES, *ENGINES[:2]]
        for engine, run in zip(changing, adaptive(changing, options.seconds, seed), strict=True):
            print(json.dumps(_row(seed, engine, run, best[engine.name], "in turn")))


def _row(seed: int, engine: Engine, run: Run, best: tuple[int, float], how: str) -> dict[str, object]:
    return {
        "seed": seed,
        "backend": engine.name,
        "how": how,
        "best_limit": best[0],
        "best_tokens_per_s": round(best[1]),
        "limit": run.limit,
        "of_best": round(run.rate / best[1], 3),
        "of_best_second_half": round(run.late / best[1], 3),
        "preemptions": run.preemptions,
    }


if __name__ == "__main__":
    main()
