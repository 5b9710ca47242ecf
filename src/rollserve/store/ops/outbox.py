"""The outbox: what is to be sent to a run's callback, written in the transaction of the change it tells of.

``callbacks`` has a row for each run with a callback. What is sent, and how it ended, is in ``ops.callbacks``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import sqlalchemy as sa

from rollserve.records.base import new_id
from rollserve.records.callback import CallbackMessageState, CallbackRule, CallbackState
from rollserve.store.ops.tx import Tx, to_json
from rollserve.store.schema import Handover, callback_messages, callbacks, deliveries

_EVENTS = sa.select(callbacks.c.events).where(callbacks.c.run_id == sa.bindparam("of_run"))
_BLANK: dict[str, None] = {"ended_at": None, "lease_id": None, "status": None, "error": None}


def create(tx: Tx, run_id: str, rule: CallbackRule, secret: str) -> None:
    tx.conn.execute(
        sa.insert(callbacks).values(
            run_id=run_id,
            rule=rule.model_dump_json(),
            url=rule.url,
            trainer=rule.trainer,
            events=to_json(rule.events),
            secret=secret,
            state=CallbackState.ACTIVE.value,
            detail="",
        )
    )


def tell(tx: Tx, run_id: str, event_type: str, data: dict[str, Any]) -> None:
    """Something happened to the run."""
    _put(tx, run_id, event_type, [(None, data)])


def tell_groups(tx: Tx, run_id: str, group_ids: Iterable[str]) -> None:
    """These groups entered the run's log, in this order."""
    _put(tx, run_id, "group.finished", [(group_id, {}) for group_id in group_ids])


def _put(tx: Tx, run_id: str, event_type: str, items: list[tuple[str | None, dict[str, Any]]]) -> None:
    wanted = tx.conn.execute(_EVENTS, {"of_run": run_id}).scalar_one_or_none()
    if wanted is None or event_type not in msgspec.json.decode(wanted, type=list[str]):
        return
    common = {
        "run_id": run_id,
        "type": event_type,
        "state": CallbackMessageState.PENDING.value,
        "tries": 0,
        "created_at": tx.now,
        "due_at": tx.now,
    }
    rows = [
        {**common, "id": new_id("msg"), "group_id": group_id, "data": to_json(data)}
        for group_id, data in items
    ]
    tx.conn.execute(sa.insert(callback_messages), rows)


def rewound(tx: Tx, run_id: str, trainer: str) -> None:
    """The trainer's log was set back: what it holds no more is sent again, under its new epoch."""
    mine = sa.select(callbacks.c.run_id).where(callbacks.c.run_id == run_id, callbacks.c.trainer == trainer)
    if tx.conn.execute(mine).first() is None:
        return
    back = sa.select(deliveries.c.group_id).where(
        deliveries.c.run_id == run_id,
        deliveries.c.trainer == trainer,
        deliveries.c.state == Handover.RETURNED.value,
    )
    again = {"state": CallbackMessageState.PENDING.value, "tries": 0, "due_at": tx.now, **_BLANK}
    tx.conn.execute(
        sa.update(callback_messages)
        .where(callback_messages.c.run_id == run_id, callback_messages.c.group_id.in_(back))
        .values(**again)
    )
