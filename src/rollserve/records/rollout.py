"""Groups, rollouts and attempts: their states, the one table of allowed moves, the one that moves."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from rollserve.errors import FailureKind, InvalidTransition
from rollserve.records.base import Record
from rollserve.records.task import Task


class RolloutState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        return not MOVES[self]


MOVES: dict[RolloutState, frozenset[RolloutState]] = {
    RolloutState.QUEUED: frozenset({RolloutState.RUNNING, RolloutState.CANCELLED}),
    RolloutState.RUNNING: frozenset(
        {RolloutState.QUEUED, RolloutState.COMPLETED, RolloutState.FAILED, RolloutState.CANCELLED}
    ),
    RolloutState.COMPLETED: frozenset(),
    RolloutState.FAILED: frozenset(),
    RolloutState.CANCELLED: frozenset(),
}
"""``RUNNING → QUEUED`` is the retry of a failed or lost attempt."""


def move(current: RolloutState, target: RolloutState) -> RolloutState:
    """The only way from one state to another. Raises ``InvalidTransition``."""
    if target not in MOVES[current]:
        raise InvalidTransition(f"a rollout can't go from {current.value} to {target.value}")
    return target


class Stage(StrEnum):
    """Where a running attempt is. ``READY`` is the buffer between init and run."""

    INIT = "init"
    READY = "ready"
    RUN = "run"
    GRADE = "grade"
    DONE = "done"


class GroupState(StrEnum):
    OPEN = "open"
    FINISHED = "finished"
    CANCELLED = "cancelled"


class Failure(Record):
    """Why an attempt has no grade; ``operation`` is what was being done (``sandbox.start``)."""

    kind: FailureKind
    code: str
    message: str
    operation: str = ""

    @property
    def retryable(self) -> bool:
        return self.kind in (FailureKind.INFRASTRUCTURE, FailureKind.GRADER)


class Group(Record):
    """``finished_seq`` is its place in the run's log of finished groups."""

    id: str
    run_id: str
    task: Task
    num_rollouts: int
    state: GroupState = GroupState.OPEN
    created_at: float
    finished_at: float | None = None
    finished_seq: int | None = None


class Rollout(Record):
    """``attempts`` counts tries that count against the bound; ``epoch`` every start."""

    id: str
    group_id: str
    run_id: str
    index: int
    state: RolloutState = RolloutState.QUEUED
    epoch: int = 0
    attempts: int = 0
    not_before: float = 0.0
    reward: float | None = None
    truncated_by: str | None = None
    failure: Failure | None = None
    attempt_id: str | None = None
    created_at: float = 0.0
    finished_at: float | None = None


class Attempt(Record):
    """``timings`` are active seconds by stage; ``payload`` says where calls, log and artifacts rest.
    ``counts`` holds turns, sampled_tokens, prompt_tokens. ``code`` are versions of user code by
    import path."""

    id: str
    rollout_id: str
    epoch: int
    worker_id: str | None = None
    started_at: float
    finished_at: float | None = None
    outcome: RolloutState | None = None
    failure: Failure | None = None
    reward: float | None = None
    truncated_by: str | None = None
    timings: dict[str, float] = {}
    counts: dict[str, int] = {}
    code: dict[str, str] = {}
    detail: dict[str, Any] = {}
    payload: str | None = None
    payload_bytes: int = 0
