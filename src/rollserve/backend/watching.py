"""How well the backends of a pool are: failures in a row, health asked in the background, calls that say
nothing, and what the engines' metrics allow."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from functools import partial

from rollserve.backend import latency, stall
from rollserve.backend.base import BackendHealth
from rollserve.backend.member import Health, Member
from rollserve.backend.roster import Roster
from rollserve.backoff import backoff_s
from rollserve.errors import BackendError, BackendUnavailable

DEAD_AFTER = 2
"""Health checks without an answer, after a failure, until calls in flight are given up."""

HEALTH_S = 30.0


Ask = Callable[[], Awaitable[BackendHealth]]


class Watching:
    def __init__(self, roster: Roster, rng: random.Random, let_in: Callable[[], None]) -> None:
        self._roster = roster
        self._rng = rng
        self._let_in = let_in
        self._begun = False

    def begin(self) -> None:
        """Look after the members from now on. Idempotent."""
        if self._begun:
            return
        self._begun = True
        for watch in (self._watch_quiet(), self._watch_silent()):
            self._roster.own(watch)
        if self._roster.settings.concurrency != "off":
            self._roster.own(self._watch_metrics())
        if self._roster.settings.outlier_ratio:
            self._roster.own(self._watch_latency())

    def backoff_s(self, failures: int, first_s: float, max_s: float) -> float:
        return backoff_s(failures, first_s, max_s, jitter=self._rng.random())

    def strike(self, member: Member, error: BackendError) -> None:
        member.strikes += 1
        if member.health is Health.TRIAL:
            member.relapses += 1
        if member.health is Health.TRIAL or member.strikes >= self._roster.settings.strikes_to_fail:
            self.fail(member, str(error))

    def fail(self, member: Member, detail: str) -> None:
        if member.removed or member.health is Health.FAILED:
            return
        member.health, member.error = Health.FAILED, detail
        self._roster.report(member.id, False, detail)
        member.reviver = self._roster.own(self._revive(member))
        self._roster.wake()

    async def _revive(self, member: Member) -> None:
        """Ask until it is well and serves the model: another server may stand there now. Calls that still
        wait on a backend that has twice not answered wait in vain: they are sent elsewhere."""
        failures = 0
        while True:
            settings = self._roster.settings
            turn = member.relapses + failures + 1
            await self._roster.clock.sleep(self.backoff_s(turn, settings.probe_first_s, settings.probe_max_s))
            detail = await self._ask(member, member.backend.look)
            if detail is None:
                break
            member.error = detail
            failures += 1
            if failures == DEAD_AFTER:
                member.interrupt()
        member.health, member.strikes, member.rest_until = Health.TRIAL, 0, self._roster.clock.monotonic()
        self._roster.report(member.id, True, "")
        self._roster.wake()

    async def _watch_quiet(self) -> None:
        """A backend that hangs fails no call: look at those where nothing has moved for long."""
        while True:
            await self._roster.clock.sleep(self._roster.settings.quiet_s / 2)
            since = self._roster.clock.monotonic() - self._roster.settings.quiet_s
            for member in list(self._roster.members.values()) if self._roster.held is None else ():
                if member.calls and member.moved_at < since and member.health is not Health.FAILED:
                    detail = await self._ask(member, member.backend.health)
                    if detail is not None:
                        self.fail(member, detail)

    async def _watch_silent(self) -> None:
        """Wakes when the call that has said nothing for longest may be due; a new one is due later."""
        silent_s = self._roster.settings.silent_s
        while True:
            now = self._roster.clock.monotonic()
            oldest = now
            for call in (call for member in self._roster.members.values() for call in member.calls):
                if self._roster.held is not None:
                    continue
                if call.moved_at + silent_s <= now:
                    call.stop("silent")
                else:
                    oldest = min(oldest, call.moved_at)
            await self._roster.clock.sleep(max(oldest + silent_s - now, silent_s / 1000))

    async def _watch_metrics(self) -> None:
        """Feed the bounds of backends that are at work; a backend that has rested may have room again."""
        while True:
            await self._roster.clock.sleep(self._roster.settings.metrics_s)
            if self._roster.held is None:
                busy = [m for m in self._roster.members.values() if m.calls and m.health is Health.OK]
                if self._roster.settings.concurrency == "auto":
                    await asyncio.gather(*(self._learn(member) for member in busy))
                self._let_in()

    async def _learn(self, member: Member) -> None:
        health = await self._look(member, member.backend.health, self._roster.settings.metrics_s)
        if health.ok and self._roster.held is None:
            member.learn(health, self._roster.clock.monotonic())
            self._let_in()

    async def _ask(self, member: Member, ask: Ask) -> str | None:
        """None when it is well, else why not."""
        health = await self._look(member, ask, HEALTH_S)
        return None if health.ok else (health.detail or "not healthy")

    async def _look(self, member: Member, ask: Ask, within_s: float) -> BackendHealth:
        """Whatever a third-party backend raises here is an answer: it is not well."""
        try:
            async with asyncio.timeout(within_s):
                return await ask()
        except TimeoutError:
            return BackendHealth(ok=False, detail=f"health did not answer within {within_s:g} s")
        except Exception as error:
            self._roster.log.warning("pool.health_failed", backend=member.id, error=repr(error))
            return BackendHealth(ok=False, detail=str(error) or repr(error))

    def _looker(self, member: Member) -> Ask:
        return partial(self._look, member, member.backend.health, stall.LOOK_S)

    async def stalled(self, session_id: str, run_s: float) -> BackendUnavailable | None:
        if self._roster.held is not None:
            return None
        out = [
            stall.watch(member, call, run_s, self._roster.clock, self._looker(member))
            for member in self._roster.members.values()
            for call in member.calls
            if call.session_id == session_id
        ]
        found = await asyncio.gather(*out)
        return next((error for error in found if error is not None), None)

    # ── slow ones

    async def _watch_latency(self) -> None:
        """Now and then: who is far slower than its peers takes no calls for a while."""
        while True:
            await self._roster.clock.sleep(self._roster.settings.outlier_s)
            if self._roster.held is None:
                self.eject_slow()

    def eject_slow(self) -> None:
        """The slowest first, as many as may be out together."""
        settings, now = self._roster.settings, self._roster.clock.monotonic()
        there = [m for m in self._roster.members.values() if not m.ordered_off]
        for member in there:
            if member.health is Health.OK and now - member.since > settings.outlier_max_s:
                member.ejections_in_a_row = 0
        out = sum(1 for member in there if member.health is not Health.OK)
        for member, why in latency.outliers(self._peers(), settings.outlier_ratio):
            if out + 1 > settings.outlier_share * len(there):
                return
            out += 1
            self._eject(member, why, now)

    def _peers(self) -> dict[Member, latency.Latency]:
        members = self._roster.members.values()
        return {each: each.latency for each in members if each.health is Health.OK and not each.ordered_off}

    def _eject(self, member: Member, why: str, now: float) -> None:
        settings = self._roster.settings
        rest_s = min(settings.outlier_max_s, settings.outlier_rest_s * 2.0**member.ejections_in_a_row)
        member.eject(why, now + rest_s)
        self._roster.log.warning("pool.slow", backend=member.id, detail=why, rest_s=rest_s)
        self._roster.wake()

    def probed(self, member: Member, sample: latency.Sample) -> None:
        """The one call that an ejected backend was given has come back."""
        now = self._roster.clock.monotonic()
        why = latency.slow(sample, self._peers().values(), self._roster.settings.outlier_ratio)
        if why is not None:
            self._eject(member, why, now)
            return
        member.recover(now)
        self._roster.wake()
