"""Sandboxes that outlive their attempt for a while, because somebody wants to look inside."""

from __future__ import annotations

import asyncio
import logging

from rollserve.rollouts.clock import Clock, Deadline
from rollserve.sandbox.base import Sandbox

logger = logging.getLogger(__name__)


class KeptSandboxes:
    """Closes each when its time is up, and all of them at the end."""

    def __init__(self, clock: Clock, close_s: float) -> None:
        self._clock = clock
        self._close_s = close_s
        self._tasks: set[asyncio.Task[None]] = set()

    def keep(self, sandbox: Sandbox, seconds: float) -> None:
        task = asyncio.create_task(self._hold(sandbox, seconds), name=f"kept-{sandbox.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _hold(self, sandbox: Sandbox, seconds: float) -> None:
        try:
            await self._clock.sleep(seconds)
        finally:
            try:
                async with Deadline(self._clock, self._close_s):
                    await sandbox.close()
            except Exception:  # an edge: nobody waits for it; its time to live closes it at the latest
                logger.exception("kept sandbox %s did not close", sandbox.id)
