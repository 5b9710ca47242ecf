"""The store on a SQL database: SQLite, or PostgreSQL through the same statements.

A thin facade: writes go to the one writer (``writer``), reads to a few threads (``readers``) with
snapshots of their own; what they do is in ``ops``, by topic.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import sqlalchemy as sa

from rollserve.errors import Unavailable
from rollserve.records.callback import CallbackMessage, CallbackMessageState, CallbackStatus
from rollserve.records.delivery import Checkpoint, Lease
from rollserve.records.evaluation import Outcome
from rollserve.records.event import Event
from rollserve.records.policy import Backend, Policy, TemplateFinding
from rollserve.records.regrade import Graded, Regrade, Regrading, RegradingState
from rollserve.records.rollout import Attempt, Group, Rollout, RolloutState
from rollserve.records.run import Run, RunState, SourceStatus
from rollserve.records.update import Canary, WeightUpdate
from rollserve.store.engine import Synchronous, make_engine, prepare_file
from rollserve.store.migrate import migrate
from rollserve.store.ops import (
    bins,
    callbacks,
    cancel,
    checkpoints,
    closing,
    deliveries,
    keys,
    outcomes,
    policies,
    regrades,
    rollouts,
    runs,
    sources,
    start,
    trainers,
)
from rollserve.store.ops import events as event_ops
from rollserve.store.ops import finish as finish_ops
from rollserve.store.ops import groups as group_ops
from rollserve.store.ops.tx import Tx
from rollserve.store.payload import SealedPayload
from rollserve.store.readers import READERS, Readers
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
from rollserve.store.writer import Writer

T = TypeVar("T")


class SqlStore:
    """``url`` as SQLAlchemy writes it (``sqlite:////absolute/path.db``). ``keep_events`` bounds the
    event log. ``clock`` gives seconds since the epoch for what carries no time of its own."""

    def __init__(
        self,
        url: str,
        *,
        synchronous: Synchronous = "normal",
        keep_events: int = 200_000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._url = url
        self._synchronous: Synchronous = synchronous
        self._keep_events = keep_events
        self._clock = clock
        self._writing: sa.Engine | None = None
        self._reading: sa.Engine | None = None
        self._writer: Writer | None = None
        self._readers: Readers | None = None
        self._mended = 0
        """How many refusals of the writer are over."""

    # -- life

    async def open(self) -> None:
        """Raises ``ConfigError`` when the database can't be made, reached or migrated."""
        url, synchronous = self._url, self._synchronous
        self._writing = make_engine(url, synchronous=synchronous, writer=True, connections=1)
        self._reading = make_engine(url, synchronous=synchronous, writer=False, connections=READERS)
        await asyncio.to_thread(prepare_file, url)
        await asyncio.to_thread(migrate, self._writing)
        self._readers = Readers()
        self._mended = 0
        self._writer = Writer(self._writing, event_ops.EventLog(self._keep_events), clock=self._clock)
        self._writer.start()

    async def close(self) -> None:
        """Commits what was asked for, then lets the database go. Idempotent."""
        if self._writer is not None:
            await self._writer.close()
        if self._readers is not None:
            await self._readers.close()
        for engine in (self._reading, self._writing):
            if engine is not None:
                await asyncio.to_thread(engine.dispose)
        self._writer = self._readers = self._writing = self._reading = None

    @property
    def write_counts(self) -> tuple[int, int]:
        """Transactions committed, and operations that ran in them."""
        return (0, 0) if self._writer is None else (self._writer.batches, self._writer.operations)

    async def check_writable(self) -> None:
        if self._writer is None:
            raise Unavailable("the store is closed")
        refused = self._writer.refused
        if refused != self._mended:
            await self._write(event_ops.try_write)
            self._mended = refused

    async def _write(self, operation: Callable[[Tx], T]) -> T:
        if self._writer is None:
            raise Unavailable("the store is closed")
        return await self._writer.run(operation)

    async def _read(self, operation: Callable[[sa.Connection], T]) -> T:
        engine, readers = self._reading, self._readers
        if engine is None or readers is None:
            raise Unavailable("the store is closed")

        def snapshot() -> T:
            with engine.connect() as conn:
                return operation(conn)

        return await readers.run(snapshot)

    # -- keys

    async def has_admin_key(self) -> bool:
        return await self._read(keys.has_admin_key)

    async def put_key(self, *, name: str, digest: str, role: str) -> None:
        await self._write(lambda tx: keys.put_key(tx, name, digest, role))

    async def find_key(self, digest: str) -> str | None:
        return await self._read(lambda conn: keys.find_key(conn, digest))

    # -- policies and backends

    async def create_policy(self, policy: Policy) -> None:
        await self._write(lambda tx: policies.create_policy(tx, policy))

    async def get_policy(self, name: str) -> Policy:
        return await self._read(lambda conn: policies.get_policy(conn, name))

    async def list_policies(self, *, cursor: str | None = None, limit: int = 100) -> Page[Policy]:
        return await self._read(lambda conn: policies.list_policies(conn, cursor, limit))

    async def set_policy_version(self, name: str, version: int, label: str) -> Policy:
        return await self._write(lambda tx: policies.set_policy_version(tx, name, version, label))

    async def set_policy_paused(self, name: str, paused: bool) -> Policy:
        return await self._write(lambda tx: policies.set_policy_paused(tx, name, paused))

    async def set_policy_template(self, name: str, finding: TemplateFinding) -> Policy:
        return await self._write(lambda tx: policies.set_policy_template(tx, name, finding))

    async def set_policy_update(self, name: str, update: WeightUpdate) -> Policy:
        return await self._write(lambda tx: policies.set_policy_update(tx, name, update))

    async def commit_policy_update(self, name: str, update: WeightUpdate, canary: Canary | None) -> Policy:
        return await self._write(lambda tx: policies.commit_policy_update(tx, name, update, canary))

    async def set_policy_canary(self, name: str, canary: Canary) -> None:
        await self._write(lambda tx: policies.set_policy_canary(tx, name, canary))

    async def put_backend(self, backend: Backend) -> None:
        await self._write(lambda tx: policies.put_backend(tx, backend))

    async def get_backend(self, backend_id: str) -> Backend:
        return await self._read(lambda conn: policies.get_backend(conn, backend_id))

    async def list_backends(
        self, policy: str | None = None, *, cursor: str | None = None, limit: int = 100
    ) -> Page[Backend]:
        return await self._read(lambda conn: policies.list_backends(conn, policy, cursor, limit))

    async def delete_backend(self, backend_id: str) -> None:
        await self._write(lambda tx: policies.delete_backend(tx, backend_id))

    # -- runs

    async def create_run(
        self, run: Run, source: SourceStatus | None = None, callback_secret: str | None = None
    ) -> Run:
        return await self._write(lambda tx: runs.create_run(tx, run, source, callback_secret))

    async def get_run(self, run_id: str) -> Run:
        return await self._read(lambda conn: runs.get_run(conn, run_id))

    async def list_runs(
        self,
        *,
        state: RunState | None = None,
        newest: bool = False,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[Run]:
        return await self._read(lambda conn: runs.list_runs(conn, cursor, limit, state=state, newest=newest))

    async def set_run_state(self, run_id: str, state: RunState) -> Run:
        """Closing also ends what is queued, in steps; ``recover`` takes up where a crash broke off."""
        run = await self._write(lambda tx: runs.set_run_state(tx, run_id, state))
        while state is RunState.CLOSED and not await self._write(lambda tx: cancel.end_run_step(tx, run_id)):
            continue
        return run

    async def run_counts(self, run_id: str) -> dict[str, int]:
        return await self._read(lambda conn: runs.run_counts_of(conn, run_id))

    async def run_bins(self, run_id: str | None) -> dict[str, dict[str, Bin]]:
        if run_id is None:
            return await self._read(bins.bins_of_all)
        return await self._read(lambda conn: bins.bins_of(conn, run_id))

    async def count_queued(self) -> int:
        return await self._read(runs.count_queued)

    async def prune_run(self, run_id: str) -> list[str]:
        """In steps, each a transaction; sent again after a crash it goes on where it was."""
        payloads: list[str] = []
        done = False
        while not done:
            some, done = await self._write(lambda tx: runs.prune_step(tx, run_id))
            payloads += some
        return payloads

    async def list_payloads(self) -> set[str]:
        return await self._read(runs.list_payloads)

    # -- groups and rollouts

    async def submit_groups(self, run_id: str, groups: Sequence[NewGroup]) -> list[Group]:
        """Encoding the tasks happens beside the writer, so that a large submit holds nobody up."""
        readers = self._readers
        if readers is None:
            raise Unavailable("the store is closed")
        prepared = await readers.run(lambda: group_ops.prepare(groups))
        return await self._write(lambda tx: group_ops.submit(tx, run_id, prepared))

    async def get_group(self, group_id: str) -> Group:
        return await self._read(lambda conn: group_ops.get_group(conn, group_id))

    async def group_counts(self, group_id: str) -> dict[str, int]:
        return await self._read(lambda conn: group_ops.group_counts(conn, group_id))

    async def list_groups(
        self, run_id: str, *, state: str | None = None, cursor: str | None = None, limit: int = 100
    ) -> Page[Group]:
        return await self._read(lambda conn: group_ops.list_groups(conn, run_id, state, cursor, limit))

    async def get_rollout(self, rollout_id: str) -> Rollout:
        return await self._read(lambda conn: rollouts.get_rollout(conn, rollout_id))

    async def list_rollouts(
        self,
        *,
        run_id: str | None = None,
        group_id: str | None = None,
        state: RolloutState | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[Rollout]:
        return await self._read(
            partial(
                rollouts.list_rollouts,
                run_id=run_id,
                group_id=group_id,
                state=state,
                cursor=cursor,
                limit=limit,
            )
        )

    async def list_outcomes(
        self, run_id: str, *, cursor: str | None = None, limit: int = 100
    ) -> Page[list[Outcome]]:
        return await self._read(lambda conn: outcomes.list_outcomes(conn, run_id, cursor, limit))

    async def list_attempts(
        self, rollout_id: str, *, cursor: str | None = None, limit: int = 100
    ) -> Page[Attempt]:
        return await self._read(lambda conn: rollouts.list_attempts(conn, rollout_id, cursor, limit))

    async def last_attempt(self, rollout_id: str) -> Attempt | None:
        return await self._read(lambda conn: rollouts.last_attempt(conn, rollout_id))

    async def get_attempt(self, attempt_id: str) -> Attempt:
        return await self._read(lambda conn: rollouts.get_attempt(conn, attempt_id))

    # -- groups that end by rule

    async def end_due_groups(self, now: float) -> Stopped:
        return await self._steps(lambda tx: closing.end_due(tx, now))

    async def next_group_due(self) -> float | None:
        return await self._read(closing.next_due)

    async def list_judging(self, limit: int = 100) -> list[tuple[Group, list[float]]]:
        return await self._read(lambda conn: sources.list_judging(conn, limit))

    async def judge_group(self, group_id: str, *, filtered_by: str | None, note: str | None) -> Stopped:
        return await self._write(lambda tx: closing.judge(tx, group_id, filtered_by, note))

    async def _steps(self, step: Callable[[Tx], tuple[Stopped, bool]]) -> Stopped:
        """Until the last step, each a transaction; the sum of what they led to."""
        total, last = Stopped(), False
        while not last:
            some, last = await self._write(step)
            total = Stopped(
                finished=dict(Counter(total.finished) + Counter(some.finished)),
                left=total.left + some.left,
                judging=total.judging or some.judging,
                held=total.held or some.held,
                running=total.running + some.running,
            )
        return total

    # -- task sources

    async def list_sources(self) -> list[str]:
        return await self._read(sources.list_sources)

    async def source(self, run_id: str) -> SourceStatus | None:
        return await self._read(lambda conn: sources.get_source(conn, run_id))

    async def supply(self, run_id: str) -> Supply:
        return await self._read(lambda conn: sources.supply(conn, run_id))

    async def source_results(self, run_id: str, limit: int) -> list[SourceResult]:
        return await self._read(lambda conn: sources.results(conn, run_id, limit))

    async def feed(self, run_id: str, fed: Fed) -> bool:
        readers = self._readers
        if readers is None:
            raise Unavailable("the store is closed")
        prepared = await readers.run(lambda: group_ops.prepare(fed.groups))
        return await self._write(lambda tx: sources.feed(tx, run_id, fed, prepared))

    async def stop_source_groups(self, run_id: str) -> Stopped:
        return await self._steps(lambda tx: closing.stop_source(tx, run_id))

    async def carry_source_groups(self, run_id: str) -> int:
        return await self._write(lambda tx: closing.carry_source(tx, run_id))

    # -- the scheduler's

    async def start_rollouts(self, now: float, limit: int) -> list[Start]:
        return await self._write(lambda tx: start.start_rollouts(tx, now, limit))

    async def next_due(self, now: float) -> float | None:
        return await self._read(start.next_due)

    async def finish_attempt(self, finish: Finish) -> Finished:
        return await self._write(lambda tx: finish_ops.finish_attempt(tx, finish))

    async def list_interrupted(self) -> list[tuple[str, str]]:
        return await self._read(finish_ops.list_interrupted)

    async def recover(self, now: float, payloads: Mapping[str, SealedPayload]) -> int:
        return await self._write(lambda tx: finish_ops.recover(tx, now, payloads))

    async def cancel_rollouts(
        self, *, rollout_id: str | None = None, group_id: str | None = None, run_id: str | None = None
    ) -> tuple[list[Rollout], list[Rollout]]:
        """In steps, each a transaction. What is started between two steps is among the running."""
        ended: list[Rollout] = []
        stopped: list[Rollout] = []
        while True:
            some, running, last = await self._write(
                lambda tx: cancel.cancel_step(tx, rollout_id, group_id, run_id)
            )
            ended += some
            stopped += running
            if last:
                return ended, stopped

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
        return await self._write(
            lambda tx: deliveries.lease_groups(
                tx, run_id, trainer, epoch, limit=limit, max_tokens=max_tokens, ttl_s=ttl_s, now=now
            )
        )

    async def note_lease(self, lease_id: str, handed: Sequence[Handed], withheld: Sequence[str]) -> None:
        await self._write(lambda tx: deliveries.note_lease(tx, lease_id, handed, withheld))

    async def run_over(self, run_id: str, trainer: str) -> tuple[str, str] | None:
        return await self._read(lambda conn: deliveries.run_over(conn, run_id, trainer))

    async def renew_lease(self, lease_id: str, *, ttl_s: float, now: float) -> Lease:
        return await self._write(lambda tx: deliveries.renew_lease(tx, lease_id, ttl_s=ttl_s, now=now))

    async def ack_lease(self, lease_id: str, *, now: float) -> Lease:
        return await self._write(lambda tx: deliveries.ack_lease(tx, lease_id))

    async def nack_lease(self, lease_id: str) -> None:
        await self._write(lambda tx: deliveries.nack_lease(tx, lease_id))

    async def commit_checkpoint(
        self, run_id: str, trainer: str, epoch: int, *, name: str, cursor: str | None, now: float
    ) -> Checkpoint:
        return await self._write(
            lambda tx: checkpoints.commit_checkpoint(
                tx, run_id, trainer, epoch, name=name, cursor=cursor, now=now
            )
        )

    async def rewind(
        self, run_id: str, trainer: str, name: str | None, *, now: float
    ) -> tuple[int, Checkpoint | None]:
        return await self._write(lambda tx: checkpoints.rewind(tx, run_id, trainer, name))

    async def trainer_epoch(self, run_id: str, trainer: str) -> int:
        return await self._read(lambda conn: trainers.trainer_epoch(conn, run_id, trainer))

    async def list_checkpoints(
        self, run_id: str, trainer: str, *, cursor: str | None = None, limit: int = 100
    ) -> Page[Checkpoint]:
        return await self._read(
            lambda conn: checkpoints.list_checkpoints(conn, run_id, trainer, cursor, limit)
        )

    async def expire_leases(self, now: float) -> int:
        return await self._write(lambda tx: deliveries.expire_leases(tx, now))

    # -- callbacks

    async def callback_dues(self) -> list[CallbackDue]:
        return await self._read(callbacks.dues)

    async def take_callback_message(self, run_id: str, *, ttl_s: float, now: float) -> Outgoing | None:
        return await self._write(lambda tx: callbacks.take(tx, run_id, ttl_s=ttl_s, now=now))

    async def end_callback_message(
        self, sent: Outgoing, end: TryEnd, *, now: float
    ) -> CallbackMessageState | None:
        return await self._write(lambda tx: callbacks.end(tx, sent, end, now=now))

    async def recover_callback_messages(self, now: float) -> int:
        return await self._write(lambda tx: callbacks.recover(tx, now))

    async def callback_secret(self, run_id: str) -> str | None:
        return await self._read(lambda conn: callbacks.secret(conn, run_id))

    async def callback_status(self, run_id: str) -> CallbackStatus:
        return await self._read(lambda conn: callbacks.status(conn, run_id))

    async def list_callback_messages(
        self,
        run_id: str,
        *,
        state: CallbackMessageState | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[CallbackMessage]:
        return await self._read(lambda conn: callbacks.list_messages(conn, run_id, state, cursor, limit))

    async def resend_callback_messages(self, run_id: str, ids: Sequence[str] | None, *, now: float) -> int:
        return await self._write(lambda tx: callbacks.resend(tx, run_id, ids, now=now))

    async def count_callback_messages(self) -> dict[str, int]:
        return await self._read(callbacks.counts)

    # -- re-grading

    async def create_regrade(self, regrade: Regrade) -> Regrade:
        return await self._write(lambda tx: regrades.create(tx, regrade))

    async def get_regrade(self, regrade_id: str) -> Regrade:
        return await self._read(lambda conn: regrades.get(conn, regrade_id))

    async def list_regrades(
        self, run_id: str, *, cursor: str | None = None, limit: int = 100
    ) -> Page[Regrade]:
        return await self._read(lambda conn: regrades.of_run(conn, run_id, cursor, limit))

    async def regrading_counts(self, regrade_id: str) -> dict[str, int]:
        return await self._read(lambda conn: regrades.counts(conn, regrade_id))

    async def list_regradings(
        self,
        regrade_id: str,
        *,
        state: RegradingState | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[Regrading]:
        return await self._read(lambda conn: regrades.list_regradings(conn, regrade_id, state, cursor, limit))

    async def regradings_of(self, regrade_id: str, rollout_ids: Sequence[str]) -> dict[str, Regrading]:
        return await self._read(lambda conn: regrades.of_rollouts(conn, regrade_id, rollout_ids))

    async def take_regradings(self, now: float, limit: int) -> list[RegradingStart]:
        return await self._write(lambda tx: regrades.take(tx, now, limit))

    async def next_regrading_due(self) -> float | None:
        return await self._read(regrades.next_due)

    async def finish_regrading(
        self,
        start: RegradingStart,
        graded: Graded | None,
        *,
        not_before: float = 0.0,
        sampled_tokens: int = 0,
    ) -> bool:
        return await self._write(lambda tx: regrades.finish(tx, start, graded, not_before, sampled_tokens))

    async def list_interrupted_regradings(self) -> list[tuple[str, str]]:
        return await self._read(regrades.interrupted)

    async def recover_regradings(self, sampled_tokens: Mapping[str, int]) -> int:
        return await self._write(lambda tx: regrades.recover(tx, sampled_tokens))

    async def cancel_regrade(self, regrade_id: str) -> int:
        return await self._write(lambda tx: regrades.cancel(tx, regrade_id))

    # -- events

    async def list_events(self, *, after: int, limit: int = 500, run_id: str | None = None) -> list[Event]:
        return await self._read(lambda conn: event_ops.list_events(conn, after, limit, run_id))
