"""Pages of a table, by a column that orders its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import sqlalchemy as sa

from rollserve.errors import InvalidInput
from rollserve.store.values import Page

T = TypeVar("T")

_TEXT = "~"


def page(
    conn: sa.Connection,
    query: sa.Select[Any],
    key: sa.Column[Any],
    to_record: Callable[[Any], T],
    *,
    cursor: str | None,
    limit: int,
    newest: bool = False,
) -> Page[T]:
    """In order of ``key`` (``newest``: the last one first), which is among what ``query`` selects and
    differs from row to row there: a number (``seq``) or a text (a name). The cursor is the key of a page's
    last row. Raises ``InvalidInput`` for a cursor that no page gave."""
    if limit < 1:
        raise InvalidInput("must be 1 or more", field="limit")
    if cursor is not None:
        last = _last_seen(key, cursor)
        query = query.where(key < last if newest else key > last)
    rows = conn.execute(query.order_by(key.desc() if newest else key).limit(limit + 1)).all()
    following = _cursor(rows[limit - 1]._mapping[key]) if len(rows) > limit else None
    return Page(items=[to_record(row) for row in rows[:limit]], next=following)


def _cursor(last: int | str) -> str:
    """Texts are marked: a number, or a name somebody types, is no cursor of a list by name."""
    return str(last) if isinstance(last, int) else f"{_TEXT}{last}"


def _last_seen(key: sa.Column[Any], cursor: str) -> int | str:
    if isinstance(key.type, sa.Integer):
        if cursor.isascii() and cursor.isdigit() and len(cursor) < 19:
            return int(cursor)
    elif cursor.startswith(_TEXT):
        return cursor.removeprefix(_TEXT)
    raise InvalidInput("not a cursor of this list", field="cursor")
