"""Estimates against references that share no code with them, and against simulation."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollserve.records.evaluation import Estimate
from rollserve.rollouts.intervals import mean_of, pass_at, share_of, t_quantile

ROUNDS = 2000


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_all_draws_that_hold_a_pass(sizes: tuple[int, int, int]) -> None:
    graded, passed, k = sizes
    draws = list(combinations([True] * passed + [False] * (graded - passed), k))
    assert pass_at(k, graded, passed) == pytest.approx(sum(map(any, draws)) / len(draws))


@given(st.integers(1, 2000), st.floats(0, 1), st.integers(1, 2000))
def test_pass_at_k_is_that_of_binomials_and_grows_with_k(graded: int, share: float, k: int) -> None:
    passed, k = round(share * graded), min(k, graded)
    exact = 1 - math.comb(graded - passed, k) / math.comb(graded, k)
    assert pass_at(k, graded, passed) == pytest.approx(exact, abs=1e-9)
    assert k == graded or pass_at(k + 1, graded, passed) >= pass_at(k, graded, passed) - 1e-12


def test_pass_at_k_is_unbiased() -> None:
    random = np.random.default_rng(3)
    found = [pass_at(4, 10, int(c)) for c in random.binomial(10, 0.2, 40_000)]
    assert np.mean(found) == pytest.approx(1 - 0.8**4, abs=0.005)


@pytest.mark.parametrize(
    ("confidence", "freedom", "wanted"),
    [
        (0.95, 1, 12.7062),
        (0.95, 2, 4.3027),
        (0.95, 3, 3.1824),
        (0.95, 4, 2.7764),
        (0.99, 9, 3.2498),
        (0.95, 10, 2.2281),
        (0.9, 29, 1.6991),
        (0.95, 120, 1.9799),
        (0.95, 10**6, 1.961),
    ],
)
def test_students_t_is_that_of_the_tables(confidence: float, freedom: int, wanted: float) -> None:
    assert t_quantile(confidence, freedom) == pytest.approx(wanted, abs=2e-4)


def _holds(estimate: Estimate, truth: float) -> bool:
    return estimate.low is not None and estimate.high is not None and estimate.low <= truth <= estimate.high


@pytest.mark.parametrize("tasks", [10, 40])
def test_an_interval_of_mean_rewards_holds_the_truth_as_often_as_it_says(tasks: int) -> None:
    """Tasks differ, and rollouts of one are alike: intervals from single rollouts would be too narrow."""
    random = np.random.default_rng(5)
    held = naive = 0
    for _ in range(ROUNDS):
        rewards = random.normal(0.3, 1.0, (tasks, 1)) + random.normal(0, 0.5, (tasks, 8))
        held += _holds(mean_of(list(rewards.mean(axis=1)), 0.95), 0.3)
        naive += _holds(mean_of(list(rewards.ravel()), 0.95), 0.3)
    assert 0.935 <= held / ROUNDS <= 0.965
    assert naive / ROUNDS < 0.75


@pytest.mark.parametrize(("a", "b"), [(0.5, 0.5), (2.0, 2.0), (1.0, 9.0), (20.0, 1.0)])
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("tasks", [5, 15, 60])
def test_an_interval_of_pass_at_k_holds_the_truth(a: float, b: float, k: int, tasks: int) -> None:
    """The chance of each task is drawn from a beta distribution, of which pass@k is known."""
    truth = 1 - math.prod((b + i) / (a + b + i) for i in range(k))
    random = np.random.default_rng(7)
    held = 0
    for _ in range(ROUNDS // 4):
        passed = random.binomial(8, random.beta(a, b, tasks))
        held += _holds(share_of([pass_at(k, 8, int(c)) for c in passed], 0.95), truth)
    assert held / (ROUNDS // 4) >= 0.925


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30), st.floats(0.5, 0.99))
def test_an_interval_of_shares_keeps_to_them_and_holds_its_value(
    values: list[float], confidence: float
) -> None:
    found = share_of(values, confidence)
    assert found.low is not None
    assert found.high is not None
    assert found.value is not None
    assert 0 <= found.low <= found.value + 1e-9
    assert found.value - 1e-9 <= found.high <= 1
    assert found.high > found.low


def test_what_says_nothing_of_the_spread_has_no_interval() -> None:
    assert mean_of([], 0.95) == Estimate(value=None, tasks=0)
    assert mean_of([0.5], 0.95) == Estimate(value=0.5, tasks=1)
    assert mean_of([0.5, 0.5], 0.95, short=3) == Estimate(value=0.5, tasks=2, short=3)
    assert share_of([1.0], 0.95) == Estimate(value=1.0, tasks=1)


def test_all_passed_is_not_certainty() -> None:
    few, many = share_of([1.0] * 5, 0.95), share_of([1.0] * 500, 0.95)
    assert few.low is not None
    assert many.low is not None
    assert (few.high, many.high) == (1.0, 1.0)
    assert few.low < 0.6
    assert many.low > 0.98
