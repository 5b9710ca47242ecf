"""Cancelling: what is queued ends in the store at once, what runs is stopped by its worker."""

from __future__ import annotations

from dataclasses import dataclass

from rollserve.rollouts.bell import Bell
from rollserve.rollouts.ports import Ports
from rollserve.rollouts.stops import GroupEnds, Stops
from rollserve.rollouts.tally import Tally


@dataclass(frozen=True, kw_only=True)
class Cancelled:
    """``ended`` were queued and are over; ``stopping`` are being stopped by their worker."""

    ended: int
    stopping: int


class Canceller:
    def __init__(
        self,
        ports: Ports,
        stops: Stops,
        ends: GroupEnds,
        tally: Tally,
        *,
        happened: Bell,
    ) -> None:
        self._store = ports.store
        self._stops = stops
        self._tally = tally
        self._ends = ends
        self._happened = happened

    async def cancel(
        self,
        *,
        rollout_id: str | None = None,
        group_id: str | None = None,
        run_id: str | None = None,
        reason: str = "cancelled by request",
    ) -> Cancelled:
        """Exactly one of the ids. What has ended already stays as it is."""
        ended, running = await self._store.cancel_rollouts(
            rollout_id=rollout_id, group_id=group_id, run_id=run_id
        )
        self._stops.stop_rollouts(running, reason)
        self._tally.add("rollouts_cancelled", len(ended))
        for run in {rollout.run_id for rollout in ended} | ({run_id} if run_id else set()):
            self._ends.unknown(run)
        self._happened.ring()
        return Cancelled(ended=len(ended), stopping=len(running))
