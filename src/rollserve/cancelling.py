"""What a cancel must not cut short, and what becomes of tasks that several wait for, or nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")


async def uninterrupted(work: Awaitable[T]) -> T:
    """Run ``work`` to its end even when the awaiting task is cancelled, then pass the cancel on.

    For releases: ``work`` must have its own deadline.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # retrieved: the cancel is the news
        raise cancelled
    return task.result()


def unheard(task: asyncio.Task[Any]) -> None:
    """For ``add_done_callback``: nobody waits for the task, and that it failed is no news."""
    if not task.cancelled():
        task.exception()


def failed(task: asyncio.Task[Any]) -> bool:
    """Of work that all who ask share: it came to nothing, and the next who asks begins it again."""
    return task.done() and (task.cancelled() or task.exception() is not None)
