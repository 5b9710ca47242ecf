"""Sending what is in the outbox: a message is taken, tried, and acked or tried again.

Taking a message leases its group to the callback's trainer, ending it acks or gives back the lease: the
state of the one and of the other can't come apart. Messages are taken in the order in which they are due,
which is that of the log until one fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from pydantic import SecretStr

from rollserve.errors import LeaseLost, NotFound, StaleEpoch
from rollserve.records.callback import (
    CallbackMessage,
    CallbackMessageState,
    CallbackRule,
    CallbackState,
    CallbackStatus,
)
from rollserve.records.delivery import Lease
from rollserve.store.ops.deliveries import ack_lease, lease_one, nack_lease
from rollserve.store.ops.missing import no_such
from rollserve.store.ops.pages import page
from rollserve.store.ops.tx import Tx
from rollserve.store.schema import Handover, callback_messages, callbacks, leases, runs
from rollserve.store.values import CallbackDue, Outgoing, Page, TryEnd

_SKIPPED_AT_ONCE = 100
"""Looked at in one transaction, so that other writes get their turn in between."""

_SHOWN_ERROR_CHARS = 500
_ACTIVE = callbacks.c.state == CallbackState.ACTIVE.value
_IS_PENDING = callback_messages.c.state == CallbackMessageState.PENDING.value


def dues(conn: sa.Connection) -> list[CallbackDue]:
    first = (
        sa.select(sa.func.min(callback_messages.c.due_at))
        .where(callback_messages.c.run_id == callbacks.c.run_id, _IS_PENDING)
        .scalar_subquery()
    )
    rows = conn.execute(sa.select(callbacks.c.run_id, callbacks.c.url, first.label("due_at")).where(_ACTIVE))
    found = [row for row in rows if row.due_at is not None]
    return [CallbackDue(run_id=row.run_id, url=row.url, due_at=row.due_at) for row in found]


def take(tx: Tx, run_id: str, *, ttl_s: float, now: float) -> Outgoing | None:
    query = sa.select(callbacks).where(callbacks.c.run_id == run_id, _ACTIVE)
    callback = tx.conn.execute(query).one_or_none()
    if callback is None:
        return None
    due = (
        sa.select(callback_messages)
        .where(callback_messages.c.run_id == run_id, _IS_PENDING, callback_messages.c.due_at <= now)
        .order_by(callback_messages.c.due_at, callback_messages.c.seq)
        .limit(1)
    )
    for _ in range(_SKIPPED_AT_ONCE):
        row = tx.conn.execute(due).one_or_none()
        if row is None:
            return None
        lease = None
        if row.group_id is not None:
            found = lease_one(tx, run_id, callback.trainer, row.group_id, ttl_s=ttl_s, now=now)
            if not isinstance(found, Lease):
                _pass(tx, row, found)
                continue
            lease = found
        _set(
            tx,
            row.seq,
            state=CallbackMessageState.SENDING.value,
            lease_id=None if lease is None else lease.id,
        )
        return _outgoing(row, callback, lease)
    return None


def _pass(tx: Tx, row: Any, held_until: float | None) -> None:
    """The group of a message is with the trainer by another way, for now or for good."""
    if held_until is not None:
        _set(tx, row.seq, due_at=held_until)
        return
    why = "the trainer has the group already, or it was too old"
    _set(tx, row.seq, state=CallbackMessageState.SKIPPED.value, ended_at=tx.now, error=why)


def _set(tx: Tx, seq: int, **values: Any) -> None:
    tx.conn.execute(sa.update(callback_messages).where(callback_messages.c.seq == seq).values(**values))


def _outgoing(row: Any, callback: Any, lease: Lease | None) -> Outgoing:
    return Outgoing(
        seq=row.seq,
        message_id=row.id if lease is None else f"{row.id}_{lease.epoch}",
        run_id=row.run_id,
        type=row.type,
        url=callback.url,
        secret=SecretStr(callback.secret),
        data=msgspec.json.decode(row.data, type=dict[str, Any]),
        lease=lease,
        tries=row.tries,
        created_at=row.created_at,
    )


def end(tx: Tx, sent: Outgoing, end: TryEnd, *, now: float) -> CallbackMessageState | None:
    row = tx.conn.execute(
        sa.select(callback_messages).where(callback_messages.c.seq == sent.seq)
    ).one_or_none()
    lease_id = None if sent.lease is None else sent.lease.id
    if row is None or row.state != CallbackMessageState.SENDING.value or row.lease_id != lease_id:
        return None
    state, due_at = end.state, end.due_at
    if lease_id is not None and state is not CallbackMessageState.SKIPPED:
        state, due_at = _settled(tx, lease_id, end, now)
    over = state is not CallbackMessageState.PENDING
    _set(
        tx,
        sent.seq,
        state=state.value,
        tries=row.tries + 1,
        due_at=row.due_at if over else due_at,
        ended_at=now if over else None,
        lease_id=None,
        status=end.status,
        error=None if end.error is None else end.error[:_SHOWN_ERROR_CHARS],
    )
    if end.stop:
        _stop(tx, sent.run_id, end.error or "")
    if state is CallbackMessageState.DEAD:
        told = {"message_id": row.id, "tries": row.tries + 1, "error": end.error}
        tx.emit("callback.dead", run_id=sent.run_id, group_id=row.group_id, data=told)
    return state


def _settled(tx: Tx, lease_id: str, end: TryEnd, now: float) -> tuple[CallbackMessageState, float]:
    """Ack the lease or give it back. What the receiver acked by itself is sent, whatever it answered; what it
    took too late to answer has to go again, as any lease that ran out."""
    try:
        if end.state is CallbackMessageState.SENT:
            ack_lease(tx, lease_id)
            return CallbackMessageState.SENT, now
        if _is_acked(tx, lease_id):
            return CallbackMessageState.SENT, now
        nack_lease(tx, lease_id)
    except (LeaseLost, StaleEpoch):
        return (
            (CallbackMessageState.PENDING, now)
            if end.state is CallbackMessageState.SENT
            else (end.state, end.due_at)
        )
    return end.state, end.due_at


def _is_acked(tx: Tx, lease_id: str) -> bool:
    state = tx.conn.execute(sa.select(leases.c.state).where(leases.c.id == lease_id)).scalar_one_or_none()
    return state == Handover.ACKED.value


def _stop(tx: Tx, run_id: str, why: str) -> None:
    stopped = {"state": CallbackState.STOPPED.value, "detail": why}
    tx.conn.execute(sa.update(callbacks).where(callbacks.c.run_id == run_id).values(**stopped))
    tx.emit("callback.stopped", run_id=run_id, data={"detail": why})


def recover(tx: Tx, now: float) -> int:
    rows = tx.conn.execute(
        sa.select(callback_messages.c.seq, callback_messages.c.lease_id).where(
            callback_messages.c.state == CallbackMessageState.SENDING.value
        )
    ).all()
    again = TryEnd(state=CallbackMessageState.PENDING, due_at=now)
    for row in rows:
        state, due_at = again.state, now
        if row.lease_id is not None:
            state, due_at = _settled(tx, row.lease_id, again, now)
        ended_at = None if state is CallbackMessageState.PENDING else now
        _set(tx, row.seq, state=state.value, due_at=due_at, lease_id=None, ended_at=ended_at)
    return len(rows)


# -- looking, and sending again


def secret(conn: sa.Connection, run_id: str) -> str | None:
    found: str | None = conn.execute(
        sa.select(callbacks.c.secret).where(callbacks.c.run_id == run_id)
    ).scalar_one_or_none()
    return found


def _callback(conn: sa.Connection, run_id: str) -> Any:
    row = conn.execute(sa.select(callbacks).where(callbacks.c.run_id == run_id)).one_or_none()
    if row is None:
        if conn.execute(sa.select(runs.c.id).where(runs.c.id == run_id)).first() is None:
            raise no_such(conn, "run", run_id)
        raise NotFound(f"run {run_id!r} has no callback", field="run_id")
    return row


def status(conn: sa.Connection, run_id: str) -> CallbackStatus:
    row = _callback(conn, run_id)
    counted = conn.execute(
        sa.select(callback_messages.c.state, sa.func.count().label("many"))
        .where(callback_messages.c.run_id == run_id)
        .group_by(callback_messages.c.state)
    )
    many = {each.state: each.many for each in counted}
    return CallbackStatus(
        rule=CallbackRule.model_validate_json(row.rule),
        state=row.state,
        detail=row.detail,
        messages={state.value: many.get(state.value, 0) for state in CallbackMessageState},
    )


def list_messages(
    conn: sa.Connection, run_id: str, state: CallbackMessageState | None, cursor: str | None, limit: int
) -> Page[CallbackMessage]:
    _callback(conn, run_id)
    query = sa.select(callback_messages).where(callback_messages.c.run_id == run_id)
    if state is not None:
        query = query.where(callback_messages.c.state == state.value)
    return page(conn, query, callback_messages.c.seq, _message, cursor=cursor, limit=limit)


def _message(row: Any) -> CallbackMessage:
    return CallbackMessage(**{name: getattr(row, name) for name in CallbackMessage.model_fields})


def resend(tx: Tx, run_id: str, ids: Sequence[str] | None, *, now: float) -> int:
    _callback(tx.conn, run_id)
    dead = sa.and_(
        callback_messages.c.run_id == run_id, callback_messages.c.state == CallbackMessageState.DEAD.value
    )
    if ids is not None:
        dead = sa.and_(dead, callback_messages.c.id.in_(ids))
    again = {"state": CallbackMessageState.PENDING.value, "tries": 0, "due_at": now, "ended_at": None}
    many = tx.conn.execute(sa.update(callback_messages).where(dead).values(**again)).rowcount
    active = {"state": CallbackState.ACTIVE.value, "detail": ""}
    tx.conn.execute(sa.update(callbacks).where(callbacks.c.run_id == run_id).values(**active))
    tx.emit("callback.resent", run_id=run_id, data={"messages": many})
    return many


def counts(conn: sa.Connection) -> dict[str, int]:
    open_states = (CallbackMessageState.PENDING, CallbackMessageState.SENDING, CallbackMessageState.DEAD)
    counted = conn.execute(
        sa.select(callback_messages.c.state, sa.func.count().label("many"))
        .where(callback_messages.c.state.in_([state.value for state in open_states]))
        .group_by(callback_messages.c.state)
    )
    many = {each.state: each.many for each in counted}
    stopped = sa.select(sa.func.count()).select_from(callbacks).where(sa.not_(_ACTIVE))
    found = {state.value: many.get(state.value, 0) for state in open_states}
    return {**found, "stopped": conn.execute(stopped).scalar_one()}
