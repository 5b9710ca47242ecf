"""The contract of durable state: the *store* (facts, one transaction each). What attempts recorded is in the
*payload store* (``store.payload``).

A method of ``Store`` that returned has been committed. The SQL implementation batches concurrent
writes into one transaction by one writer; a failing write fails alone. Any method raises ``QueueFull``
or ``Unavailable`` when too many requests wait for the store already, or for too long. Lists come in
pages of up to ``limit``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from rollserve.records.callback import CallbackMessage, CallbackMessageState, CallbackStatus
from rollserve.records.delivery import Checkpoint, Lease
from rollserve.records.evaluation import Outcome
from rollserve.records.event import Event
from rollserve.records.policy import Backend, Policy, TemplateFinding
from rollserve.records.regrade import Graded, Regrade, Regrading, RegradingState
from rollserve.records.rollout import Attempt, Group, Rollout, RolloutState
from rollserve.records.run import Run, RunState, SourceStatus
from rollserve.records.update import Canary, WeightUpdate
from rollserve.store.payload import SealedPayload
from rollserve.store.values import (
    Bin,
    CallbackDue,
    Fed,
    Finish,
    Finished,
    Handed,
    NewGroup,
    Outgoing,
    Page,
    RegradingStart,
    SourceResult,
    Start,
    Stopped,
    Supply,
    TryEnd,
)


class Store(Protocol):
    # -- life
    async def open(self) -> None:
        """Migrate and start the writer."""

    async def close(self) -> None: ...
    async def check_writable(self) -> None:
        """For free while writes succeed. After one that the database refused (a full disk) it tries another,
        until one succeeds. Raises ``Unavailable`` with what the database says."""

    # -- keys
    async def has_admin_key(self) -> bool: ...
    async def put_key(self, *, name: str, digest: str, role: str) -> None: ...
    async def find_key(self, digest: str) -> str | None:
        """The role of the key whose SHA-256 hex digest this is."""

    # -- policies and backends
    async def create_policy(self, policy: Policy) -> None:
        """Raises ``Conflict`` when the name is taken by a policy with another spec; equal: no-op."""

    async def get_policy(self, name: str) -> Policy: ...
    async def list_policies(self, *, cursor: str | None = None, limit: int = 100) -> Page[Policy]:
        """By name."""

    async def set_policy_version(self, name: str, version: int, label: str) -> Policy:
        """Raises ``VersionRegression`` when lower than now, ``Conflict`` while an update is open; equal
        with the same label is a no-op."""

    async def set_policy_paused(self, name: str, paused: bool) -> Policy: ...
    async def set_policy_template(self, name: str, finding: TemplateFinding) -> Policy: ...
    async def set_policy_update(self, name: str, update: WeightUpdate) -> Policy:
        """Begin an update of the weights, or change the one that is known. Raises ``Conflict`` while
        another is open, ``LeaseLost`` when this one is over."""

    async def commit_policy_update(self, name: str, update: WeightUpdate, canary: Canary | None) -> Policy:
        """End the open update; its version and label are the policy's. Raises ``LeaseLost`` when it is
        over, ``StaleEpoch`` when the policy was rewound since, ``VersionRegression``, ``Conflict``."""

    async def set_policy_canary(self, name: str, canary: Canary) -> None: ...
    async def put_backend(self, backend: Backend) -> None: ...
    async def get_backend(self, backend_id: str) -> Backend: ...
    async def list_backends(
        self, policy: str | None = None, *, cursor: str | None = None, limit: int = 100
    ) -> Page[Backend]:
        """In the order of their registration."""

    async def delete_backend(self, backend_id: str) -> None: ...

    # -- runs
    async def create_run(
        self, run: Run, source: SourceStatus | None = None, callback_secret: str | None = None
    ) -> Run:
        """With its task source and the secret of its callback, if it has them. ``base_version`` is set from
        its policy."""

    async def get_run(self, run_id: str) -> Run: ...
    async def list_runs(
        self,
        *,
        state: RunState | None = None,
        newest: bool = False,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[Run]:
        """In the order they were opened, or the ``newest`` first."""

    async def set_run_state(self, run_id: str, state: RunState) -> Run:
        """``CLOSED`` is final, and ends what is queued. Raises ``Conflict``."""

    async def run_counts(self, run_id: str) -> dict[str, int]:
        """Rollouts by state (``queued`` …), groups as ``groups_open``, ``groups_finished``,
        ``groups_undelivered``; ``groups_started`` of the open ones; ``groups_good``, which are worth
        training, since the run was opened or rewound."""

    async def run_bins(self, run_id: str | None) -> dict[str, dict[str, Bin]]:
        """Histograms of a run, or of all together, by kind and bin: ``tokens`` (what became of every
        sampled token: all bins together are what was sampled in attempts that have ended, and of re-gradings,
        whose tries have the bin ``regraded``), ``staleness``
        (rollouts handed over, by versions behind), ``stale_length`` (too old, by episode length),
        ``groups`` (filtered, stopped, carried, …)."""

    async def count_queued(self) -> int:
        """Rollouts that wait to be started, over all runs that are not closed."""

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
    async def group_counts(self, group_id: str) -> dict[str, int]:
        """The group's rollouts by state; every state is there."""

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
    async def list_outcomes(
        self, run_id: str, *, cursor: str | None = None, limit: int = 100
    ) -> Page[list[Outcome]]:
        """Rollouts as an evaluation sees them: a list for each group, in the order of their submission."""

    async def list_attempts(
        self, rollout_id: str, *, cursor: str | None = None, limit: int = 100
    ) -> Page[Attempt]:
        """In the order of their epochs."""

    async def last_attempt(self, rollout_id: str) -> Attempt | None:
        """The newest one, whose epoch is how many there are; None before the first."""

    async def get_attempt(self, attempt_id: str) -> Attempt: ...

    # -- groups that end by rule
    async def end_due_groups(self, now: float) -> Stopped:
        """End open groups past their deadline, as they are; put held ones that have waited long enough
        into the log."""

    async def next_group_due(self) -> float | None:
        """When ``end_due_groups`` has something to do next."""

    async def list_judging(self, limit: int = 100) -> list[tuple[Group, list[float]]]:
        """Groups whose filters are to be asked, with the rewards of their usable rollouts."""

    async def judge_group(self, group_id: str, *, filtered_by: str | None, note: str | None) -> Stopped:
        """Put a group into the log, or leave it out by the rule named. A group that does not wait to be
        judged stays as it is."""

    # -- task sources
    async def list_sources(self) -> list[str]:
        """Runs that are not closed and whose source still runs."""

    async def source(self, run_id: str) -> SourceStatus | None: ...
    async def supply(self, run_id: str) -> Supply: ...
    async def source_results(self, run_id: str, limit: int) -> list[SourceResult]:
        """Of the source's groups that have ended, the ``limit`` newest by place; in the order of places."""

    async def feed(self, run_id: str, fed: Fed) -> bool:
        """Groups and the source's new place in one transaction. False when its place is another."""

    async def stop_source_groups(self, run_id: str) -> Stopped:
        """End the open groups of the source: they are not needed, and enter no log."""

    async def carry_source_groups(self, run_id: str) -> int:
        """Mark the open groups of the source as carried over; how many were not before."""

    # -- the scheduler's
    async def start_rollouts(self, now: float, limit: int) -> list[Start]:
        """Take up to ``limit`` queued rollouts that are due and start an attempt of each (epoch + 1), in
        one transaction: of open runs within their quota of running rollouts and whose policy is not
        paused. Runs of higher rank (priority, then evaluation before training) come first; among equals
        each place goes to the run with the fewest running rollouts. Within a run: submit order. A paced
        run starts no new group that could be too old when its turn comes."""

    async def next_due(self, now: float) -> float | None:
        """When the earliest queued rollout with a back-off becomes due; None when there is none."""

    async def finish_attempt(self, finish: Finish) -> Finished:
        """Compare-and-set on the rollout's epoch and state. With a final target, the rollout's end,
        the group's completion and its entry in the delivery log are one transaction. A group enters
        the log also when all its rollouts were cancelled (state ``cancelled``): who waits for it must
        hear. ``QUEUED`` becomes ``CANCELLED`` where the run was closed or the rollout cancelled."""

    async def list_interrupted(self) -> list[tuple[str, str]]:
        """At start-up, before ``recover``: run and attempt of every rollout left ``RUNNING``."""

    async def recover(self, now: float, payloads: Mapping[str, SealedPayload]) -> int:
        """At start-up: rollouts left ``RUNNING`` go back to ``QUEUED`` (not counted as a try); the
        attempt's history says why, and keeps the payload that ``payloads`` has for its id. Returns how
        many."""

    async def cancel_rollouts(
        self, *, rollout_id: str | None = None, group_id: str | None = None, run_id: str | None = None
    ) -> tuple[list[Rollout], list[Rollout]]:
        """Queued ones end as ``CANCELLED`` here (returned first); running ones are returned second:
        their worker ends them. Finishes groups that have no rollout left."""

    # -- deliveries
    async def lease_groups(
        self,
        run_id: str,
        trainer: str,
        epoch: int | None,
        *,
        limit: int,
        max_tokens: int | None = None,
        ttl_s: float,
        now: float,
    ) -> Lease | None:
        """The next finished groups that this trainer has neither leased, acked nor committed (an
        expired lease gives back): ``limit`` at most, and one at least but no more than sampled
        ``max_tokens`` in usable rollouts. ``epoch`` None takes the trainer's current one. Raises
        ``StaleEpoch``."""

    async def note_lease(self, lease_id: str, handed: Sequence[Handed], withheld: Sequence[str]) -> None:
        """What was found when the lease was filled; it counts once it is acked. Groups ``withheld`` leave
        the lease as too old: they are passed over until a rewind. Raises ``LeaseLost``."""

    async def run_over(self, run_id: str, trainer: str) -> tuple[str, str] | None:
        """Why nothing will come any more (a code, and in words), None while something may: the run is
        closed or its source has ended or failed, no group is open, and this trainer has all."""

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
        later checkpoints, set the policy's version and the place of the run's task source back to the
        checkpoint's (0 for None) and return the new trainer epoch, which fences the old trainer. Tasks
        whose groups were left out since then are taken from the source again."""

    async def trainer_epoch(self, run_id: str, trainer: str) -> int: ...
    async def list_checkpoints(
        self, run_id: str, trainer: str, *, cursor: str | None = None, limit: int = 100
    ) -> Page[Checkpoint]:
        """In the order of their commits."""

    async def expire_leases(self, now: float) -> int:
        """Give back expired leases; returns how many."""

    # -- callbacks
    async def callback_dues(self) -> list[CallbackDue]:
        """Of runs whose callback is active: when the first of their messages is due."""

    async def take_callback_message(self, run_id: str, *, ttl_s: float, now: float) -> Outgoing | None:
        """The run's message that is due first, its group leased for ``ttl_s``, in one transaction. None when
        none is due, or some were found to need no sending."""

    async def end_callback_message(
        self, sent: Outgoing, end: TryEnd, *, now: float
    ) -> CallbackMessageState | None:
        """A try has ended: its lease is acked or given back in the same transaction. What the message is
        now; None when it was sent back meanwhile by a rewind."""

    async def recover_callback_messages(self, now: float) -> int:
        """At start-up: tries that were on their way are made again. Returns how many."""

    async def callback_secret(self, run_id: str) -> str | None: ...
    async def callback_status(self, run_id: str) -> CallbackStatus:
        """Raises ``NotFound`` where the run has none."""

    async def list_callback_messages(
        self,
        run_id: str,
        *,
        state: CallbackMessageState | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[CallbackMessage]:
        """In the order of what they tell of."""

    async def resend_callback_messages(self, run_id: str, ids: Sequence[str] | None, *, now: float) -> int:
        """Dead messages (None: all of the run) are due now, with all their tries; a stopped callback is
        active again. Returns how many."""

    async def count_callback_messages(self) -> dict[str, int]:
        """Messages of all runs that are ``pending``, ``sending`` or ``dead``, and callbacks that are
        ``stopped``."""

    # -- re-grading
    async def create_regrade(self, regrade: Regrade) -> Regrade:
        """With a grading for each rollout of the run that completed, or failed in its grader. The same id
        again returns the regrade of then; raises ``Conflict`` where its grader or routes are others."""

    async def get_regrade(self, regrade_id: str) -> Regrade: ...
    async def list_regrades(
        self, run_id: str, *, cursor: str | None = None, limit: int = 100
    ) -> Page[Regrade]: ...
    async def regrading_counts(self, regrade_id: str) -> dict[str, int]:
        """By state; every state is there."""

    async def list_regradings(
        self,
        regrade_id: str,
        *,
        state: RegradingState | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[Regrading]: ...
    async def regradings_of(self, regrade_id: str, rollout_ids: Sequence[str]) -> dict[str, Regrading]:
        """By rollout; those that the regrade has."""

    async def take_regradings(self, now: float, limit: int) -> list[RegradingStart]:
        """Up to ``limit`` queued gradings that are due; they run then."""

    async def next_regrading_due(self) -> float | None:
        """When the earliest queued one is due; None when none is queued."""

    async def finish_regrading(
        self,
        start: RegradingStart,
        graded: Graded | None,
        *,
        not_before: float = 0.0,
        sampled_tokens: int = 0,
    ) -> bool:
        """The end of a try, in which models of its routes sampled so many tokens; ``graded`` None queues it
        again. False where that try does not run any more."""

    async def list_interrupted_regradings(self) -> list[tuple[str, str]]:
        """Run, and name of the try (``records.regrade.try_name``), of those that ran when the server died."""

    async def recover_regradings(self, sampled_tokens: Mapping[str, int]) -> int:
        """At start-up: those that ran are queued again, that try not counted, but for what was sampled in
        it (by its name). Returns how many."""

    async def cancel_regrade(self, regrade_id: str) -> int:
        """What has not begun is not graded; returns how many."""

    # -- events
    async def list_events(self, *, after: int, limit: int = 500, run_id: str | None = None) -> list[Event]:
        """The methods above append their events in their own transaction."""
