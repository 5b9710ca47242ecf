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
from rollserve.records.run import RunState, SourceState
from rollserve.store.base import Handed, Page
from rollserve.store.ops import handover
from rollserve.store.ops import sources as source_ops
from rollserve.store.ops.pages import page
from rollserve.store.ops.policies import get_policy, rewind_policy
from rollserve.store.ops.tx import Tx, to_json
from rollserve.store.schema import (
    Handover,
    checkpoints,
    deliveries,
    groups,
    leases,
    run_counts,
    runs,
    sources,
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
    tx: Tx,
    run_id: str,
    trainer: str,
    epoch: int | None,
    *,
    limit: int,
    max_tokens: int | None = None,
    ttl_s: float,
    now: float,
) -> Lease | None:
    if limit < 1:
        raise InvalidInput("must be 1 or more", field="max_groups")
    known = _known_trainer(tx, run_id, trainer, epoch)
    _give_back_expired(tx, now, leases.c.run_id == run_id, leases.c.trainer == trainer)
    returned, fresh = _next_places(tx, known, limit)
    if not returned and not fresh:
        return None
    fit = _fitting([*returned, *fresh], max_tokens)
    returned, fresh = returned[:fit], fresh[: max(0, fit - len(returned))]
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


def _next_places(tx: Tx, known: Any, limit: int) -> tuple[Sequence[Any], Sequence[Any]]:
    """Of the trainer's log: places that were given back, then such as it never had."""
    returned = tx.conn.execute(
        sa.select(deliveries.c.finished_seq, deliveries.c.group_id, groups.c.sampled)
        .join_from(deliveries, groups, groups.c.id == deliveries.c.group_id)
        .where(_of(known.run_id, known.trainer), deliveries.c.state == Handover.RETURNED.value)
        .order_by(deliveries.c.finished_seq)
        .limit(limit)
    ).all()
    fresh = tx.conn.execute(
        sa.select(groups.c.finished_seq, groups.c.id.label("group_id"), groups.c.sampled)
        .where(groups.c.run_id == known.run_id, groups.c.finished_seq > known.frontier)
        .order_by(groups.c.finished_seq)
        .limit(limit - len(returned))
    ).all()
    return returned, fresh


def _fitting(rows: Sequence[Any], max_tokens: int | None) -> int:
    """How many of the groups go together: one at least."""
    total = 0
    for count, row in enumerate(rows):
        total += row.sampled
        if count and max_tokens is not None and total > max_tokens:
            return count
    return len(rows)


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


def _held(tx: Tx, lease_id: str) -> tuple[Lease, Handover, list[Handed]]:
    """A lease that is there, with what was found when it was filled. Raises ``LeaseLost``, or
    ``StaleEpoch`` when its trainer was rewound."""
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
    handed = [] if row.facts is None else msgspec.json.decode(row.facts, type=list[Handed])
    return lease, Handover(row.state), handed


def renew_lease(tx: Tx, lease_id: str, *, ttl_s: float, now: float) -> Lease:
    """Also after its time, as long as it was not given back. Nothing to do once it is acked."""
    lease, state, _ = _held(tx, lease_id)
    if state is Handover.ACKED:
        return lease
    expires_at = now + ttl_s
    tx.conn.execute(sa.update(leases).where(leases.c.id == lease_id).values(expires_at=expires_at))
    return lease.model_copy(update={"expires_at": expires_at})


def ack_lease(tx: Tx, lease_id: str) -> Lease:
    """Also after its time, as long as it was not given back: until then nobody else got its groups."""
    lease, state, handed = _held(tx, lease_id)
    if state is Handover.ACKED:
        return lease
    places = sa.select(deliveries.c.finished_seq).where(deliveries.c.lease_id == lease_id)
    first = _take(tx, lease.run_id, places)
    handover.book(tx, lease.run_id, first, handed)
    tx.conn.execute(sa.update(leases).where(leases.c.id == lease_id).values(state=Handover.ACKED.value))
    tx.conn.execute(
        sa.update(deliveries).where(deliveries.c.lease_id == lease_id).values(state=Handover.ACKED.value)
    )
    _emit(tx, "delivery.acked", lease)
    return lease


def _take(tx: Tx, run_id: str, places: sa.Select[Any]) -> list[str]:
    """One more trainer has these groups; those that none had before."""
    mine = sa.and_(groups.c.run_id == run_id, groups.c.finished_seq.in_(places))
    query = sa.select(groups.c.id).where(mine, groups.c.holders == 0)
    first = list(tx.conn.execute(query).scalars())
    tx.conn.execute(sa.update(groups).where(mine).values(holders=groups.c.holders + 1))
    tx.count(run_id, groups_undelivered=-len(first))
    return first


def note_lease(tx: Tx, lease_id: str, handed: Sequence[Handed], withheld: Sequence[str]) -> None:
    lease, _, _ = _held(tx, lease_id)
    rows = sa.and_(deliveries.c.lease_id == lease_id, deliveries.c.group_id.in_(withheld))
    if withheld:
        first = _take(tx, lease.run_id, sa.select(deliveries.c.finished_seq).where(rows))
        handover.pass_over(tx, lease.run_id, first, handed)
        values = {"state": Handover.WITHHELD.value, "lease_id": None}
        tx.conn.execute(sa.update(deliveries).where(rows).values(**values))
    left = [group_id for group_id in lease.group_ids if group_id not in set(withheld)]
    if left:
        found = {"facts": to_json(handed), "group_ids": to_json(left)}
        tx.conn.execute(sa.update(leases).where(leases.c.id == lease_id).values(**found))
    else:
        tx.conn.execute(sa.delete(leases).where(leases.c.id == lease_id))
    if withheld:
        tx.emit("delivery.withheld", run_id=lease.run_id, data={"groups": len(withheld)})


def run_over(conn: sa.Connection, run_id: str, trainer: str) -> tuple[str, str] | None:
    query = (
        sa.select(runs.c.state, run_counts.c.groups_open, sources.c.state.label("source"), sources.c.detail)
        .join_from(runs, run_counts, run_counts.c.run_id == runs.c.id)
        .outerjoin(sources, sources.c.run_id == runs.c.id)
        .where(runs.c.id == run_id)
    )
    row = conn.execute(query).one_or_none()
    if row is None or row.groups_open:
        return None
    over = _why_over(row)
    if over is None:
        return None
    states = [Handover.LEASED.value, Handover.RETURNED.value]
    held = sa.select(deliveries.c.finished_seq).where(_of(run_id, trainer), deliveries.c.state.in_(states))
    frontier = sa.select(trainers.c.frontier).where(
        trainers.c.run_id == run_id, trainers.c.trainer == trainer
    )
    fresh = sa.select(groups.c.id).where(
        groups.c.run_id == run_id, groups.c.finished_seq > sa.func.coalesce(frontier.scalar_subquery(), 0)
    )
    waits = conn.execute(held.limit(1)).first() or conn.execute(fresh.limit(1)).first()
    return None if waits else over


def _why_over(row: Any) -> tuple[str, str] | None:
    if row.state == RunState.CLOSED.value:
        return "run_closed", "the run is closed"
    if row.source == SourceState.FAILED.value:
        return "source_failed", f"the task source failed: {row.detail}"
    if row.source == SourceState.ENDED.value:
        return "source_ended", "the task source has no more tasks"
    return None


def nack_lease(tx: Tx, lease_id: str) -> None:
    """Raises ``LeaseLost`` also when it is acked: what was taken can't be given back one by one."""
    lease, state, _ = _held(tx, lease_id)
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
        source_position=row.source_position,
        created_at=row.created_at,
    )


def _checkpoints(run_id: str, trainer: str) -> sa.Select[Any]:
    return sa.select(checkpoints).where(checkpoints.c.run_id == run_id, checkpoints.c.trainer == trainer)


def list_checkpoints(
    conn: sa.Connection, run_id: str, trainer: str, cursor: str | None, limit: int
) -> Page[Checkpoint]:
    _run_policy(conn, run_id)
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
    _known_trainer(tx, run_id, trainer, epoch)
    acked = sa.and_(_of(run_id, trainer), deliveries.c.state == Handover.ACKED.value)
    known = _find_checkpoint(tx.conn, run_id, trainer, name)
    if known is not None:
        _same_again(tx, known, acked, cursor)
        return known
    made = Checkpoint(
        run_id=run_id,
        trainer=trainer,
        name=name,
        seq=_next_checkpoint_seq(tx.conn, run_id, trainer),
        policy_version=get_policy(tx.conn, _run_policy(tx.conn, run_id)).version,
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
    later = sa.and_(_of(known.run_id, known.trainer), deliveries.c.checkpoint_seq > known.seq)
    query = sa.select(deliveries.c.finished_seq).where(sa.or_(acked, later)).limit(1)
    if tx.conn.execute(query).first() is not None:
        raise Conflict(f"checkpoint {known.name!r} exists, and groups were taken since", field="name")
    if cursor != known.cursor:
        raise Conflict(f"checkpoint {known.name!r} exists with another cursor", field="cursor")


def rewind(tx: Tx, run_id: str, trainer: str, name: str | None) -> tuple[int, Checkpoint | None]:
    policy = _run_policy(tx.conn, run_id)
    known = _known_trainer(tx, run_id, trainer, None)
    target = None if name is None else _find_checkpoint(tx.conn, run_id, trainer, name)
    if name is not None and target is None:
        raise NotFound(f"trainer {trainer!r} has no checkpoint {name!r}", field="name")
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
    places = sa.select(deliveries.c.finished_seq).where(_of(run_id, trainer), taken)
    theirs = sa.and_(groups.c.run_id == run_id, groups.c.finished_seq.in_(places))
    freed = list(tx.conn.execute(sa.select(groups.c.id).where(theirs, groups.c.holders == 1)).scalars())
    tx.conn.execute(sa.update(groups).where(theirs).values(holders=groups.c.holders - 1))
    handover.take_back(tx, run_id, freed)
    tx.count(run_id, groups_undelivered=len(freed))
    tx.conn.execute(
        sa.update(deliveries)
        .where(_of(run_id, trainer), sa.or_(taken, deliveries.c.state == Handover.LEASED.value))
        .values(state=Handover.RETURNED.value, lease_id=None, checkpoint_seq=None)
    )


def _rebase(tx: Tx, run_id: str, trainer: str, version: int) -> None:
    """Pacing counts from here: groups that are in the checkpoint are done with."""
    done = sa.select(deliveries.c.finished_seq).where(
        _of(run_id, trainer), deliveries.c.state == Handover.COMMITTED.value
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
