"""What a writing operation works on: its connection, the time, and the events it leaves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa

from rollserve.store.schema import COUNTERS, run_counts

T = TypeVar("T")
CHUNK = 500
"""Values per ``IN (…)`` list: below every database's bound on parameters."""

Bins = dict[tuple[str, str, str], tuple[int, int]]
"""By run, kind and bin: a count and tokens to add."""

_ADD_COUNTS = (
    sa.update(run_counts)
    .where(run_counts.c.run_id == sa.bindparam("counted_run"))
    .values({run_counts.c[name]: run_counts.c[name] + sa.bindparam(f"add_{name}") for name in COUNTERS})
)


class Tx:
    """One operation inside a writer's transaction. Events, and what is added to histograms (``ops.bins``),
    are written with the transaction, after its operations; those of an operation that failed are dropped
    with it."""

    __slots__ = ("bins", "conn", "events", "now")

    def __init__(self, conn: sa.Connection, now: float) -> None:
        self.conn = conn
        self.now = now
        self.events: list[dict[str, Any]] = []
        self.bins: Bins = {}

    def emit(
        self,
        event_type: str,
        *,
        policy: str | None = None,
        run_id: str | None = None,
        group_id: str | None = None,
        rollout_id: str | None = None,
        data: dict[str, Any] | None = None,
    ) -> None:
        self.events.append(
            {
                "at": self.now,
                "type": event_type,
                "policy": policy,
                "run_id": run_id,
                "group_id": group_id,
                "rollout_id": rollout_id,
                "data": to_json(data or {}),
            }
        )

    def count(self, run_id: str, **deltas: int) -> None:
        """Add to the run's counters."""
        values: dict[str, Any] = {f"add_{name}": deltas.pop(name, 0) for name in COUNTERS}
        if deltas:
            raise KeyError(f"no such counters: {', '.join(deltas)}")
        self.conn.execute(_ADD_COUNTS, {"counted_run": run_id, **values})


def to_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def chunked(values: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(values), CHUNK):
        yield values[start : start + CHUNK]
