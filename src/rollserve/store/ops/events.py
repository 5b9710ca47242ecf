"""The numbered log of what happened, bounded."""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa

from rollserve.records.event import Event
from rollserve.store.ops.tx import Tx
from rollserve.store.schema import events

_PRUNE_EVERY = 1000
_TRIED_BYTES = 64 << 10


class EventLog:
    """Writes the events of a transaction and, now and then, forgets the oldest: between ``keep`` and
    ``keep`` + 1000 (or one transaction's worth) remain."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._since_prune = 0

    def write(self, conn: sa.Connection, rows: list[dict[str, Any]]) -> None:
        if not rows:
            return
        conn.execute(sa.insert(events), rows)
        self._since_prune += len(rows)
        if self._since_prune >= _PRUNE_EVERY:
            self._since_prune = 0
            newest = conn.execute(sa.select(sa.func.max(events.c.seq))).scalar_one()
            conn.execute(sa.delete(events).where(events.c.seq <= newest - self._keep))


def try_write(tx: Tx) -> None:
    """Something of a size that needs room, and that nobody sees: it is gone with the transaction."""
    row = {"at": tx.now, "type": "probe", "data": "0" * _TRIED_BYTES}
    made = tx.conn.execute(sa.insert(events).values(row)).inserted_primary_key
    assert made is not None
    tx.conn.execute(sa.delete(events).where(events.c.seq == made.seq))


def list_events(conn: sa.Connection, after: int, limit: int, run_id: str | None) -> list[Event]:
    query = sa.select(events).where(events.c.seq > after).order_by(events.c.seq).limit(max(1, limit))
    if run_id is not None:
        query = query.where(events.c.run_id == run_id)
    return [
        Event(
            seq=row.seq,
            at=row.at,
            type=row.type,
            policy=row.policy,
            run_id=row.run_id,
            group_id=row.group_id,
            rollout_id=row.rollout_id,
            data=msgspec.json.decode(row.data),
        )
        for row in conn.execute(query)
    ]
