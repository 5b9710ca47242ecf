"""Gradings of stored attempts: beside what the attempts themselves came to, which is never changed.

A grading moves ``queued → running → final`` or back to ``queued``; its end is taken from the try it belongs
to only, so that one whose worker was given up can't end it twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from rollserve.errors import Conflict
from rollserve.records.regrade import Graded, Grading, GradingState, Regrade
from rollserve.records.rollout import Attempt, RolloutState
from rollserve.records.task import GraderSpec, Task
from rollserve.store.base import GradingStart, Page
from rollserve.store.ops.missing import no_such
from rollserve.store.ops.pages import page
from rollserve.store.ops.tx import Tx, chunked
from rollserve.store.schema import attempts, gradings, groups, regrades, rollouts

_QUEUED, _RUNNING = GradingState.QUEUED.value, GradingState.RUNNING.value
_GRADER_FAILED = '%"kind":"grader"%'
"""In a rollout's failure: the agent had done its part."""


def create(tx: Tx, regrade: Regrade) -> Regrade:
    """With a grading for each rollout that has something to grade. The same id again is the same regrade;
    raises ``Conflict`` where it has another grader."""
    known = tx.conn.execute(sa.select(regrades).where(regrades.c.id == regrade.id)).one_or_none()
    if known is not None:
        if _regrade(known).grader != regrade.grader or known.run_id != regrade.run_id:
            raise Conflict("this key began a regrade with another grader", field="Idempotency-Key")
        return _regrade(known)
    tx.conn.execute(
        sa.insert(regrades).values(
            id=regrade.id,
            run_id=regrade.run_id,
            grader=regrade.grader.model_dump_json(),
            created_at=regrade.created_at,
        )
    )
    lit = sa.literal
    chosen = (
        sa.select(
            lit(regrade.id), rollouts.c.run_id, rollouts.c.id, rollouts.c.attempt_id,
            lit(_QUEUED), lit(0), lit(0.0), rollouts.c.reward,
        )
        .where(rollouts.c.run_id == regrade.run_id, rollouts.c.attempt_id.is_not(None), _gradable())
        .order_by(rollouts.c.seq)
    )  # fmt: skip
    names = ["regrade_id", "run_id", "rollout_id", "attempt_id", "state", "tries", "not_before", "before"]
    many = tx.conn.execute(sa.insert(gradings).from_select(names, chosen)).rowcount
    data = {"regrade_id": regrade.id, "grader": regrade.grader.name, "gradings": many}
    tx.emit("regrade.begun", run_id=regrade.run_id, data=data)
    return regrade


def _gradable() -> sa.ColumnElement[bool]:
    failed = sa.and_(rollouts.c.state == RolloutState.FAILED.value, rollouts.c.failure.like(_GRADER_FAILED))
    return sa.or_(rollouts.c.state == RolloutState.COMPLETED.value, failed)


def _regrade(row: Any) -> Regrade:
    return Regrade(
        id=row.id,
        run_id=row.run_id,
        grader=GraderSpec.model_validate_json(row.grader),
        created_at=row.created_at,
    )


def _grading(row: Any) -> Grading:
    return Grading(
        regrade_id=row.regrade_id,
        rollout_id=row.rollout_id,
        attempt_id=row.attempt_id,
        state=row.state,
        tries=row.tries,
        before=row.before,
        graded=None if row.graded is None else Graded.model_validate_json(row.graded),
    )


def get(conn: sa.Connection, regrade_id: str) -> Regrade:
    row = conn.execute(sa.select(regrades).where(regrades.c.id == regrade_id)).one_or_none()
    if row is None:
        raise no_such(conn, "regrade", regrade_id)
    return _regrade(row)


def of_run(conn: sa.Connection, run_id: str, cursor: str | None, limit: int) -> Page[Regrade]:
    query = sa.select(regrades).where(regrades.c.run_id == run_id)
    return page(conn, query, regrades.c.seq, _regrade, cursor=cursor, limit=limit)


def counts(conn: sa.Connection, regrade_id: str) -> dict[str, int]:
    query = (
        sa.select(gradings.c.state, sa.func.count())
        .where(gradings.c.regrade_id == regrade_id)
        .group_by(gradings.c.state)
    )
    found = dict.fromkeys((state.value for state in GradingState), 0)
    return found | {state: int(many) for state, many in conn.execute(query)}


def list_gradings(
    conn: sa.Connection, regrade_id: str, state: GradingState | None, cursor: str | None, limit: int
) -> Page[Grading]:
    get(conn, regrade_id)
    query = sa.select(gradings).where(gradings.c.regrade_id == regrade_id)
    if state is not None:
        query = query.where(gradings.c.state == state.value)
    return page(conn, query, gradings.c.seq, _grading, cursor=cursor, limit=limit)


def of_rollouts(conn: sa.Connection, regrade_id: str, ids: Sequence[str]) -> dict[str, Grading]:
    found: dict[str, Grading] = {}
    for some in chunked(ids):
        query = sa.select(gradings).where(
            gradings.c.regrade_id == regrade_id, gradings.c.rollout_id.in_(some)
        )
        found |= {row.rollout_id: _grading(row) for row in conn.execute(query)}
    return found


def take(tx: Tx, now: float, limit: int) -> list[GradingStart]:
    query = (
        sa.select(
            gradings.c.seq, gradings.c.regrade_id, gradings.c.run_id, gradings.c.rollout_id,
            gradings.c.tries, regrades.c.grader, attempts.c.record, groups.c.task,
        )
        .join_from(gradings, regrades, regrades.c.id == gradings.c.regrade_id)
        .join(attempts, attempts.c.id == gradings.c.attempt_id)
        .join(rollouts, rollouts.c.id == gradings.c.rollout_id)
        .join(groups, groups.c.id == rollouts.c.group_id)
        .where(gradings.c.state == _QUEUED, gradings.c.not_before <= now)
        .order_by(gradings.c.seq)
        .limit(limit)
    )  # fmt: skip
    rows = tx.conn.execute(query).all()
    taken = gradings.c.seq.in_([row.seq for row in rows])
    tx.conn.execute(sa.update(gradings).where(taken).values(state=_RUNNING, tries=gradings.c.tries + 1))
    return [
        GradingStart(
            regrade_id=row.regrade_id,
            run_id=row.run_id,
            rollout_id=row.rollout_id,
            tries=row.tries + 1,
            grader=GraderSpec.model_validate_json(row.grader),
            attempt=Attempt.model_validate_json(row.record),
            task=Task.model_validate_json(row.task),
        )
        for row in rows
    ]


def next_due(conn: sa.Connection) -> float | None:
    query = sa.select(sa.func.min(gradings.c.not_before)).where(gradings.c.state == _QUEUED)
    found: float | None = conn.execute(query).scalar_one()
    return found


def finish(
    tx: Tx, regrade_id: str, rollout_id: str, tries: int, graded: Graded | None, not_before: float
) -> bool:
    """``graded`` None: back into the queue. False where this try does not run any more."""
    values: dict[str, Any] = {"state": _QUEUED, "not_before": not_before}
    if graded is not None:
        values = {"state": graded.state.value, "graded": graded.model_dump_json()}
    theirs = sa.and_(gradings.c.regrade_id == regrade_id, gradings.c.rollout_id == rollout_id)
    running = sa.and_(theirs, gradings.c.state == _RUNNING, gradings.c.tries == tries)
    if not tx.conn.execute(sa.update(gradings).where(running).values(**values)).rowcount:
        return False
    if graded is not None and not _left(tx, regrade_id):
        run_id = get(tx.conn, regrade_id).run_id
        data = {"regrade_id": regrade_id, **counts(tx.conn, regrade_id)}
        tx.emit("regrade.ended", run_id=run_id, data=data)
    return True


def _left(tx: Tx, regrade_id: str) -> bool:
    open_ = sa.and_(gradings.c.regrade_id == regrade_id, gradings.c.state.in_([_QUEUED, _RUNNING]))
    return tx.conn.execute(sa.select(gradings.c.seq).where(open_).limit(1)).first() is not None


def recover(tx: Tx) -> int:
    """Those that ran when the server died are queued again, that try not counted."""
    running = gradings.c.state == _RUNNING
    values = {"state": _QUEUED, "not_before": 0.0, "tries": gradings.c.tries - 1}
    return tx.conn.execute(sa.update(gradings).where(running).values(**values)).rowcount


def cancel(tx: Tx, regrade_id: str) -> int:
    """What has not begun; returns how many."""
    run_id = get(tx.conn, regrade_id).run_id
    waiting = sa.and_(gradings.c.regrade_id == regrade_id, gradings.c.state == _QUEUED)
    values = {"state": GradingState.CANCELLED.value}
    many = tx.conn.execute(sa.update(gradings).where(waiting).values(**values)).rowcount
    tx.emit("regrade.cancelled", run_id=run_id, data={"regrade_id": regrade_id, "gradings": many})
    return many


def forget(tx: Tx, run_id: str, limit: int) -> bool:
    """Some of a run's gradings, then its regrades; False once nothing is left."""
    query = sa.select(gradings.c.seq).where(gradings.c.run_id == run_id).limit(limit)
    some = list(tx.conn.execute(query).scalars())
    for part in chunked(some):
        tx.conn.execute(sa.delete(gradings).where(gradings.c.seq.in_(part)))
    if not some:
        tx.conn.execute(sa.delete(regrades).where(regrades.c.run_id == run_id))
    return bool(some)
