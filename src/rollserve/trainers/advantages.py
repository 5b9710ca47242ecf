"""Group-relative advantages, and which groups are worth a gradient. Pure; no torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def group_advantages(
    rewards: Sequence[float | None], *, scale: bool = True, epsilon: float = 1e-6
) -> list[float | None] | None:
    """The advantage of each rollout of a group: its reward less the group's mean, divided by the
    group's standard deviation when ``scale`` (GRPO, Shao et al. 2024, arXiv:2402.03300; without the
    division: Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).

    A rollout without a reward (None) has no advantage and no part in the statistics. Returns None
    when there is nothing to learn: fewer than two graded rollouts, or all graded alike.
    """
    graded = np.array([r for r in rewards if r is not None], dtype=np.float64)
    if graded.size < 2 or float(graded.max() - graded.min()) < epsilon:
        return None
    mean = float(graded.mean())
    spread = float(graded.std()) + epsilon if scale else 1.0
    return [None if r is None else (r - mean) / spread for r in rewards]
