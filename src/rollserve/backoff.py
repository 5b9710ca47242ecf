"""How long to wait before something is tried again."""

from __future__ import annotations

_MOST_DOUBLINGS = 60


def backoff_s(failures: int, first_s: float, max_s: float, *, jitter: float = 1.0) -> float:
    """``first_s`` after the first failure, doubled with each that follows in a row, ``max_s`` at most.
    ``jitter`` in [0, 1] spreads it over the upper half, so that many who wait do not meet again."""
    wait_s = min(max_s, first_s * 2.0 ** min(failures - 1, _MOST_DOUBLINGS))
    return wait_s * (0.5 + jitter / 2)
