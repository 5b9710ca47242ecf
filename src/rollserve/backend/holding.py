"""A pool while the weights are updated: nothing is sent, and what is in flight ends, is stopped or stands
still."""

from __future__ import annotations

from rollserve.backend.member import Member
from rollserve.backend.roster import Roster
from rollserve.errors import BackendError
from rollserve.records.update import UpdateMode, WeightUpdate


class Holding:
    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    def hold(self, update: WeightUpdate | None) -> None:
        """Send nothing while ``update`` is open (None: go on). What is in flight ends first (*drain*), is
        stopped and ends as an ``abort`` with what it had (*abort*), or stands still in the engine, with its
        caller's time paused (*keep*)."""
        if update is None:
            if self._roster.held is not None:
                self._roster.held = None
                self._go_on()
            return
        if self._roster.held is not None and self._roster.held.id == update.id:
            return
        self._roster.held = update
        self._roster.wake()
        for member in self._roster.members.values():
            if update.mode is UpdateMode.KEEP:
                for call in member.calls:
                    call.freeze()
            elif update.mode is UpdateMode.ABORT and member.calls:
                self._roster.own(self._stop_all(member))

    def _go_on(self) -> None:
        now = self._roster.clock.monotonic()
        for member in self._roster.members.values():
            for call in member.calls:
                call.thaw(now)
        self._roster.wake()

    async def _stop_all(self, member: Member) -> None:
        """Those that have not ended within ``close_s`` are cut, and made again from their start."""
        calls = set(member.calls)
        try:
            await member.backend.abort([call.request_id for call in calls])
        except BackendError as error:
            self._roster.log.warning("pool.abort_failed", backend=member.id, error=str(error))
        else:
            give_up = self._roster.clock.monotonic() + self._roster.settings.close_s
            while calls & member.calls and self._roster.clock.monotonic() < give_up:
                await self._roster.clock.sleep(self._roster.settings.close_s / 100)
        for call in calls & member.calls:
            call.stop("left")
