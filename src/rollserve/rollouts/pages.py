"""Lists that are needed whole, page by page."""

from __future__ import annotations

from typing import Protocol, TypeVar

from rollserve.store.values import Page

T = TypeVar("T")

_PAGE = 1000


class Listed(Protocol[T]):
    """A paged list of the store."""

    async def __call__(self, *, cursor: str | None, limit: int) -> Page[T]: ...


async def every(listed: Listed[T]) -> list[T]:
    """All of it: only for lists that are bounded by what they are of."""
    found: list[T] = []
    cursor: str | None = None
    while True:
        page = await listed(cursor=cursor, limit=_PAGE)
        found += page.items
        if page.next is None:
            return found
        cursor = page.next
