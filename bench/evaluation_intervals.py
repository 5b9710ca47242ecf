"""How often do intervals of pass@k hold the truth, and how wide are they?

``python bench/evaluation_intervals.py``

The chance of each task is drawn from a beta distribution, of which pass@k is known exactly; eight rollouts of
each are drawn from it. Beside the intervals of the service stands the percentile bootstrap over tasks.
"""

from __future__ import annotations

import argparse
import json
import math

import numpy as np
from numpy.typing import NDArray

from rollserve.rollouts.intervals import pass_at, share_of

ROLLOUTS = 8
BETAS = ((0.5, 0.5), (1.0, 1.0), (2.0, 2.0), (1.0, 9.0), (20.0, 1.0))
TASKS = (5, 15, 60, 200)
KS = (1, 4)
RESAMPLES = 400


def bootstrap(values: NDArray[np.float64], random: np.random.Generator) -> tuple[float, float]:
    drawn = values[random.integers(0, len(values), (RESAMPLES, len(values)))].mean(axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(high)


def measure(a: float, b: float, k: int, tasks: int, rounds: int) -> dict[str, float]:
    truth = 1 - math.prod((b + i) / (a + b + i) for i in range(k))
    random = np.random.default_rng(1)
    ours = theirs = width = 0.0
    for _ in range(rounds):
        passed = random.binomial(ROLLOUTS, random.beta(a, b, tasks))
        values = np.array([pass_at(k, ROLLOUTS, int(count)) for count in passed])
        found = share_of(list(values), 0.95)
        assert found.low is not None
        assert found.high is not None
        low, high = bootstrap(values, random)
        ours += found.low <= truth <= found.high
        theirs += low <= truth <= high
        width += found.high - found.low
    return {"held": ours / rounds, "held_bootstrap": theirs / rounds, "width": width / rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rows = [
        {"a": a, "b": b, "k": k, "tasks": tasks, **measure(a, b, k, tasks, asked.rounds)}
        for a, b in BETAS
        for k in KS
        for tasks in TASKS
    ]
    if asked.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print("  ".join(f"{name} {value:.3g}" for name, value in row.items()))
    for name in ("held", "held_bootstrap"):
        print(f"{name}: {min(row[name] for row in rows):.3f} to {max(row[name] for row in rows):.3f}")


if __name__ == "__main__":
    main()
