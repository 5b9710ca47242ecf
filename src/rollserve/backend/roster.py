"""What the parts of a pool share: its members, the update that is open, and who waits for what."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from rollserve.backend.line import Line
from rollserve.backend.member import Clock, Member, PoolSettings
from rollserve.records.update import WeightUpdate

OnReport = Callable[[str, bool, str], None]
"""Backend id, whether it is well, and why not. Called in the event loop; must not block."""


class Roster:
    """``changed`` is set, and made anew, whenever a call that waits should look again. ``held`` is the update
    for which nothing is sent. ``background`` are tasks that end with the pool."""

    def __init__(
        self, *, model: str, settings: PoolSettings, clock: Clock, on_report: OnReport | None
    ) -> None:
        self.model = model
        self.settings = settings
        self.clock = clock
        self.members: dict[str, Member] = {}
        self.changed = asyncio.Event()
        self.line = Line()
        self.held: WeightUpdate | None = None
        self.background: set[asyncio.Task[None]] = set()
        self.log = structlog.get_logger(__name__).bind(model=model)
        self._on_report = on_report

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()
        self.line.dismiss()

    def report(self, backend_id: str, ok: bool, detail: str) -> None:
        self.log.info("pool.backend", backend=backend_id, ok=ok, detail=detail)
        if self._on_report is not None:
            self._on_report(backend_id, ok, detail)

    def own(
        self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]] | None = None
    ) -> asyncio.Task[None]:
        """In the background, unless ``tasks`` are to have it."""
        owner = self.background if tasks is None else tasks
        task = asyncio.create_task(work)
        owner.add(task)
        task.add_done_callback(owner.discard)
        return task
