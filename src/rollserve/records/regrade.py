"""Re-grading: the stored attempts of a run, graded once more by another grader. What they were graded before
stays as it is; new gradings stand beside it."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from rollserve.records.base import Record
from rollserve.records.rollout import Failure
from rollserve.records.task import GraderSpec


class GradingState(StrEnum):
    """``IMPOSSIBLE``: what the grader would need was not kept; ``note`` says what."""

    QUEUED = "queued"
    RUNNING = "running"
    GRADED = "graded"
    FAILED = "failed"
    IMPOSSIBLE = "impossible"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        return self not in (GradingState.QUEUED, GradingState.RUNNING)


class Regrade(Record):
    """``grader`` on each rollout of the run that had completed, or failed in its grader, by then."""

    id: str
    run_id: str
    grader: GraderSpec
    created_at: float


class Graded(Record):
    """What one grading came to. ``code`` are versions of user code by import path, ``log`` what the grader
    wrote; ``failure`` is set where it failed, ``note`` where it was impossible."""

    state: GradingState
    reward: float | None = None
    call_rewards: dict[str, float] = {}
    detail: dict[str, Any] = {}
    failure: Failure | None = None
    note: str | None = None
    code: dict[str, str] = {}
    log: list[str] = []
    seconds: float = 0.0


class Grading(Record):
    """Of one rollout. ``before`` is the reward that the rollout has; ``tries`` counts those that were
    begun."""

    regrade_id: str
    rollout_id: str
    attempt_id: str
    state: GradingState
    tries: int = 0
    before: float | None = None
    graded: Graded | None = None

    @property
    def reward(self) -> float | None:
        return None if self.graded is None else self.graded.reward
