"""Re-gradings of stored attempts: beside what the attempts themselves came to, which is never changed.

A grading moves ``queued → running → final`` or back to ``queued``; its end is taken from the try it belongs
to only, so that one whose worker was given up can't end it twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from pydantic import TypeAdapter

from rollserve.errors import Conflict
from rollserve.records.regrade import Graded, JudgeRoute, Regrade, Regrading, RegradingState, try_name
from rollserve.records.rollout import Attempt, RolloutState
from rollserve.records.task import GraderSpec, Task
from rollserve.store.ops import bins
from rollserve.store.ops.missing import no_such
from rollserve.store.ops.pages import page
from rollserve.store.ops.tx import Tx, chunked
from rollserve.store.schema import attempts, groups, regrades, regradings, rollouts
from rollserve.store.values import Page, RegradingStart

_QUEUED, _RUNNING = RegradingState.QUEUED.value, RegradingState.RUNNING.value
_ROUTES = TypeAdapter(dict[str, JudgeRoute])
_GRADER_FAILED = '%"kind":"grader"%'
"""In a rollout's failure: the agent had done its part."""


def create(tx: Tx, regrade: Regrade) -> Regrade:
    """With a grading for each rollout that has something to grade. The same id again is the same regrade;
    raises ``Conflict`` where it has another grader or other routes."""
    row = tx.conn.execute(sa.select(regrades).where(regrades.c.id == regrade.id)).one_or_none()
    if row is not None:
        known = _regrade(row)
        if known != regrade.model_copy(update={"created_at": known.created_at}):
            raise Conflict("this key began a regrade with another grader or routes", field="Idempotency-Key")
        return known
    tx.conn.execute(
        sa.insert(regrades).values(
            id=regrade.id,
            run_id=regrade.run_id,
            grader=regrade.grader.model_dump_json(),
            routes=_ROUTES.dump_json(regrade.routes).decode(),
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
    many = tx.conn.execute(sa.insert(regradings).from_select(names, chosen)).rowcount
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
        routes=_ROUTES.validate_json(row.routes),
        created_at=row.created_at,
    )


def _regrading(row: Any) -> Regrading:
    return Regrading(
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
        sa.select(regradings.c.state, sa.func.count())
        .where(regradings.c.regrade_id == regrade_id)
        .group_by(regradings.c.state)
    )
    found = dict.fromkeys((state.value for state in RegradingState), 0)
    return found | {state: int(many) for state, many in conn.execute(query)}


def list_regradings(
    conn: sa.Connection, regrade_id: str, state: RegradingState | None, cursor: str | None, limit: int
) -> Page[Regrading]:
    get(conn, regrade_id)
    query = sa.select(regradings).where(regradings.c.regrade_id == regrade_id)
    if state is not None:
        query = query.where(regradings.c.state == state.value)
    return page(conn, query, regradings.c.seq, _regrading, cursor=cursor, limit=limit)


def of_rollouts(conn: sa.Connection, regrade_id: str, ids: Sequence[str]) -> dict[str, Regrading]:
    found: dict[str, Regrading] = {}
    for some in chunked(ids):
        query = sa.select(regradings).where(
            regradings.c.regrade_id == regrade_id, regradings.c.rollout_id.in_(some)
        )
        found |= {row.rollout_id: _regrading(row) for row in conn.execute(query)}
    return found


def take(tx: Tx, now: float, limit: int) -> list[RegradingStart]:
    query = (
        sa.select(
            regradings.c.seq, regradings.c.regrade_id, regradings.c.run_id, regradings.c.rollout_id,
            regradings.c.tries, regrades.c.grader, regrades.c.routes, attempts.c.record, groups.c.task,
        )
        .join_from(regradings, regrades, regrades.c.id == regradings.c.regrade_id)
        .join(attempts, attempts.c.id == regradings.c.attempt_id)
        .join(rollouts, rollouts.c.id == regradings.c.rollout_id)
        .join(groups, groups.c.id == rollouts.c.group_id)
        .where(regradings.c.state == _QUEUED, regradings.c.not_before <= now)
        .order_by(regradings.c.seq)
        .limit(limit)
    )  # fmt: skip
    rows = tx.conn.execute(query).all()
    taken = regradings.c.seq.in_([row.seq for row in rows])
    tx.conn.execute(sa.update(regradings).where(taken).values(state=_RUNNING, tries=regradings.c.tries + 1))
    return [
        RegradingStart(
            regrade_id=row.regrade_id,
            run_id=row.run_id,
            rollout_id=row.rollout_id,
            tries=row.tries + 1,
            grader=GraderSpec.model_validate_json(row.grader),
            routes=_ROUTES.validate_json(row.routes),
            attempt=Attempt.model_validate_json(row.record),
            task=Task.model_validate_json(row.task),
        )
        for row in rows
    ]


def next_due(conn: sa.Connection) -> float | None:
    query = sa.select(sa.func.min(regradings.c.not_before)).where(regradings.c.state == _QUEUED)
    found: float | None = conn.execute(query).scalar_one()
    return found


def finish(
    tx: Tx, start: RegradingStart, graded: Graded | None, not_before: float, sampled_tokens: int
) -> bool:
    """``graded`` None: back into the queue. False where this try does not run any more."""
    regrade_id = start.regrade_id
    values: dict[str, Any] = {"state": _QUEUED, "not_before": not_before}
    if graded is not None:
        values = {"state": graded.state.value, "graded": graded.model_dump_json()}
    theirs = sa.and_(regradings.c.regrade_id == regrade_id, regradings.c.rollout_id == start.rollout_id)
    running = sa.and_(theirs, regradings.c.state == _RUNNING, regradings.c.tries == start.tries)
    if not tx.conn.execute(sa.update(regradings).where(running).values(**values)).rowcount:
        return False
    if sampled_tokens:
        bins.add(tx, start.run_id, bins.TOKENS, bins.REGRADED, 1, sampled_tokens)
    if graded is not None and not _left(tx, regrade_id):
        data = {"regrade_id": regrade_id, **counts(tx.conn, regrade_id)}
        tx.emit("regrade.ended", run_id=start.run_id, data=data)
    return True


def _left(tx: Tx, regrade_id: str) -> bool:
    open_ = sa.and_(regradings.c.regrade_id == regrade_id, regradings.c.state.in_([_QUEUED, _RUNNING]))
    return tx.conn.execute(sa.select(regradings.c.seq).where(open_).limit(1)).first() is not None


def interrupted(conn: sa.Connection) -> list[tuple[str, str]]:
    """Run and name of the tries that ran when the server died."""
    chosen = (regradings.c.run_id, regradings.c.regrade_id, regradings.c.rollout_id, regradings.c.tries)
    query = sa.select(*chosen).where(regradings.c.state == _RUNNING)
    return [(run_id, try_name(*whose)) for run_id, *whose in conn.execute(query)]


def recover(tx: Tx, sampled_tokens: Mapping[str, int]) -> int:
    """Those that ran when the server died are queued again, that try not counted but for its tokens."""
    for run_id, name in interrupted(tx.conn):
        if sampled_tokens.get(name):
            bins.add(tx, run_id, bins.TOKENS, bins.REGRADED, 1, sampled_tokens[name])
    running = regradings.c.state == _RUNNING
    values = {"state": _QUEUED, "not_before": 0.0, "tries": regradings.c.tries - 1}
    return tx.conn.execute(sa.update(regradings).where(running).values(**values)).rowcount


def cancel(tx: Tx, regrade_id: str) -> int:
    """What has not begun; returns how many."""
    run_id = get(tx.conn, regrade_id).run_id
    waiting = sa.and_(regradings.c.regrade_id == regrade_id, regradings.c.state == _QUEUED)
    values = {"state": RegradingState.CANCELLED.value}
    many = tx.conn.execute(sa.update(regradings).where(waiting).values(**values)).rowcount
    tx.emit("regrade.cancelled", run_id=run_id, data={"regrade_id": regrade_id, "gradings": many})
    return many


def forget(tx: Tx, run_id: str, limit: int) -> bool:
    """Some of a run's gradings, then its regrades; False once nothing is left."""
    query = sa.select(regradings.c.seq).where(regradings.c.run_id == run_id).limit(limit)
    some = list(tx.conn.execute(query).scalars())
    for part in chunked(some):
        tx.conn.execute(sa.delete(regradings).where(regradings.c.seq.in_(part)))
    if not some:
        tx.conn.execute(sa.delete(regrades).where(regrades.c.run_id == run_id))
    return bool(some)
