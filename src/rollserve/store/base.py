"""The contracts of durable state: the *store* (facts, one transaction each) and the *payload store*
(calls, log and artifacts of an attempt, in files beside the database).

A method of ``Store`` that returned has been committed. The SQL implementation batches concurrent
writes into one transaction by one writer; a failing write fails alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from rollserve.records.call import Call
from rollserve.records.delivery import Checkpoint, Lease
from rollserve.records.event import Event
from rollserve.records.policy import Backend, Policy
from rollserve.records.rollout import Attempt, Group, Rollout, RolloutState
from rollserve.records.run import Run, RunState
from rollserve.records.task import Task

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


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout taken from the queue: its new epoch is already committed."""

    rollout: Rollout
    attempt_id: str
    task: Task


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an attempt. ``target`` is the rollout's next state: final, or ``QUEUED`` for another
    try not before ``not_before`` (seconds since the epoch); ``counts_as_try`` is False where the
    interruption is not held against it (server restart, worker lost)."""

    attempt: Attempt
    target: RolloutState
    not_before: float = 0.0
    counts_as_try: bool = True


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """What a ``Finish`` led to. ``accepted`` False: fenced by a newer epoch or an ended rollout, or the
    rollout was forgotten (then ``rollout`` is None). A report that comes twice is accepted twice and
    counted once: its payload stays."""

    accepted: bool
    rollout: Rollout | None = None
    group_finished: bool = False


class Store(Protocol):
    # -- life
    async def open(self) -> None:
        """Migrate and start the writer."""

    async def close(self) -> None: ...

    # -- keys
    async def has_admin_key(self) -> bool: ...
    async def put_key(self, *, name: str, digest: str, role: str) -> None: ...
    async def find_key(self, digest: str) -> str | None:
        """The role of the key whose SHA-256 hex digest this is."""

    # -- policies and backends
    async def create_policy(self, policy: Policy) -> None:
        """Raises ``Conflict`` when the name is taken by a policy with another spec; equal: no-op."""

    async def get_policy(self, name: str) -> Policy: ...
    async def list_policies(self) -> list[Policy]: ...
    async def set_policy_version(self, name: str, version: int, label: str) -> Policy:
        """Raises ``VersionRegression`` when lower than now; equal with the same label is a no-op."""

    async def set_policy_paused(self, name: str, paused: bool) -> Policy: ...
    async def put_backend(self, backend: Backend) -> None: ...
    async def get_backend(self, backend_id: str) -> Backend: ...
    async def list_backends(self, policy: str | None = None) -> list[Backend]: ...
    async def delete_backend(self, backend_id: str) -> None: ...

    # -- runs
    async def create_run(self, run: Run) -> None: ...
    async def get_run(self, run_id: str) -> Run: ...
    async def list_runs(self, *, cursor: str | None = None, limit: int = 100) -> Page[Run]: ...
    async def set_run_state(self, run_id: str, state: RunState) -> Run:
        """``CLOSED`` is final, and ends what is queued. Raises ``Conflict``."""

    async def run_counts(self, run_id: str) -> dict[str, int]:
        """Rollouts by state (``queued`` …), groups as ``groups_open``, ``groups_finished``,
        ``groups_undelivered``."""

    async def prune_run(self, run_id: str) -> list[str]:
        """Forget a closed run with all that belongs to it; returns the payloads to delete. Raises
        ``Conflict`` when it is not closed or rollouts are still running."""

    async def list_payloads(self) -> set[str]:
        """The payloads of all attempts, for ``PayloadStore.sweep``."""

    # -- groups and rollouts
    async def submit_groups(self, run_id: str, groups: Sequence[NewGroup]) -> list[Group]:
        """All or none, in order; a group whose key is known returns the group of then. Raises
        ``NotFound``, ``Conflict`` (run closed; or a key used with another body), ``QueueFull``."""

    async def get_group(self, group_id: str) -> Group: ...
    async def list_groups(
        self, run_id: str, *, state: str | None = None, cursor: str | None = None, limit: int = 100
    ) -> Page[Group]: ...
    async def get_rollout(self, rollout_id: str) -> Rollout: ...
    async def list_rollouts(
        self,
        *,
        run_id: str | None = None,
        group_id: str | None = None,
        state: RolloutState | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[Rollout]: ...
    async def list_attempts(self, rollout_id: str) -> list[Attempt]: ...
    async def get_attempt(self, attempt_id: str) -> Attempt: ...

    # -- the scheduler's
    async def start_rollouts(self, now: float, limit: int) -> list[Start]:
        """Take up to ``limit`` queued rollouts that are due, of open runs within their quota of
        running rollouts and whose policy is not paused, in submit order, and start an attempt of
        each (epoch + 1), in one transaction."""

    async def next_due(self, now: float) -> float | None:
        """When the earliest queued rollout with a back-off becomes due; None when there is none."""

    async def finish_attempt(self, finish: Finish) -> Finished:
        """Compare-and-set on the rollout's epoch and state. With a final target, the rollout's end,
        the group's completion and its entry in the delivery log are one transaction. A group enters
        the log also when all its rollouts were cancelled (state ``cancelled``): who waits for it must
        hear. ``QUEUED`` becomes ``CANCELLED`` where the run was closed or the rollout cancelled."""

    async def recover(self, now: float) -> int:
        """At start-up: rollouts left ``RUNNING`` go back to ``QUEUED`` (not counted as a try); the
        attempt's history says why. Returns how many."""

    async def cancel_rollouts(
        self, *, rollout_id: str | None = None, group_id: str | None = None, run_id: str | None = None
    ) -> tuple[list[Rollout], list[Rollout]]:
        """Queued ones end as ``CANCELLED`` here (returned first); running ones are returned second:
        their worker ends them. Finishes groups that have no rollout left."""

    # -- deliveries
    async def lease_groups(
        self, run_id: str, trainer: str, epoch: int | None, *, limit: int, ttl_s: float, now: float
    ) -> Lease | None:
        """The next finished groups that this trainer has neither leased, acked nor committed (an
        expired lease gives back). ``epoch`` None takes the trainer's current one. Raises
        ``StaleEpoch``."""

    async def renew_lease(self, lease_id: str, *, ttl_s: float, now: float) -> Lease: ...
    async def ack_lease(self, lease_id: str, *, now: float) -> Lease:
        """Idempotent; good after its time too, as long as it was not given back. Raises ``LeaseLost``
        when unknown or given back, ``StaleEpoch`` when its trainer was rewound (so do renew, nack)."""

    async def nack_lease(self, lease_id: str) -> None: ...
    async def commit_checkpoint(
        self, run_id: str, trainer: str, epoch: int, *, name: str, cursor: str | None, now: float
    ) -> Checkpoint:
        """All that was acked and not committed is in this checkpoint. Same name again: no-op when
        nothing was acked since, else ``Conflict``."""

    async def rewind(
        self, run_id: str, trainer: str, name: str | None, *, now: float
    ) -> tuple[int, Checkpoint | None]:
        """Redeliver what was leased, acked, or committed after checkpoint ``name`` (None: all), forget
        later checkpoints, set the policy's version back to the checkpoint's (0 for None) and return the
        new trainer epoch, which fences the old trainer."""

    async def trainer_epoch(self, run_id: str, trainer: str) -> int: ...
    async def list_checkpoints(self, run_id: str, trainer: str) -> list[Checkpoint]: ...
    async def expire_leases(self, now: float) -> int:
        """Give back expired leases; returns how many."""

    # -- events
    async def append_events(self, events: Sequence[Event]) -> None:
        """``seq`` of the given events is ignored and assigned here. State changes made by the methods
        above append their own events in their own transaction."""

    async def list_events(
        self, *, after: int, limit: int = 500, run_id: str | None = None
    ) -> list[Event]: ...


class AttemptPayload(msgspec.Struct, kw_only=True):
    """All that was kept of an attempt, in the order it happened."""

    calls: list[Call] = []
    log: list[tuple[float, str]] = []
    artifacts: dict[str, bytes] = {}
    call_rewards: dict[str, float] = {}


class SealedPayload(msgspec.Struct, frozen=True, kw_only=True):
    """``ref`` is the payload's address in its store."""

    ref: str
    size_bytes: int


class Segment(Protocol):
    """The live, append-only record of one attempt. ``append_*`` return once the frame is handed to
    the operating system; a torn last frame is ignored by readers."""

    def append_call(self, call: Call) -> None: ...
    def append_log(self, line: str) -> None: ...
    def append_artifact(self, path: str, data: bytes) -> None: ...
    def append_call_rewards(self, rewards: dict[str, float]) -> None: ...

    async def seal(self) -> SealedPayload:
        """Pack, compress, and make durable; the live file is gone afterwards."""

    def discard(self) -> None:
        """Drop it (a fenced attempt). Idempotent."""


class PayloadStore(Protocol):
    def open_segment(self, run_id: str, attempt_id: str) -> Segment: ...

    async def read(self, ref: str) -> AttemptPayload:
        """Raises ``NotFound`` when it was pruned."""

    async def read_live(self, run_id: str, attempt_id: str) -> AttemptPayload:
        """What a running attempt has recorded so far; empty when nothing."""

    async def delete(self, refs: Sequence[str]) -> None: ...

    async def sweep(self, known: set[str]) -> int:
        """At start-up: remove live segments of dead attempts and sealed payloads not in ``known``;
        returns how many."""
