"""Groups, rollouts and attempts: their states, the one table of allowed moves, the one that moves."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from rollserve.errors import FailureKind, InvalidTransition, ProgramMissing
from rollserve.records.base import Record
from rollserve.records.control import GroupRule
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
    """``JUDGING``: its rollouts have ended and the run's filters are asked. ``HELD``: waits for earlier
    groups. ``FAILED``: fewer usable rollouts than its rule wants. ``FILTERED`` groups are in no log."""

    OPEN = "open"
    JUDGING = "judging"
    HELD = "held"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    FILTERED = "filtered"


class Failure(Record):
    """Why an attempt has no grade; ``operation`` is what was being done (``sandbox.start``)."""

    kind: FailureKind
    code: str
    message: str
    operation: str = ""

    @property
    def retryable(self) -> bool:
        """Not where another try would meet the same."""
        return (
            self.kind in (FailureKind.INFRASTRUCTURE, FailureKind.GRADER) and self.code != ProgramMissing.code
        )


class Stop(StrEnum):
    """Why a rollout was ended before its time: the code of its failure."""

    CANCELLED = "cancelled"
    REDUNDANT = "redundant"
    STRAGGLER = "straggler"
    DEADLINE = "deadline"
    HOPELESS = "hopeless"


class Group(Record):
    """``num_rollouts`` were asked for, ``total`` were made (the oversampled ones included), ``usable``
    have a reward so far. ``deadline_at`` is set once it has started. ``finished_seq`` is its place in the
    run's log of finished groups. ``filtered_by`` names the rule that left it out; ``note`` says what else
    there is to say (a filter that raised, why it was stopped). ``source_seq`` is its task's place in the
    run's source."""

    id: str
    run_id: str
    task: Task
    num_rollouts: int
    rule: GroupRule = GroupRule()
    total: int = 0
    usable: int = 0
    state: GroupState = GroupState.OPEN
    created_at: float
    started_at: float | None = None
    deadline_at: float | None = None
    finished_at: float | None = None
    finished_seq: int | None = None
    filtered_by: str | None = None
    note: str | None = None
    source_seq: int | None = None


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
