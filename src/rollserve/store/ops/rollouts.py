"""Rollouts and attempts as records: look-ups and lists."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from rollserve.records.rollout import Attempt, Failure, Rollout, RolloutState
from rollserve.store.ops.missing import no_such
from rollserve.store.ops.pages import page
from rollserve.store.schema import attempts, rollouts
from rollserve.store.values import Page


def rollout_of(row: Any) -> Rollout:
    return Rollout(
        id=row.id,
        group_id=row.group_id,
        run_id=row.run_id,
        index=row.idx,
        state=row.state,
        epoch=row.epoch,
        attempts=row.attempts,
        not_before=row.not_before,
        reward=row.reward,
        truncated_by=row.truncated_by,
        failure=None if row.failure is None else Failure.model_validate_json(row.failure),
        attempt_id=row.attempt_id,
        created_at=row.created_at,
        finished_at=row.finished_at,
    )


def get_rollout(conn: sa.Connection, rollout_id: str) -> Rollout:
    row = conn.execute(sa.select(rollouts).where(rollouts.c.id == rollout_id)).one_or_none()
    if row is None:
        raise no_such(conn, "rollout", rollout_id)
    return rollout_of(row)


def list_rollouts(
    conn: sa.Connection,
    *,
    run_id: str | None,
    group_id: str | None,
    state: RolloutState | None,
    cursor: str | None,
    limit: int,
) -> Page[Rollout]:
    query = sa.select(rollouts)
    if run_id is not None:
        query = query.where(rollouts.c.run_id == run_id)
    if group_id is not None:
        query = query.where(rollouts.c.group_id == group_id)
    if state is not None:
        query = query.where(rollouts.c.state == state.value)
    return page(conn, query, rollouts.c.seq, rollout_of, cursor=cursor, limit=limit)


def list_attempts(conn: sa.Connection, rollout_id: str, cursor: str | None, limit: int) -> Page[Attempt]:
    get_rollout(conn, rollout_id)
    query = sa.select(attempts.c.epoch, attempts.c.record).where(attempts.c.rollout_id == rollout_id)
    return page(conn, query, attempts.c.epoch, _attempt, cursor=cursor, limit=limit)


def last_attempt(conn: sa.Connection, rollout_id: str) -> Attempt | None:
    get_rollout(conn, rollout_id)
    query = sa.select(attempts.c.record).where(attempts.c.rollout_id == rollout_id)
    row = conn.execute(query.order_by(attempts.c.epoch.desc()).limit(1)).one_or_none()
    return None if row is None else _attempt(row)


def _attempt(row: Any) -> Attempt:
    return Attempt.model_validate_json(row.record)


def get_attempt(conn: sa.Connection, attempt_id: str) -> Attempt:
    query = sa.select(attempts.c.record).where(attempts.c.id == attempt_id)
    record = conn.execute(query).scalar_one_or_none()
    if record is None:
        raise no_such(conn, "attempt", attempt_id)
    return Attempt.model_validate_json(record)
