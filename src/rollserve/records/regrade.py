"""Re-grading: the stored attempts of a run, graded once more by another grader. What they were graded before
stays as it is; new gradings stand beside it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, model_validator

from rollserve.records.base import Name, Record
from rollserve.records.rollout import Failure
from rollserve.records.run import RouteSpec, SamplingSettings
from rollserve.records.task import GraderSpec


class RegradingState(StrEnum):
    """``IMPOSSIBLE``: what the grader would need was not kept; ``note`` says what."""

    QUEUED = "queued"
    RUNNING = "running"
    GRADED = "graded"
    FAILED = "failed"
    IMPOSSIBLE = "impossible"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        return self not in (RegradingState.QUEUED, RegradingState.RUNNING)


def try_name(regrade_id: str, rollout_id: str, tries: int) -> str:
    """Of one try of a grading, among all tries and attempts."""
    return f"{regrade_id}-{rollout_id}-{tries}"


class JudgeRoute(Record):
    """A policy that the grader may ask, by the route's name, under ``sampling`` (None: the run's). A plain
    text stands for the policy."""

    policy: Name
    sampling: SamplingSettings | None = None

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        return {"policy": value} if isinstance(value, str) else value

    def route(self) -> RouteSpec:
        """As a run has it."""
        return RouteSpec(policy=self.policy, sampling=self.sampling, stages=("grade",))


JudgeRoutes = Annotated[dict[Name, JudgeRoute], Field(max_length=16)]


class Regrade(Record):
    """``grader`` on each rollout of the run that had completed, or failed in its grader, by then; it may ask
    ``routes``."""

    id: str
    run_id: str
    grader: GraderSpec
    routes: JudgeRoutes = {}
    created_at: float


class Graded(Record):
    """What one grading came to. ``code`` are versions of user code by import path, ``log`` what the grader
    wrote; ``failure`` is set where it failed, ``note`` where it was impossible."""

    state: RegradingState
    reward: float | None = None
    call_rewards: dict[str, float] = {}
    detail: dict[str, Any] = {}
    failure: Failure | None = None
    note: str | None = None
    code: dict[str, str] = {}
    log: list[str] = []
    seconds: float = 0.0


class Regrading(Record):
    """Of one rollout. ``before`` is the reward that the rollout has; ``tries`` counts those that were
    begun."""

    regrade_id: str
    rollout_id: str
    attempt_id: str
    state: RegradingState
    tries: int = 0
    before: float | None = None
    graded: Graded | None = None

    @property
    def reward(self) -> float | None:
        return None if self.graded is None else self.graded.reward
