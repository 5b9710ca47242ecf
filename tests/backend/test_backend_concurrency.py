"""The bound on running calls: pure, over made-up engines."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from rollserve.backend.concurrency import KV_HIGH, START, Concurrency, Phase, Reading

Rate = Callable[[int], float]


def saturating(peak: float, half: float) -> Rate:
    return lambda running: peak * running / (running + half)


def thrashing(peak: float, half: float, knee: float) -> Rate:
    return lambda running: peak * running / (running + half) / (1 + (running / knee) ** 3)


def drive(
    machine: Concurrency,
    rate: Rate,
    looks: int,
    *,
    cache: int | None = None,
    demand: int = 10**6,
    noise: float = 0.0,
    seed: int = 0,
) -> list[float]:
    """What was sampled at each look. With ``cache`` an engine holds so many requests; beyond, it preempts
    and loses half of its throughput."""
    rng = random.Random(seed)
    preemptions, made = 0, []
    for _ in range(looks):
        running = min(machine.limit, demand)
        over = cache is not None and running > cache
        preemptions += over
        now = rate(min(running, cache) if cache is not None else running) * (0.5 if over else 1.0)
        made.append(now)
        machine.observe(
            Reading(
                tokens_per_s=now * rng.gauss(1.0, noise),
                kv_use=None if cache is None else min(1.0, running / cache),
                preemptions=None if cache is None else preemptions,
            ),
            running,
        )
    return made


def late(made: list[float]) -> float:
    half = made[len(made) // 2 :]
    return sum(half) / len(half)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("rate", "cache", "best"),
    [
        (saturating(20_000, 100), 1200, 20_000 * 1200 / 1300),
        (saturating(2_000, 10), 30, 2_000 * 30 / 40),
        (thrashing(600, 6, 40), None, max(thrashing(600, 6, 40)(n) for n in range(1, 100))),
    ],
    ids=["large", "little memory", "thrashes"],
)
def test_it_finds_what_a_backend_can_do(rate: Rate, cache: int | None, best: float, seed: int) -> None:
    made = drive(Concurrency(), rate, 240, cache=cache, noise=0.03, seed=seed)
    assert late(made) >= 0.9 * best


def test_it_follows_when_the_backend_becomes_another() -> None:
    machine = Concurrency()
    large, small = saturating(20_000, 100), saturating(2_000, 10)
    drive(machine, large, 120, cache=1200, noise=0.02)
    assert machine.limit > 600
    assert late(drive(machine, small, 120, cache=30, noise=0.02)) >= 0.85 * 2_000 * 30 / 40
    assert machine.limit <= 30
    assert late(drive(machine, large, 240, cache=1200, noise=0.02)) >= 0.9 * 20_000 * 1200 / 1300


def test_it_backs_off_before_the_cache_is_full() -> None:
    machine = Concurrency(start=100)
    for _ in range(20):
        machine.observe(Reading(tokens_per_s=100, kv_use=machine.limit / 100), machine.limit)
    assert machine.limit <= KV_HIGH * 100


def test_a_preemption_is_answered_at_once() -> None:
    machine = Concurrency(start=100)
    machine.observe(Reading(tokens_per_s=100, preemptions=7), 100)
    assert machine.limit == 100, "those of before are not ours"
    machine.observe(Reading(tokens_per_s=100, preemptions=9), 100)
    assert machine.limit == 75
    machine.observe(Reading(tokens_per_s=100, preemptions=0), 75)
    assert machine.limit == 75, "the engine has started again"


def test_a_bound_that_is_not_reached_teaches_nothing() -> None:
    machine = Concurrency()
    drive(machine, saturating(1_000, 10), 100, demand=20)
    assert machine.limit == START
    assert machine.phase is Phase.GROW


def test_it_does_not_grow_into_a_cache_that_is_nearly_full() -> None:
    machine = Concurrency(start=50)
    for _ in range(40):
        machine.observe(Reading(tokens_per_s=float(machine.limit), kv_use=0.88), machine.limit)
    assert machine.limit <= 50


def test_limits_hold() -> None:
    machine = Concurrency(start=4, least=2, most=8)
    for count in range(60):
        machine.observe(Reading(tokens_per_s=1, preemptions=count), machine.limit)
    assert machine.limit == 2
    machine = Concurrency(start=4, least=2, most=8)
    drive(machine, lambda running: float(running), 60)
    assert machine.limit == 8


def test_one_request_can_grow_again() -> None:
    machine = Concurrency(start=1)
    drive(machine, lambda running: float(running), 200)
    assert machine.limit > 50


def test_noise_does_not_make_it_wander_off() -> None:
    machine = Concurrency()
    rate = saturating(1_000, 5)
    drive(machine, rate, 100, noise=0.05)
    limits = []
    for _ in range(20):
        drive(machine, rate, 20, noise=0.05, seed=random.Random(3).randrange(100))
        limits.append(machine.limit)
    assert min(limits) > 20


def test_an_engine_that_chokes_is_given_less() -> None:
    machine = Concurrency()
    drive(machine, lambda running: 0.0 if running > 20 else float(running), 120)
    assert machine.limit <= 20
