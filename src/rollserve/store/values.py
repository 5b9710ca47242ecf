"""What goes into the store and comes out of it, where that is none of the records."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec
from pydantic import SecretStr

from rollserve.records.callback import CallbackMessageState
from rollserve.records.control import GroupRule
from rollserve.records.delivery import Lease
from rollserve.records.regrade import JudgeRoute, try_name
from rollserve.records.rollout import Attempt, Rollout, RolloutState
from rollserve.records.run import SourceState, SourceStatus
from rollserve.records.task import GraderSpec, Task

T = TypeVar("T")


class Page(msgspec.Struct, Generic[T], frozen=True):
    """``next`` is the cursor of the page after this one, None on the last."""

    items: list[T]
    next: str | None = None


class NewGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group to be submitted; ``key`` is its idempotency key (unique per run). ``request_size`` is how
    many groups were submitted with it: the key stands for a request of that size."""

    task: Task
    num_rollouts: int
    key: str | None = None
    request_size: int = 1
    rule: GroupRule = GroupRule()
    source_seq: int | None = None


class Bin(msgspec.Struct, frozen=True, kw_only=True):
    """``count`` of attempts, rollouts or groups, with what they sampled."""

    count: int
    tokens: int = 0


class Stopped(msgspec.Struct, frozen=True, kw_only=True):
    """What the end of groups led to: groups that entered the log by run, how many ended without a place
    there (``left``), whether one waits to be judged, or for earlier ones (``held``), and rollouts that ended
    while they ran: their workers are to be told."""

    finished: dict[str, int] = {}
    left: int = 0
    judging: bool = False
    held: bool = False
    running: list[Rollout] = []


class Handed(msgspec.Struct, frozen=True, kw_only=True):
    """What a delivery found out of an attempt in it: how many versions its oldest trained token is
    behind, whether its samples were left out for that, and how many of its sampled tokens are ``trained``,
    or would be if they were not too old (``masked``)."""

    attempt_id: str
    staleness: int | None = None
    dropped: bool = False
    trained: int = 0
    masked: int = 0


class Fed(msgspec.Struct, frozen=True, kw_only=True):
    """A step of a run's task source, from ``position`` to ``next``: ``groups`` (those whose place has a
    group already are not made again), ``broken`` lines that were skipped, and its state then."""

    position: int
    next: int
    groups: list[NewGroup]
    broken: list[str] = []
    state: SourceState = SourceState.RUNNING
    detail: str = ""


class SourceResult(msgspec.Struct, frozen=True, kw_only=True):
    """A group of a source that has ended: its place there, and what its usable rollouts earned."""

    place: int
    metadata: dict[str, Any]
    rewards: list[float]
    state: str
    filtered_by: str | None = None


class Supply(msgspec.Struct, frozen=True, kw_only=True):
    """What decides on how many groups a source has to give: ``good`` groups (in the log and worth
    training) since ``base_version``, and the policy's ``version``."""

    source: SourceStatus
    version: int
    base_version: int
    open: int
    undelivered: int
    good: int


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout taken from the queue: its new epoch is already committed."""

    rollout: Rollout
    attempt_id: str
    task: Task
    rule: GroupRule = GroupRule()


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an attempt. ``target`` is the rollout's next state: final, or ``QUEUED`` for another
    try not before ``not_before`` (seconds since the epoch); ``counts_as_try`` is False where the
    interruption is not held against it (server restart, worker lost)."""

    attempt: Attempt
    target: RolloutState
    not_before: float = 0.0
    counts_as_try: bool = True


class RegradingStart(msgspec.Struct, frozen=True, kw_only=True):
    """A grading taken from the queue: of ``attempt``, which did ``task``, by ``grader``, which may ask
    ``routes``."""

    regrade_id: str
    run_id: str
    rollout_id: str
    tries: int
    grader: GraderSpec
    routes: dict[str, JudgeRoute]
    attempt: Attempt
    task: Task

    @property
    def owner(self) -> str:
        return try_name(self.regrade_id, self.rollout_id, self.tries)


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """What a ``Finish`` led to. ``accepted`` False: fenced by a newer epoch or an ended rollout, or the
    rollout was forgotten (then ``rollout`` is None). A report that comes twice is accepted twice and
    counted once: its payload stays."""

    accepted: bool
    rollout: Rollout | None = None
    group_finished: bool = False
    others: Stopped = Stopped()


class CallbackDue(msgspec.Struct, frozen=True, kw_only=True):
    """A run whose callback is to be sent something, and when (seconds since the epoch)."""

    run_id: str
    url: str
    due_at: float


class Outgoing(msgspec.Struct, frozen=True, kw_only=True):
    """A callback's message on its way: its try is committed. ``message_id`` is what the receiver is told, the
    same for every try until its trainer is rewound. ``lease`` is of its group, None where it has none."""

    seq: int
    message_id: str
    run_id: str
    type: str
    url: str
    secret: SecretStr
    data: dict[str, Any]
    lease: Lease | None
    tries: int
    created_at: float


class TryEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a try ended. ``PENDING``: another one is due at ``due_at``. ``stop``: the receiver wants nothing
    any more."""

    state: CallbackMessageState
    due_at: float = 0.0
    status: int | None = None
    error: str | None = None
    stop: bool = False
