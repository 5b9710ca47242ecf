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

from rollserve.errors import InvalidInput, LeaseLost
from rollserve.records.base import new_id
from rollserve.records.delivery import Lease
from rollserve.records.run import RunState, SourceState
from rollserve.store.ops import handover
from rollserve.store.ops.trainers import known_trainer, places_of, stale_epoch
from rollserve.store.ops.tx import Tx, to_json
from rollserve.store.schema import Handover, deliveries, groups, leases, run_counts, runs, sources, trainers
from rollserve.store.values import Handed

_LEASE_AGAIN = (
    sa.update(deliveries)
    .where(
        deliveries.c.run_id == sa.bindparam("of_run"),
        deliveries.c.trainer == sa.bindparam("named"),
        deliveries.c.finished_seq == sa.bindparam("place"),
    )
    .values(state=Handover.LEASED.value, lease_id=sa.bindparam("new_lease"))
)


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
    known = known_trainer(tx, run_id, trainer, epoch)
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
        .where(places_of(known.run_id, known.trainer), deliveries.c.state == Handover.RETURNED.value)
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


def lease_one(
    tx: Tx, run_id: str, trainer: str, group_id: str, *, ttl_s: float, now: float
) -> Lease | float | None:
    """Lease this group of the log, whatever stands before it. A number: until when another lease holds it.
    None: the trainer has it, or it was passed over as too old."""
    known = known_trainer(tx, run_id, trainer, None)
    _give_back_expired(tx, now, leases.c.run_id == run_id, leases.c.trainer == trainer)
    place = tx.conn.execute(sa.select(groups.c.finished_seq).where(groups.c.id == group_id)).scalar_one()
    _reach(tx, known, place)
    row = tx.conn.execute(
        sa.select(deliveries.c.finished_seq, deliveries.c.state, leases.c.expires_at)
        .join_from(deliveries, leases, leases.c.id == deliveries.c.lease_id, isouter=True)
        .where(places_of(run_id, trainer), deliveries.c.finished_seq == place)
    ).one()
    if row.state == Handover.LEASED.value:
        return float(row.expires_at)
    if row.state != Handover.RETURNED.value:
        return None
    lease = Lease(
        id=new_id("lea"),
        run_id=run_id,
        trainer=trainer,
        epoch=known.epoch,
        group_ids=[group_id],
        expires_at=now + ttl_s,
    )
    _write_lease(tx, lease, [row], [])
    return lease


def _reach(tx: Tx, known: Any, place: int) -> None:
    """Places up to ``place`` that the trainer never had stand as given back: none is left out."""
    if place <= known.frontier:
        return
    mine = {"run_id": known.run_id, "trainer": known.trainer}
    fresh = sa.select(
        *(sa.literal(value) for value in (*mine.values(), Handover.RETURNED.value)),
        groups.c.finished_seq,
        groups.c.id,
    ).where(
        groups.c.run_id == known.run_id,
        groups.c.finished_seq > known.frontier,
        groups.c.finished_seq <= place,
    )
    columns = [*mine, "state", "finished_seq", "group_id"]
    tx.conn.execute(sa.insert(deliveries).from_select(columns, fresh))
    of_trainer = sa.and_(trainers.c.run_id == known.run_id, trainers.c.trainer == known.trainer)
    tx.conn.execute(sa.update(trainers).where(of_trainer).values(frontier=place))


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
        raise stale_epoch(row.trainer, row.epoch, row.trainer_epoch)
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
    held = sa.select(deliveries.c.finished_seq).where(
        places_of(run_id, trainer), deliveries.c.state.in_(states)
    )
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
