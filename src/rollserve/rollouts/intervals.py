"""Means over tasks with confidence intervals. Pure.

The unit is the task: rollouts of one task are alike, so an interval from single rollouts would be too
narrow (Miller, "Adding Error Bars to Evals", 2024, arXiv:2411.00640). The spread between the tasks' own
values has both in it, that between tasks and that between rollouts of a task.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rollserve.records.evaluation import Estimate

_NORMAL_FROM = 2000
"""Degrees of freedom from which Student's t is looked up as this many."""


def t_quantile(confidence: float, freedom: int) -> float:
    """The t that a variable of Student's distribution stays within, on both sides, with ``confidence``; by
    bisection on the exact series for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    freedom = min(freedom, _NORMAL_FROM)
    low, high = 0.0, 1.0
    while _within(high, freedom) < confidence:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return (low + high) / 2


def _within(t: float, freedom: int) -> float:
    """The probability of [-t, t]."""
    angle = math.atan2(t, math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = total = (0.0 if freedom == 1 else cosine) if odd else 1.0
    for step in range(2 + odd, freedom - 1, 2):
        term *= cosine * cosine * (step - 1) / step
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def mean_of(values: Sequence[float], confidence: float, *, short: int = 0) -> Estimate:
    """With the interval of Student's t over tasks. None where fewer than two tasks, or none that differ, say
    nothing of the spread."""
    count = len(values)
    if not count:
        return Estimate(value=None, tasks=0, short=short)
    mean, variance = _moments(values)
    if count < 2 or variance == 0:
        return Estimate(value=mean, tasks=count, short=short)
    half = t_quantile(confidence, count - 1) * math.sqrt(variance / count)
    return Estimate(value=mean, low=mean - half, high=mean + half, tasks=count, short=short)


def share_of(values: Sequence[float], confidence: float, *, short: int = 0) -> Estimate:
    """Of values in [0, 1]: Wilson's interval with the effective number of tasks, which keeps to [0, 1] and
    has a width also where all are 0 or 1 (Franco et al., "Comparative Study of Confidence Intervals for
    Proportions in Complex Sample Surveys", 2019). A few tasks that happen to be alike would make it too
    narrow, so the variance is averaged with the largest there could be, which weighs as much as one task."""
    count = len(values)
    if count < 2:
        return mean_of(values, confidence, short=short)
    share, variance = _moments(values)
    inner = (share * count + 1) / (count + 2)
    careful = (variance * (count - 1) + inner * (1 - inner)) / count
    effective = max(float(count), count * share * (1 - share) / careful)
    square = t_quantile(confidence, count - 1) ** 2
    middle = (share + square / (2 * effective)) / (1 + square / effective)
    half = math.sqrt(square * (share * (1 - share) / effective + square / (4 * effective**2)))
    half /= 1 + square / effective
    low, high = max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))
    return Estimate(value=share, low=low, high=high, tasks=count, short=short)


def _moments(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and the variance of a sample (0 of one value)."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return mean, 0.0
    return mean, math.fsum((value - mean) ** 2 for value in values) / (count - 1)


def pass_at(k: int, graded: int, passed: int) -> float:
    """The probability that one of ``k`` of the graded rollouts, drawn without putting back, passed: the
    unbiased estimator of Chen et al., "Evaluating Large Language Models Trained on Code", 2021. ``graded``
    is at least ``k``."""
    if graded - passed < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / left for left in range(graded - passed + 1, graded + 1))
