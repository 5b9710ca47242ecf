"""Cancelling: what is queued ends here, what runs is marked, so that it can't be tried again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from rollserve.errors import InvalidInput
from rollserve.records.rollout import Rollout, RolloutState, Stop
from rollserve.store.ops.closing import Ended, end_rollouts, settle
from rollserve.store.ops.missing import no_such
from rollserve.store.ops.rollouts import rollout_of
from rollserve.store.ops.tx import Tx
from rollserve.store.schema import groups, rollouts, runs

STEP = 2000
"""Rollouts ended in one transaction, so that other writes get their turn in between."""


def cancel_step(
    tx: Tx, rollout_id: str | None, group_id: str | None, run_id: str | None
) -> tuple[list[Rollout], list[Rollout], bool]:
    """Of those that fit all that is given: those ended by this step, those that run (with siblings that
    are not needed without them), and whether that was the last step. Raises ``NotFound``;
    ``InvalidInput`` when nothing is given."""
    wanted: list[sa.ColumnElement[bool]] = []
    for value, column, home in (
        (rollout_id, rollouts.c.id, rollouts.c.id),
        (group_id, rollouts.c.group_id, groups.c.id),
        (run_id, rollouts.c.run_id, runs.c.id),
    ):
        if value is None:
            continue
        if tx.conn.execute(sa.select(home).where(home == value)).first() is None:
            raise no_such(tx.conn, home.table.name[:-1], value)
        wanted.append(column == value)
    if not wanted:
        raise InvalidInput("say which: a rollout, a group or a run")
    ended, stopped = _end_queued(tx, *wanted)
    if len(ended) == STEP:
        return ended, stopped, False
    return ended, [*stopped, *_mark_running(tx, *wanted)], True


def end_run_step(tx: Tx, run_id: str) -> bool:
    """End some of what is queued in a run; whether that was the last step."""
    return len(_end_queued(tx, rollouts.c.run_id == run_id)[0]) < STEP


def _end_queued(tx: Tx, *wanted: sa.ColumnElement[bool]) -> tuple[list[Rollout], list[Rollout]]:
    """End the first queued rollouts that fit, as ``end_cancelled`` does."""
    query = sa.select(rollouts).where(*wanted, rollouts.c.state == RolloutState.QUEUED.value)
    rows = tx.conn.execute(query.order_by(rollouts.c.seq).limit(STEP)).all()
    return end_cancelled(tx, rows)


def end_cancelled(tx: Tx, rows: Sequence[Any]) -> tuple[list[Rollout], list[Rollout]]:
    """End these rollouts (whole rows, queued or running) as cancelled and settle their groups. They come
    back as they are now, and beside them running siblings that ended with their groups."""
    ended = end_rollouts(tx, rows, Stop.CANCELLED)
    stopped: list[Rollout] = []
    for run_id in {row.run_id for row in rows}:
        per_group = Counter(row.group_id for row in rows if row.run_id == run_id)
        ends = {group: Ended(rollouts=many, cancelled=many) for group, many in per_group.items()}
        stopped += settle(tx, run_id, ends).stopped
    return ended, stopped


def _mark_running(tx: Tx, *wanted: sa.ColumnElement[bool]) -> list[Rollout]:
    running = (*wanted, rollouts.c.state == RolloutState.RUNNING.value)
    rows = tx.conn.execute(sa.select(rollouts).where(*running).order_by(rollouts.c.seq)).all()
    if rows:
        tx.conn.execute(sa.update(rollouts).where(*running).values(cancelling=True))
    return [rollout_of(row) for row in rows]
