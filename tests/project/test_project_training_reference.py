"""The simulation that bench/idle_time.py compares with, on loops whose outcome is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollserve.testing.training_reference import Loop, simulate

LOOP = Loop(use="synchronous", groups=4, rollouts=2, slots=4, update_s=3.0)
"""A batch is two rounds of the slots."""


def one() -> float:
    return 1.0


def test_synchronous_is_rollouts_then_step() -> None:
    outcome = simulate(LOOP, one, 5)
    assert outcome.ends_s == (5.0, 10.0, 15.0, 20.0, 25.0)
    assert outcome.waits_s == (2.0,) * 5
    assert outcome.idle(1) == pytest.approx(0.4)


def test_one_step_off_hides_the_shorter_of_both() -> None:
    outcome = simulate(replace(LOOP, use="one-step-off"), one, 5)
    assert outcome.waits_s == (2.0, 0.0, 0.0, 0.0, 0.0)
    slow = simulate(replace(LOOP, use="one-step-off", update_s=0.5), one, 5)
    assert slow.waits_s == (2.0, 1.5, 1.5, 1.5, 1.5)


def test_asynchronous_reaches_what_the_slower_part_allows() -> None:
    loop = replace(LOOP, use="asynchronous", staleness=2, window=2)
    assert simulate(loop, one, 20).rate(5) == pytest.approx(1 / 3)
    assert simulate(replace(loop, update_s=0.5), one, 20).rate(5) == pytest.approx(1 / 2)


def test_without_a_window_nothing_is_begun_during_a_step() -> None:
    loop = replace(LOOP, use="asynchronous", staleness=0, window=0)
    assert simulate(loop, one, 5) == simulate(LOOP, one, 5)


def test_a_group_that_became_too_old_is_thrown_away_and_replaced() -> None:
    times = iter([1.0] * 5 + [50.0] + [1.0] * 10_000)
    loop = replace(LOOP, use="asynchronous", staleness=1, window=1, update_s=1.0)
    outcome = simulate(loop, lambda: next(times), 40)
    assert outcome.thrown == 1
    assert len(outcome.ends_s) == 40
