"""Groups whose time is up. The dates rest in the store, so a restart forgets none."""

from __future__ import annotations

import logging

from rollserve.rollouts.bell import Bell, heard_by
from rollserve.rollouts.ports import Ports
from rollserve.rollouts.stops import GroupEnds
from rollserve.rollouts.tally import Tally

log = logging.getLogger(__name__)

_RETRY_S = 1.0


class Deadlines:
    """``dated`` is rung when something gets a date; nothing here polls."""

    def __init__(self, ports: Ports, ends: GroupEnds, tally: Tally, *, dated: Bell) -> None:
        self._store = ports.store
        self._clock = ports.clock
        self._ends = ends
        self._tally = tally
        self._dated = dated

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            rung = self._dated.listen()
            try:
                due_s = await self._end_due()
            except Exception:
                log.exception("groups past their deadline could not be ended; again in %g s", _RETRY_S)
                self._tally.add("store_errors")
                due_s = _RETRY_S
            await heard_by(rung, self._clock, due_s)

    async def _end_due(self) -> float | None:
        """In how many seconds to look again by itself."""
        due = await self._store.next_group_due()
        if due is not None and due <= self._clock.now():
            self._ends.tell(await self._store.end_due_groups(self._clock.now()))
            due = await self._store.next_group_due()
        return None if due is None else max(0.0, due - self._clock.now())
