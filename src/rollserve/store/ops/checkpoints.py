"""A trainer's checkpoints: what was acked before one is in it, and a rewind goes back to it."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from rollserve.errors import Conflict, NotFound, listed, nearest
from rollserve.records.delivery import Checkpoint
from rollserve.store.ops import handover, outbox
from rollserve.store.ops import sources as source_ops
from rollserve.store.ops.missing import LOOKED_AT
from rollserve.store.ops.pages import page
from rollserve.store.ops.policies import get_policy, rewind_policy
from rollserve.store.ops.trainers import known_trainer, places_of, run_policy
from rollserve.store.ops.tx import Tx
from rollserve.store.schema import Handover, checkpoints, deliveries, groups, run_counts, runs, trainers
from rollserve.store.values import Page


def _checkpoint(row: Any) -> Checkpoint:
    return Checkpoint(
        run_id=row.run_id,
        trainer=row.trainer,
        name=row.name,
        seq=row.seq,
        policy_version=row.policy_version,
        cursor=row.cursor,
        source_position=row.source_position,
        created_at=row.created_at,
    )


def _checkpoints(run_id: str, trainer: str) -> sa.Select[Any]:
    return sa.select(checkpoints).where(checkpoints.c.run_id == run_id, checkpoints.c.trainer == trainer)


def list_checkpoints(
    conn: sa.Connection, run_id: str, trainer: str, cursor: str | None, limit: int
) -> Page[Checkpoint]:
    run_policy(conn, run_id)
    query = _checkpoints(run_id, trainer)
    return page(conn, query, checkpoints.c.seq, _checkpoint, cursor=cursor, limit=limit)


def _find_checkpoint(conn: sa.Connection, run_id: str, trainer: str, name: str) -> Checkpoint | None:
    query = _checkpoints(run_id, trainer).where(checkpoints.c.name == name)
    row = conn.execute(query).one_or_none()
    return None if row is None else _checkpoint(row)


def _next_checkpoint_seq(conn: sa.Connection, run_id: str, trainer: str) -> int:
    last = sa.select(sa.func.max(checkpoints.c.seq)).where(
        checkpoints.c.run_id == run_id, checkpoints.c.trainer == trainer
    )
    return (conn.execute(last).scalar_one() or 0) + 1


def commit_checkpoint(
    tx: Tx, run_id: str, trainer: str, epoch: int, *, name: str, cursor: str | None, now: float
) -> Checkpoint:
    known_trainer(tx, run_id, trainer, epoch)
    acked = sa.and_(places_of(run_id, trainer), deliveries.c.state == Handover.ACKED.value)
    known = _find_checkpoint(tx.conn, run_id, trainer, name)
    if known is not None:
        _same_again(tx, known, acked, cursor)
        return known
    made = Checkpoint(
        run_id=run_id,
        trainer=trainer,
        name=name,
        seq=_next_checkpoint_seq(tx.conn, run_id, trainer),
        policy_version=get_policy(tx.conn, run_policy(tx.conn, run_id)).version,
        cursor=cursor,
        source_position=source_ops.position(tx.conn, run_id),
        created_at=now,
    )
    tx.conn.execute(sa.insert(checkpoints).values(**made.model_dump()))
    committed = tx.conn.execute(
        sa.update(deliveries).where(acked).values(state=Handover.COMMITTED.value, checkpoint_seq=made.seq)
    ).rowcount
    data = {"trainer": trainer, "name": name, "groups": committed, "version": made.policy_version}
    tx.emit("checkpoint.committed", run_id=run_id, data=data)
    return made


def _same_again(tx: Tx, known: Checkpoint, acked: sa.ColumnElement[bool], cursor: str | None) -> None:
    """Raises ``Conflict`` where the same name would stand for something else than it does."""
    later = sa.and_(places_of(known.run_id, known.trainer), deliveries.c.checkpoint_seq > known.seq)
    query = sa.select(deliveries.c.finished_seq).where(sa.or_(acked, later)).limit(1)
    if tx.conn.execute(query).first() is not None:
        raise Conflict(f"checkpoint {known.name!r} exists, and groups were taken since", field="name")
    if cursor != known.cursor:
        raise Conflict(f"checkpoint {known.name!r} exists with another cursor", field="cursor")


def rewind(tx: Tx, run_id: str, trainer: str, name: str | None) -> tuple[int, Checkpoint | None]:
    policy = run_policy(tx.conn, run_id)
    known = known_trainer(tx, run_id, trainer, None)
    target = None if name is None else _find_checkpoint(tx.conn, run_id, trainer, name)
    if name is not None and target is None:
        asked = sa.select(checkpoints.c.name).where(
            checkpoints.c.run_id == run_id, checkpoints.c.trainer == trainer
        )
        names = list(tx.conn.execute(asked.order_by(checkpoints.c.seq.desc()).limit(LOOKED_AT)).scalars())
        hint = nearest(name, names) or listed(names)
        raise NotFound(f"trainer {trainer!r} has no checkpoint {name!r}", field="name", hint=hint)
    kept = 0 if target is None else target.seq
    version = 0 if target is None else target.policy_version
    _give_back_after(tx, run_id, trainer, kept)
    source_ops.rewind(tx, run_id, target)
    tx.conn.execute(
        sa.delete(checkpoints).where(
            checkpoints.c.run_id == run_id, checkpoints.c.trainer == trainer, checkpoints.c.seq > kept
        )
    )
    epoch = known.epoch + 1
    tx.conn.execute(
        sa.update(trainers)
        .where(trainers.c.run_id == run_id, trainers.c.trainer == trainer)
        .values(epoch=epoch)
    )
    outbox.rewound(tx, run_id, trainer)
    rewind_policy(tx, policy, version)
    _rebase(tx, run_id, trainer, version)
    data = {"trainer": trainer, "name": name, "epoch": epoch, "version": version}
    tx.emit("trainer.rewound", policy=policy, run_id=run_id, data=data)
    return epoch, target


def _give_back_after(tx: Tx, run_id: str, trainer: str, kept: int) -> None:
    """Leases stay as they are: their epoch is old, so that who still holds one hears why it is lost.
    What was too old comes again: it may not be, at the version of then."""
    committed = deliveries.c.state == Handover.COMMITTED.value
    taken = sa.or_(
        deliveries.c.state.in_([Handover.ACKED.value, Handover.WITHHELD.value]),
        sa.and_(committed, deliveries.c.checkpoint_seq > kept),
    )
    places = sa.select(deliveries.c.finished_seq).where(places_of(run_id, trainer), taken)
    theirs = sa.and_(groups.c.run_id == run_id, groups.c.finished_seq.in_(places))
    freed = list(tx.conn.execute(sa.select(groups.c.id).where(theirs, groups.c.holders == 1)).scalars())
    tx.conn.execute(sa.update(groups).where(theirs).values(holders=groups.c.holders - 1))
    handover.take_back(tx, run_id, freed)
    tx.count(run_id, groups_undelivered=len(freed))
    tx.conn.execute(
        sa.update(deliveries)
        .where(places_of(run_id, trainer), sa.or_(taken, deliveries.c.state == Handover.LEASED.value))
        .values(state=Handover.RETURNED.value, lease_id=None, checkpoint_seq=None)
    )


def _rebase(tx: Tx, run_id: str, trainer: str, version: int) -> None:
    """Pacing counts from here: groups that are in the checkpoint are done with."""
    done = sa.select(deliveries.c.finished_seq).where(
        places_of(run_id, trainer), deliveries.c.state == Handover.COMMITTED.value
    )
    good = sa.select(sa.func.count()).where(
        groups.c.run_id == run_id,
        groups.c.finished_seq.is_not(None),
        groups.c.good,
        groups.c.finished_seq.not_in(done),
    )
    many = tx.conn.execute(good.select_from(groups)).scalar_one()
    of_run = run_counts.c.run_id == run_id
    tx.conn.execute(sa.update(run_counts).where(of_run).values(groups_good=many))
    tx.conn.execute(sa.update(runs).where(runs.c.id == run_id).values(base_version=version))
