"""Trainers: each has its own place in a run's log, and an epoch that a rewind raises."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from rollserve.errors import StaleEpoch
from rollserve.store.ops.missing import no_such
from rollserve.store.ops.tx import Tx
from rollserve.store.schema import deliveries, runs, trainers

_TRAINER = sa.select(trainers).where(
    trainers.c.run_id == sa.bindparam("of_run"), trainers.c.trainer == sa.bindparam("named")
)


def run_policy(conn: sa.Connection, run_id: str) -> str:
    policy = conn.execute(sa.select(runs.c.policy).where(runs.c.id == run_id)).scalar_one_or_none()
    if policy is None:
        raise no_such(conn, "run", run_id)
    return str(policy)


def trainer_epoch(conn: sa.Connection, run_id: str, trainer: str) -> int:
    """0 for a trainer that was never heard of."""
    row = conn.execute(_TRAINER, {"of_run": run_id, "named": trainer}).one_or_none()
    if row is None:
        run_policy(conn, run_id)
        return 0
    return int(row.epoch)


def known_trainer(tx: Tx, run_id: str, trainer: str, epoch: int | None) -> Any:
    """The trainer's row, made at its first request. Raises ``StaleEpoch``, ``NotFound`` (run)."""
    wanted = {"of_run": run_id, "named": trainer}
    row = tx.conn.execute(_TRAINER, wanted).one_or_none()
    if row is None:
        run_policy(tx.conn, run_id)
        tx.conn.execute(sa.insert(trainers).values(run_id=run_id, trainer=trainer, epoch=0, frontier=0))
        row = tx.conn.execute(_TRAINER, wanted).one()
    if epoch is not None and epoch != row.epoch:
        raise stale_epoch(trainer, epoch, row.epoch)
    return row


def stale_epoch(trainer: str, epoch: int, current: int) -> StaleEpoch:
    return StaleEpoch(
        f"trainer {trainer!r} is at epoch {current}, not {epoch}",
        field="epoch",
        hint="it was rewound; start again from the checkpoint",
    )


def places_of(run_id: str, trainer: str) -> sa.ColumnElement[bool]:
    return sa.and_(deliveries.c.run_id == run_id, deliveries.c.trainer == trainer)
