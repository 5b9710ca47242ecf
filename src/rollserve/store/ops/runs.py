"""Runs: their states, their counters, and their pruning."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from rollserve.errors import Conflict
from rollserve.records.run import Run, RunSpec, RunState, SourceStatus
from rollserve.store.ops import outbox, regrades
from rollserve.store.ops.missing import no_policy, no_such
from rollserve.store.ops.pages import page
from rollserve.store.ops.tx import Tx
from rollserve.store.schema import (
    COUNTERS,
    attempts,
    callback_messages,
    callbacks,
    checkpoints,
    deliveries,
    events,
    groups,
    leases,
    policies,
    rollouts,
    run_bins,
    run_counts,
    runs,
    sources,
    trainers,
)
from rollserve.store.values import Page

PRUNE_STEP = 2000
"""Rows forgotten in one transaction, so that other writes get their turn in between."""


def _run(row: Any) -> Run:
    return Run(
        id=row.id,
        spec=RunSpec.model_validate_json(row.spec),
        state=row.state,
        created_at=row.created_at,
        base_version=row.base_version,
    )


def get_run(conn: sa.Connection, run_id: str) -> Run:
    row = conn.execute(sa.select(runs).where(runs.c.id == run_id)).one_or_none()
    if row is None:
        raise no_such(conn, "run", run_id)
    return _run(row)


def list_runs(
    conn: sa.Connection, cursor: str | None, limit: int, *, state: RunState | None, newest: bool
) -> Page[Run]:
    query = sa.select(runs) if state is None else sa.select(runs).where(runs.c.state == state.value)
    return page(conn, query, runs.c.seq, _run, cursor=cursor, limit=limit, newest=newest)


def create_run(tx: Tx, run: Run, source: SourceStatus | None, callback_secret: str | None) -> Run:
    """Raises ``NotFound`` without its policy, ``Conflict`` when the id is taken."""
    spec = run.spec
    asked = sa.select(policies.c.version).where(policies.c.name == spec.policy)
    version = tx.conn.execute(asked).scalar_one_or_none()
    if version is None:
        raise no_policy(tx.conn, spec.policy)
    if tx.conn.execute(sa.select(runs.c.id).where(runs.c.id == run.id)).first() is not None:
        raise Conflict(f"run {run.id!r} exists", field="id")
    ahead, per_version = _pace(spec)
    tx.conn.execute(
        sa.insert(runs).values(
            id=run.id,
            policy=spec.policy,
            state=run.state.value,
            spec=spec.model_dump_json(),
            max_running=spec.quota.max_running_rollouts,
            created_at=run.created_at,
            rank=2 * spec.priority + (spec.purpose == "evaluation"),
            base_version=version,
            ahead_groups=ahead,
            per_version=per_version,
            judged=bool(spec.filters),
            hold_s=spec.delivery.max_wait_s if spec.delivery.order == "submit" else None,
        )
    )
    tx.conn.execute(sa.insert(run_counts).values(run_id=run.id, **dict.fromkeys(COUNTERS, 0)))
    if source is not None:
        tx.conn.execute(sa.insert(sources).values(run_id=run.id, **source.model_dump(mode="json")))
    if spec.callback is not None and callback_secret is not None:
        outbox.create(tx, run.id, spec.callback, callback_secret)
    tx.emit("run.opened", policy=spec.policy, run_id=run.id, data={"name": spec.name})
    return run.model_copy(update={"base_version": version})


def _pace(spec: RunSpec) -> tuple[int | None, int | None]:
    """How many groups may have been started, at the first version and for each one after it: a group is
    handed over when those before it have been, ``groups_per_version`` at a version."""
    most, source = spec.staleness.max_staleness, spec.source
    per_version = spec.staleness.groups_per_version or (source.target_groups if source else None)
    if most is None or per_version is None:
        return None, None
    return (most + 1) * per_version + (source.extra_groups if source else 0), per_version


def set_run_state(tx: Tx, run_id: str, state: RunState) -> Run:
    """What is queued in a run that is closed must be ended next (``cancel.end_run_step``): it would
    never be started."""
    run = get_run(tx.conn, run_id)
    if run.state is state:
        return run
    if run.state is RunState.CLOSED:
        raise Conflict(f"run {run_id!r} is closed", field="state")
    tx.conn.execute(sa.update(runs).where(runs.c.id == run_id).values(state=state.value))
    verb = {RunState.OPEN: "resumed", RunState.PAUSED: "paused", RunState.CLOSED: "closed"}[state]
    tx.emit(f"run.{verb}", policy=run.spec.policy, run_id=run_id)
    outbox.tell(tx, run_id, f"run.{verb}", {"name": run.spec.name})
    return run.model_copy(update={"state": state})


def run_counts_of(conn: sa.Connection, run_id: str) -> dict[str, int]:
    row = conn.execute(sa.select(run_counts).where(run_counts.c.run_id == run_id)).one_or_none()
    if row is None:
        raise no_such(conn, "run", run_id)
    return {name: getattr(row, name) for name in COUNTERS}


def count_queued(conn: sa.Connection) -> int:
    query = (
        sa.select(sa.func.coalesce(sa.func.sum(run_counts.c.queued), 0))
        .join_from(run_counts, runs, runs.c.id == run_counts.c.run_id)
        .where(runs.c.state != RunState.CLOSED.value)
    )
    return int(conn.execute(query).scalar_one())


def prunable(conn: sa.Connection, run_id: str) -> None:
    """Raises ``Conflict`` when the run is not closed or has rollouts that have not ended."""
    if get_run(conn, run_id).state is not RunState.CLOSED:
        raise Conflict(f"run {run_id!r} is not closed", field="run_id", hint="close it first")
    counts = run_counts_of(conn, run_id)
    if alive := counts["running"] + counts["queued"]:
        raise Conflict(f"{alive} rollouts of run {run_id!r} have not ended", field="run_id")


def prune_step(tx: Tx, run_id: str) -> tuple[list[str], bool]:
    """Forget some of a closed run's rows: the payloads that went with them, and whether all is gone.

    A run that is half forgotten after a crash is still there, and pruning it again ends the work; the
    payloads of rows forgotten before the crash go with the next ``PayloadStore.sweep``.
    """
    prunable(tx.conn, run_id)
    if regrades.forget(tx, run_id, PRUNE_STEP):
        return [], False
    payloads = _forget(tx, attempts, run_id, attempts.c.payload)
    if payloads is not None:
        return [item for item in payloads if item], False
    for table in (rollouts, groups, events, callback_messages):
        if _forget(tx, table, run_id) is not None:
            return [], False
    for small in (deliveries, leases, checkpoints, trainers, run_counts, run_bins, sources, callbacks):
        tx.conn.execute(sa.delete(small).where(small.c.run_id == run_id))
    tx.conn.execute(sa.delete(runs).where(runs.c.id == run_id))
    tx.emit("run.pruned", data={"run_id": run_id})
    return [], True


def _forget(tx: Tx, table: sa.Table, run_id: str, column: sa.Column[Any] | None = None) -> list[Any] | None:
    """Delete the first rows of the run; their ``column``, or None when there was no row."""
    wanted = table.c.seq if column is None else column
    query = sa.select(table.c.seq, wanted).where(table.c.run_id == run_id).order_by(table.c.seq)
    rows = tx.conn.execute(query.limit(PRUNE_STEP)).all()
    if not rows:
        return None
    tx.conn.execute(sa.delete(table).where(table.c.run_id == run_id, table.c.seq <= rows[-1][0]))
    return [row[1] for row in rows]


def list_payloads(conn: sa.Connection) -> set[str]:
    return set(conn.execute(sa.select(attempts.c.payload).where(attempts.c.payload.is_not(None))).scalars())
