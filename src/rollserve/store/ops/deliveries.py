"""Deliveries: the run's log of finished groups, leased to trainers, each of which gets all of it.

``deliveries`` has a row for each place of the log that was ever leased to a trainer; places after
``trainers.frontier`` never were. What was given back stands as ``returned`` and is leased again before
anything newer, so order is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from rollserve.errors import Conflict, InvalidInput, LeaseLost, NotFound, StaleEpoch
from rollserve.records.base import new_id
from rollserve.records.delivery import Checkpoint, Lease
from rollserve.store.ops.policies import get_policy, rewind_policy
from rollserve.store.ops.tx import Tx, to_json
from rollserve.store.schema import (
    Handover,
    checkpoints,
    deliveries,
    groups,
    leases,
    runs,
    trainers,
)

_TRAINER = sa.select(trainers).where(
    trainers.c.run_id == sa.bindparam("of_run"), trainers.c.trainer == sa.bindparam("named")
)
_LEASE_AGAIN = (
    sa.update(deliveries)
    .where(
        deliveries.c.run_id == sa.bindparam("of_run"),
        deliveries.c.trainer == sa.bindparam("named"),
        deliveries.c.finished_seq == sa.bindparam("place"),
    )
    .values(state=Handover.LEASED.value, lease_id=sa.bindparam("new_lease"))
)


def _run_policy(conn: sa.Connection, run_id: str) -> str:
    policy = conn.execute(sa.select(runs.c.policy).where(runs.c.id == run_id)).scalar_one_or_none()
    if policy is None:
        raise NotFound(f"no run {run_id!r}", field="run_id")
    return str(policy)


def trainer_epoch(conn: sa.Connection, run_id: str, trainer: str) -> int:
    """0 for a trainer that was never heard of."""
    row = conn.execute(_TRAINER, {"of_run": run_id, "named": trainer}).one_or_none()
    if row is None:
        _run_policy(conn, run_id)
        return 0
    return int(row.epoch)


def _known_trainer(tx: Tx, run_id: str, trainer: str, epoch: int | None) -> Any:
    """The trainer's row, made at its first request. Raises ``StaleEpoch``, ``NotFound`` (run)."""
    wanted = {"of_run": run_id, "named": trainer}
    row = tx.conn.execute(_TRAINER, wanted).one_or_none()
    if row is None:
        _run_policy(tx.conn, run_id)
        tx.conn.execute(sa.insert(trainers).values(run_id=run_id, trainer=trainer, epoch=0, frontier=0))
        row = tx.conn.execute(_TRAINER, wanted).one()
    if epoch is not None and epoch != row.epoch:
        raise _stale(trainer, epoch, row.epoch)
    return row


def _stale(trainer: str, epoch: int, current: int) -> StaleEpoch:
    return StaleEpoch(
        f"trainer {trainer!r} is at epoch {current}, not {epoch}",
        field="epoch",
        hint="it was rewound; start again from the checkpoint",
    )


def _of(run_id: str, trainer: str) -> sa.ColumnElement[bool]:
    return sa.and_(deliveries.c.run_id == run_id, deliveries.c.trainer == trainer)


def lease_groups(
    tx: Tx, run_id: str, trainer: str, epoch: int | None, *, limit: int, ttl_s: float, now: float
) -> Lease | None:
    if limit < 1:
        raise InvalidInput("must be 1 or more", field="max_groups")
    known = _known_trainer(tx, run_id, trainer, epoch)
    _give_back_expired(tx, now, leases.c.run_id == run_id, leases.c.trainer == trainer)
    returned = tx.conn.execute(
        sa.select(deliveries.c.finished_seq, deliveries.c.group_id)
        .where(_of(run_id, trainer), deliveries.c.state == Handover.RETURNED.value)
        .order_by(deliveries.c.finished_seq)
        .limit(limit)
    ).all()
    fresh = tx.conn.execute(
        sa.select(groups.c.finished_seq, groups.c.id.label("group_id"))
        .where(groups.c.run_id == run_id, groups.c.finished_seq > known.frontier)
        .order_by(groups.c.finished_seq)
        .limit(limit - len(returned))
    ).all()
    if not returned and not fresh:
        return None
    lease = Lease(
        id=new_id("lea"),
        run_id=run_id,
        trainer=trainer,
        epoch=known.epoch,
        group_ids=[row.group_id for row in (*returned, *fresh)],
        expires_at=now + ttl_s,
    )
    _write_lease(tx, lease, returned, fresh)
    return lease


def _write_lease(tx: Tx, lease: Lease, returned: Sequence[Any], fresh: Sequence[Any]) -> None:
    whose = {"run_id": lease.run_id, "trainer": lease.trainer}
    state = Handover.LEASED.value
    tx.conn.execute(
        sa.insert(leases).values(
            id=lease.id,
            **whose,
            epoch=lease.epoch,
            state=state,
            expires_at=lease.expires_at,
            group_ids=to_json(lease.group_ids),
        )
    )
    if returned:
        again = {"of_run": lease.run_id, "named": lease.trainer, "new_lease": lease.id}
        tx.conn.execute(_LEASE_AGAIN, [{**again, "place": row.finished_seq} for row in returned])
    if fresh:
        common = {**whose, "state": state, "lease_id": lease.id}
        tx.conn.execute(
            sa.insert(deliveries),
            [{**common, "finished_seq": row.finished_seq, "group_id": row.group_id} for row in fresh],
        )
        tx.conn.execute(
            sa.update(trainers)
            .where(trainers.c.run_id == lease.run_id, trainers.c.trainer == lease.trainer)
            .values(frontier=fresh[-1].finished_seq)
        )
    _emit(tx, "delivery.leased", lease)


def _emit(tx: Tx, event_type: str, lease: Lease) -> None:
    data = {"lease_id": lease.id, "trainer": lease.trainer, "groups": len(lease.group_ids)}
    tx.emit(event_type, run_id=lease.run_id, data=data)


def _held(tx: Tx, lease_id: str) -> tuple[Lease, Handover]:
    """A lease that is there. Raises ``LeaseLost``, or ``StaleEpoch`` when its trainer was rewound."""
    row = tx.conn.execute(
        sa.select(leases, trainers.c.epoch.label("trainer_epoch"))
        .join_from(
            leases,
            trainers,
            sa.and_(trainers.c.run_id == leases.c.run_id, trainers.c.trainer == leases.c.trainer),
        )
        .where(leases.c.id == lease_id)
    ).one_or_none()
    if row is None:
        raise LeaseLost(
            f"no lease {lease_id!r}: it was never given, or given back", hint="what it held is leased anew"
        )
    if row.epoch != row.trainer_epoch:
        raise _stale(row.trainer, row.epoch, row.trainer_epoch)
    lease = Lease(
        id=row.id,
        run_id=row.run_id,
        trainer=row.trainer,
        epoch=row.epoch,
        group_ids=msgspec.json.decode(row.group_ids),
        expires_at=row.expires_at,
    )
    return lease, Handover(row.state)


def renew_lease(tx: Tx, lease_id: str, *, ttl_s: float, now: float) -> Lease:
    """Also after its time, as long as it was not given back. Nothing to do once it is acked."""
    lease, state = _held(tx, lease_id)
    if state is Handover.ACKED:
        return lease
    expires_at = now + ttl_s
    tx.conn.execute(sa.update(leases).where(leases.c.id == lease_id).values(expires_at=expires_at))
    return lease.model_copy(update={"expires_at": expires_at})


def ack_lease(tx: Tx, lease_id: str) -> Lease:
    """Also after its time, as long as it was not given back: until then nobody else got its groups."""
    lease, state = _held(tx, lease_id)
    if state is Handover.ACKED:
        return lease
    places = sa.select(deliveries.c.finished_seq).where(deliveries.c.lease_id == lease_id)
    mine = sa.and_(groups.c.run_id == lease.run_id, groups.c.finished_seq.in_(places))
    first = tx.conn.execute(
        sa.select(sa.func.count()).select_from(groups).where(mine, groups.c.holders == 0)
    ).scalar_one()
    tx.conn.execute(sa.update(groups).where(mine).values(holders=groups.c.holders + 1))
    tx.conn.execute(sa.update(leases).where(leases.c.id == lease_id).values(state=Handover.ACKED.value))
    tx.conn.execute(
        sa.update(deliveries).where(deliveries.c.lease_id == lease_id).values(state=Handover.ACKED.value)
    )
    tx.count(lease.run_id, groups_undelivered=-first)
    _emit(tx, "delivery.acked", lease)
    return lease


def nack_lease(tx: Tx, lease_id: str) -> None:
    """Raises ``LeaseLost`` also when it is acked: what was taken can't be given back one by one."""
    lease, state = _held(tx, lease_id)
    if state is Handover.ACKED:
        raise LeaseLost(f"lease {lease_id!r} is acknowledged", hint="rewind to have its groups again")
    _give_back(tx, lease_id)
    _emit(tx, "delivery.nacked", lease)


def _give_back(tx: Tx, lease_id: str) -> None:
    tx.conn.execute(
        sa.update(deliveries)
        .where(deliveries.c.lease_id == lease_id)
        .values(state=Handover.RETURNED.value, lease_id=None)
    )
    tx.conn.execute(sa.delete(leases).where(leases.c.id == lease_id))


def expire_leases(tx: Tx, now: float) -> int:
    return _give_back_expired(tx, now)


def _give_back_expired(tx: Tx, now: float, *whose: sa.ColumnElement[bool]) -> int:
    expired = tx.conn.execute(
        sa.select(leases.c.id, leases.c.run_id, leases.c.trainer).where(
            leases.c.state == Handover.LEASED.value, leases.c.expires_at <= now, *whose
        )
    ).all()
    for row in expired:
        _give_back(tx, row.id)
        data = {"lease_id": row.id, "trainer": row.trainer}
        tx.emit("delivery.expired", run_id=row.run_id, data=data)
    return len(expired)


def _checkpoint(row: Any) -> Checkpoint:
    return Checkpoint(
        run_id=row.run_id,
        trainer=row.trainer,
        name=row.name,
        seq=row.seq,
        policy_version=row.policy_version,
        cursor=row.cursor,
        created_at=row.created_at,
    )


def list_checkpoints(conn: sa.Connection, run_id: str, trainer: str) -> list[Checkpoint]:
    _run_policy(conn, run_id)
    query = sa.select(checkpoints).where(checkpoints.c.run_id == run_id, checkpoints.c.trainer == trainer)
    return [_checkpoint(row) for row in conn.execute(query.order_by(checkpoints.c.seq))]


def commit_checkpoint(
    tx: Tx, run_id: str, trainer: str, epoch: int, *, name: str, cursor: str | None, now: float
) -> Checkpoint:
    _known_trainer(tx, run_id, trainer, epoch)
    acked = sa.and_(_of(run_id, trainer), deliveries.c.state == Handover.ACKED.value)
    earlier = list_checkpoints(tx.conn, run_id, trainer)
    known = next((item for item in earlier if item.name == name), None)
    if known is not None:
        _same_again(tx, known, acked, cursor)
        return known
    made = Checkpoint(
        run_id=run_id,
        trainer=trainer,
        name=name,
        seq=earlier[-1].seq + 1 if earlier else 1,
        policy_version=get_policy(tx.conn, _run_policy(tx.conn, run_id)).version,
        cursor=cursor,
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
    later = sa.and_(_of(known.run_id, known.trainer), deliveries.c.checkpoint_seq > known.seq)
    query = sa.select(deliveries.c.finished_seq).where(sa.or_(acked, later)).limit(1)
    if tx.conn.execute(query).first() is not None:
        raise Conflict(f"checkpoint {known.name!r} exists, and groups were taken since", field="name")
    if cursor != known.cursor:
        raise Conflict(f"checkpoint {known.name!r} exists with another cursor", field="cursor")


def rewind(tx: Tx, run_id: str, trainer: str, name: str | None) -> tuple[int, Checkpoint | None]:
    policy = _run_policy(tx.conn, run_id)
    known = _known_trainer(tx, run_id, trainer, None)
    earlier = {item.name: item for item in list_checkpoints(tx.conn, run_id, trainer)}
    if name is not None and name not in earlier:
        raise NotFound(f"trainer {trainer!r} has no checkpoint {name!r}", field="name")
    target = None if name is None else earlier[name]
    kept = 0 if target is None else target.seq
    version = 0 if target is None else target.policy_version
    _give_back_after(tx, run_id, trainer, kept)
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
    rewind_policy(tx, policy, version)
    data = {"trainer": trainer, "name": name, "epoch": epoch, "version": version}
    tx.emit("trainer.rewound", policy=policy, run_id=run_id, data=data)
    return epoch, target


def _give_back_after(tx: Tx, run_id: str, trainer: str, kept: int) -> None:
    """Leases stay as they are: their epoch is old, so that who still holds one hears why it is lost."""
    committed = deliveries.c.state == Handover.COMMITTED.value
    taken = sa.or_(
        deliveries.c.state == Handover.ACKED.value,
        sa.and_(committed, deliveries.c.checkpoint_seq > kept),
    )
    places = sa.select(deliveries.c.finished_seq).where(_of(run_id, trainer), taken)
    theirs = sa.and_(groups.c.run_id == run_id, groups.c.finished_seq.in_(places))
    freed = tx.conn.execute(
        sa.select(sa.func.count()).select_from(groups).where(theirs, groups.c.holders == 1)
    ).scalar_one()
    tx.conn.execute(sa.update(groups).where(theirs).values(holders=groups.c.holders - 1))
    tx.count(run_id, groups_undelivered=freed)
    tx.conn.execute(
        sa.update(deliveries)
        .where(_of(run_id, trainer), sa.or_(taken, deliveries.c.state == Handover.LEASED.value))
        .values(state=Handover.RETURNED.value, lease_id=None, checkpoint_seq=None)
    )
