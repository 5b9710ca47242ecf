"""Pages of a table by its ``seq``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import sqlalchemy as sa

from rollserve.errors import InvalidInput
from rollserve.store.base import Page

T = TypeVar("T")


def page(
    conn: sa.Connection,
    query: sa.Select[Any],
    seq: sa.Column[int],
    to_record: Callable[[Any], T],
    *,
    cursor: str | None,
    limit: int,
) -> Page[T]:
    """In order of ``seq``. Raises ``InvalidInput`` for a cursor that no page gave."""
    if limit < 1:
        raise InvalidInput("must be 1 or more", field="limit")
    if cursor is not None:
        if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
            raise InvalidInput("not a cursor of this list", field="cursor")
        query = query.where(seq > int(cursor))
    rows = conn.execute(query.order_by(seq).limit(limit + 1)).all()
    following = str(rows[limit - 1].seq) if len(rows) > limit else None
    return Page(items=[to_record(row) for row in rows[:limit]], next=following)
