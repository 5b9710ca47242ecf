"""Where the tokens of rollouts differ from what was sent or consumed: sums by cause."""

from __future__ import annotations

from rollserve.records.base import Record


class DriftCause(Record):
    """``times`` it was met, in ``absorbed`` of them without any effect on the tokens. ``untrainable`` sampled
    tokens are left out because of it, those that stand on such a call included."""

    cause: str
    times: int
    absorbed: int
    untrainable: int


class RolloutDrift(Record):
    """Of a rollout's newest attempt. ``note`` says why it could not be read."""

    rollout_id: str
    attempt_id: str
    calls: int
    sampled: int
    causes: list[DriftCause] = []
    note: str | None = None
