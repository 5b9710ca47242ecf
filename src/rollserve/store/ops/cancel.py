"""Cancelling: what is queued ends here, what runs is marked, so that it can't be tried again."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from rollserve.errors import InvalidInput, NotFound
from rollserve.records.rollout import Rollout, RolloutState, move
from rollserve.store.ops.groups import Ended, settle
from rollserve.store.ops.rollouts import rollout_of
from rollserve.store.ops.tx import Tx, chunked
from rollserve.store.schema import Queue, groups, rollouts, runs

STEP = 2000
"""Rollouts ended in one transaction, so that other writes get their turn in between."""


def cancel_step(
    tx: Tx, rollout_id: str | None, group_id: str | None, run_id: str | None
) -> tuple[list[Rollout], list[Rollout], bool]:
    """Of those that fit all that is given: those ended by this step, those that run, and whether that
    was the last step. Raises ``NotFound``; ``InvalidInput`` when nothing is given."""
    wanted: list[sa.ColumnElement[bool]] = []
    for value, column, home in (
        (rollout_id, rollouts.c.id, rollouts.c.id),
        (group_id, rollouts.c.group_id, groups.c.id),
        (run_id, rollouts.c.run_id, runs.c.id),
    ):
        if value is None:
            continue
        if tx.conn.execute(sa.select(home).where(home == value)).first() is None:
            raise NotFound(f"no {home.table.name[:-1]} {value!r}")
        wanted.append(column == value)
    if not wanted:
        raise InvalidInput("say which: a rollout, a group or a run")
    ended = _end_queued(tx, *wanted)
    if len(ended) == STEP:
        return ended, [], False
    return ended, _mark_running(tx, *wanted), True


def end_run_step(tx: Tx, run_id: str) -> bool:
    """End some of what is queued in a run; whether that was the last step."""
    return len(_end_queued(tx, rollouts.c.run_id == run_id)) < STEP


def _end_queued(tx: Tx, *wanted: sa.ColumnElement[bool]) -> list[Rollout]:
    """End the first queued rollouts that fit; they are returned as they are now."""
    query = sa.select(rollouts).where(*wanted, rollouts.c.state == RolloutState.QUEUED.value)
    rows = tx.conn.execute(query.order_by(rollouts.c.seq).limit(STEP)).all()
    return end_cancelled(tx, rows)


def end_cancelled(tx: Tx, rows: Sequence[Any]) -> list[Rollout]:
    """End these rollouts (whole rows, queued or running) as cancelled and settle their groups."""
    for some in chunked([row.seq for row in rows]):
        tx.conn.execute(
            sa.update(rollouts)
            .where(rollouts.c.seq.in_(some))
            .values(state=RolloutState.CANCELLED.value, queue=Queue.NONE.value, finished_at=tx.now)
        )
    by_run: dict[str, list[Any]] = defaultdict(list)
    for row in rows:
        move(RolloutState(row.state), RolloutState.CANCELLED)
        by_run[row.run_id].append(row)
        tx.emit("rollout.cancelled", run_id=row.run_id, group_id=row.group_id, rollout_id=row.id)
    for run_id, theirs in by_run.items():
        left = Counter(row.state for row in theirs)
        tx.count(
            run_id,
            queued=-left[RolloutState.QUEUED.value],
            running=-left[RolloutState.RUNNING.value],
            cancelled=len(theirs),
        )
        per_group = Counter(row.group_id for row in theirs)
        settle(tx, run_id, {group_id: Ended(count, count) for group_id, count in per_group.items()})
    update = {"state": RolloutState.CANCELLED, "finished_at": tx.now}
    return [rollout_of(row).model_copy(update=update) for row in rows]


def _mark_running(tx: Tx, *wanted: sa.ColumnElement[bool]) -> list[Rollout]:
    running = (*wanted, rollouts.c.state == RolloutState.RUNNING.value)
    rows = tx.conn.execute(sa.select(rollouts).where(*running).order_by(rollouts.c.seq)).all()
    if rows:
        tx.conn.execute(sa.update(rollouts).where(*running).values(cancelling=True))
    return [rollout_of(row) for row in rows]
