"""The backends of one policy, as one.

A session stays on its backend (prefix cache), until that is far busier than is fair. A new one goes to the
least busy, by weight; a new backend begins with a small part of its weight. A backend that fails
some times in a row takes no more calls; its health is asked in the background with back-off, and once
it answers, one trial call at a time goes there until the first succeeds. What this process has seen of
a backend counts, not what the server last heard from other workers; draining and removal are orders.
A generation that says nothing for long is given up; ``stall`` tells a hung engine from a slow one.
While the weights are updated nothing is sent, and nothing is taken for silence. Calls beyond what backends
can do at once (``concurrency``) stand in line; a session whose backend is full goes to another with room.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import structlog

from rollserve.backend import stall
from rollserve.backend.base import (
    Backend,
    BackendHealth,
    GenerateRequest,
    Generation,
    Routed,
    TokenSink,
    unrefunded,
)
from rollserve.backend.concurrency import Concurrency
from rollserve.backend.line import Line
from rollserve.backend.member import (
    Clock,
    Health,
    InFlight,
    LoopClock,
    Member,
    Pause,
    PoolSettings,
    wait_any,
)
from rollserve.backend.registry import make_backend
from rollserve.backoff import backoff_s
from rollserve.errors import BackendError, BackendUnavailable, RollserveError
from rollserve.records import policy
from rollserve.records.policy import BackendSpec, BackendState
from rollserve.records.update import UpdateMode, WeightUpdate

DEAD_AFTER = 2
"""Health checks without an answer, after a failure, until calls in flight are given up."""

HEALTH_S = 30.0

MakeBackend = Callable[[BackendSpec, str], Backend]
Refundable = Callable[[], Callable[[], None]]
OnReport = Callable[[str, bool, str], None]
"""Backend id, whether it is well, and why not. Called in the event loop; must not block."""


class _Interrupted(Exception):
    """The member was removed, or found dead, under a call."""


class _Silent(BackendUnavailable):
    """No sign of life for ``silent_s``. The same backend is not waited for that long again."""


def _same_server(one: BackendSpec, other: BackendSpec) -> bool:
    return one == other.model_copy(update={"weight": one.weight})


def _why_left(member: Member) -> str:
    if member.removed:
        return "was removed"
    if member.record.state is BackendState.FENCED:
        return f"was fenced off ({member.record.error})"
    if member.error is not None:
        return f"stopped answering ({member.error})"
    return "did not stop for an update of the weights"


def _busy(member: Member, share: float) -> tuple[float, float]:
    return member.in_flight / share, (len(member.sessions) + 1) / share


@dataclass(slots=True)
class _Attempt:
    """The tries of one call. ``handed``: tokens have reached the caller, so there is no other try."""

    session_id: str
    deadline: float
    pause: Pause = nullcontext
    tries: int = 0
    sent: int = 0
    handed: bool = False
    failed: dict[str, BackendError] = field(default_factory=dict)


class BackendPool:
    """Implements ``rollserve.backend.base.Pool``. ``update`` may be called at any time in the running
    loop; ``close`` ends calls, probes and connections."""

    def __init__(
        self,
        *,
        model: str,
        make: MakeBackend = make_backend,
        settings: PoolSettings | None = None,
        on_report: OnReport | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.model = model
        self._make = make
        self._settings = settings or PoolSettings()
        self._on_report = on_report
        self._clock = clock or LoopClock()
        self._rng = rng or random.Random()
        self._members: dict[str, Member] = {}
        self._places: dict[str, Member] = {}
        self._changed = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()
        self._retiring: set[asyncio.Task[None]] = set()
        self._held: WeightUpdate | None = None
        self._line = Line()
        self._watched = False
        self._closed = False
        self._log = structlog.get_logger(__name__).bind(model=model)

    # ── membership

    def update(self, backends: list[policy.Backend]) -> None:
        """Take these as the policy's backends: new ones are added, missing ones removed (their calls are
        stopped and sent elsewhere), draining ones finish what they have."""
        if self._closed:
            return
        wanted = {backend.id: backend for backend in backends}
        for member in list(self._members.values()):
            record = wanted.get(member.id)
            if record is None or not _same_server(record.spec, member.record.spec):
                self._remove(member)
            else:
                self._take(member, record)
        for backend_id, record in wanted.items():
            if backend_id not in self._members:
                self._add(record)
        self._wake()

    def _add(self, record: policy.Backend) -> None:
        try:
            backend = self._make(record.spec, self.model)
        except RollserveError as error:
            self._report(record.id, False, str(error))
            return
        member = Member(record, backend, self._clock.monotonic(), self._bound())
        self._members[member.id] = member
        if record.state is BackendState.FAILED:
            self._fail(member, record.error or "reported as failed")
        if not self._watched:
            self._watched = True
            self._own(self._background, self._watch_quiet())
            self._own(self._background, self._watch_silent())
            if self._settings.concurrency != "off":
                self._own(self._background, self._watch_metrics())

    def _bound(self) -> Concurrency | int | None:
        asked = self._settings.concurrency
        if asked == "off":
            return None
        return Concurrency() if asked == "auto" else asked

    def _take(self, member: Member, record: policy.Backend) -> None:
        """What it has in flight when it is fenced off is sent elsewhere."""
        was_fenced = member.record.state is BackendState.FENCED
        member.record = record
        if record.state is BackendState.FENCED:
            member.interrupt()
        elif was_fenced:
            member.since = self._clock.monotonic()

    def _remove(self, member: Member) -> None:
        del self._members[member.id]
        member.removed = True
        if member.reviver is not None:
            member.reviver.cancel()
        for session_id in list(member.sessions):
            self.release(session_id)
        member.interrupt()
        self._own(self._retiring, self._retire(member))

    async def _retire(self, member: Member) -> None:
        """Wait until what was in flight there has stopped, and close the connections."""
        give_up = self._clock.monotonic() + self._settings.close_s
        while member.calls and (left := give_up - self._clock.monotonic()) > 0:
            await wait_any(self._clock, self._changed, left)
        await member.backend.close()

    # ── updates of the weights

    def hold(self, update: WeightUpdate | None) -> None:
        """Send nothing while ``update`` is open (None: go on). What is in flight ends first (*drain*), is
        stopped and ends as an ``abort`` with what it had (*abort*), or stands still in the engine, with its
        caller's time paused (*keep*)."""
        if update is None:
            if self._held is not None:
                self._held = None
                self._go_on()
            return
        if self._held is not None and self._held.id == update.id:
            return
        self._held = update
        for member in self._members.values():
            if update.mode is UpdateMode.KEEP:
                for call in member.calls:
                    call.freeze()
            elif update.mode is UpdateMode.ABORT and member.calls:
                self._own(self._background, self._stop_all(member))

    def _go_on(self) -> None:
        now = self._clock.monotonic()
        for member in self._members.values():
            for call in member.calls:
                call.thaw(now)
        self._wake()

    async def _stop_all(self, member: Member) -> None:
        """Those that have not ended within ``close_s`` are cut, and made again from their start."""
        calls = set(member.calls)
        try:
            await member.backend.abort([call.request_id for call in calls])
        except BackendError as error:
            self._log.warning("pool.abort_failed", backend=member.id, error=str(error))
        else:
            give_up = self._clock.monotonic() + self._settings.close_s
            while calls & member.calls and self._clock.monotonic() < give_up:
                await self._clock.sleep(self._settings.close_s / 100)
        for call in calls & member.calls:
            call.stop("left")

    # ── calls

    async def generate(
        self,
        session_id: str,
        request: GenerateRequest,
        on_tokens: TokenSink | None = None,
        *,
        pause: Pause = nullcontext,
        refundable: Refundable = unrefunded,
    ) -> Routed:
        attempt = _Attempt(session_id, self._clock.monotonic() + self._settings.wait_s, pause)
        while True:
            member = await self._acquire(attempt)
            refund = refundable()
            try:
                generation = await self._try(member, attempt, request, on_tokens)
            except (BackendError, _Interrupted) as error:
                refund()
                pause_s = self._lost(member, attempt, error)
            else:
                self._succeeded(member, attempt, generation)
                return Routed(generation=generation, backend_id=member.id, info=member.record.info)
            if pause_s > 0:
                with pause():
                    await self._clock.sleep(pause_s)

    async def _acquire(self, attempt: _Attempt) -> Member:
        """A member for the next try. The choice and the count of what is in flight must not be apart by
        an await: ``_try`` enters ``member.call()`` before its first."""
        turn = False
        while True:
            if self._closed:
                raise BackendUnavailable("the pool is closed", operation="pool.generate")
            changed = self._changed
            if self._held is not None:
                with attempt.pause():
                    await changed.wait()
                attempt.deadline = self._clock.monotonic() + self._settings.wait_s
                continue
            now = self._clock.monotonic()
            able = self._able(attempt, now)
            if able and (turn or not self._line.waits) and (member := self._choose(attempt, able, now)):
                self._place(attempt.session_id, member)
                return member
            if able:
                with attempt.pause():
                    turn = await self._line.stand(first=turn)
                attempt.deadline = self._clock.monotonic() + self._settings.wait_s
                continue
            if now >= attempt.deadline:
                raise self._none_active(attempt)
            rests = [member.rest_until for member in self._members.values() if member.rest_until > now]
            with attempt.pause():
                await wait_any(self._clock, changed, min([attempt.deadline, *rests]) - now)

    def _able(self, attempt: _Attempt, now: float) -> list[Member]:
        """Those that take calls, were they to have room; untried ones if there are any."""
        able = [member for member in self._members.values() if member.takes(now)]
        return [member for member in able if member.id not in attempt.failed] or able

    def _choose(self, attempt: _Attempt, able: list[Member], now: float) -> Member | None:
        """None when all are full."""
        shares = {each: each.share(now, self._settings.slow_start_s) for each in able if each.room > 0}
        if not shares:
            return None
        least = min(shares, key=lambda each: _busy(each, shares[each]))
        home = self._places.get(attempt.session_id)
        if home is None or home not in shares:
            return least
        fair = least.in_flight * shares[home] / shares[least]
        return home if home.in_flight - fair <= max(self._settings.imbalance, fair) else least

    async def _try(
        self, member: Member, attempt: _Attempt, request: GenerateRequest, on_tokens: TokenSink | None
    ) -> Generation:
        if attempt.sent:
            request = msgspec.structs.replace(request, request_id=f"{request.request_id}-{attempt.sent}")
        attempt.sent += 1
        try:
            now = self._clock.monotonic()
            with member.call(attempt.session_id, request.request_id, attempt.pause, now) as call:
                sink = None if on_tokens is None else self._sink(member, call, attempt, on_tokens)
                try:
                    return await member.backend.generate(request, sink)
                except asyncio.CancelledError:
                    task = asyncio.current_task()
                    if call.cut is not None and task is not None and task.uncancel() == 0:
                        raise self._cut(member, call) from None
                    raise
        finally:
            if member.removed or member.health is Health.TRIAL:
                self._wake()
            else:
                self._let_in()

    def _let_in(self) -> None:
        """Those who stand in line, as far as there is room."""
        if self._line.waits:
            now = self._clock.monotonic()
            rooms = [member.room for member in self._members.values() if member.takes(now)]
            self._line.call(sum(room for room in rooms if room > 0))

    def _sink(self, member: Member, call: InFlight, attempt: _Attempt, on_tokens: TokenSink) -> TokenSink:
        taken = False

        def sink(token_ids: list[int], logprobs: list[float]) -> bool | None:
            nonlocal taken
            if token_ids or taken:
                attempt.handed = True
                member.moved(call, self._clock.monotonic())
            taken = True
            return on_tokens(token_ids, logprobs)

        return sink

    def _cut(self, member: Member, call: InFlight) -> Exception:
        if call.cut == "left":
            return _Interrupted()
        silent_s = self._settings.silent_s
        message = f"backend {member.id} took a call and then said nothing for {silent_s:g} s"
        return _Silent(message, operation="pool.generate")

    # ── how a try ended: each says how long to pause before the next, or raises

    def _lost(self, member: Member, attempt: _Attempt, error: BackendError | _Interrupted) -> float:
        if isinstance(error, _Interrupted):
            return self._left(member, attempt)
        member.failures += 1
        if isinstance(error, _Silent):
            self._strike(member, error)
        elif isinstance(error, BackendUnavailable):
            return self._unavailable(member, attempt, error)
        return self._broken(member, attempt, error)

    def _succeeded(self, member: Member, attempt: _Attempt, generation: Generation) -> None:
        member.succeeded += 1
        member.generated_tokens += len(generation.token_ids)
        member.moved_at = self._clock.monotonic()
        member.strikes = member.relapses = 0
        if member.health is Health.TRIAL:
            member.health, member.error, member.since = Health.OK, None, member.moved_at
            self._wake()
        for backend_id, error in attempt.failed.items():
            other = self._members.get(backend_id)
            if other is not None and other is not member and not isinstance(error, BackendUnavailable):
                self._strike(other, error)

    def _unavailable(self, member: Member, attempt: _Attempt, error: BackendUnavailable) -> float:
        """Busy (it says when to come back): it rests, and that is no failure. Otherwise a strike."""
        now = self._clock.monotonic()
        if error.retry_after_s is None:
            self._strike(member, error)
            return self._again(member, attempt, error)
        if attempt.handed:
            raise error
        member.rest_until = now + min(error.retry_after_s, self._settings.busy_max_s)
        return 0.0

    def _broken(self, member: Member, attempt: _Attempt, error: BackendError) -> float:
        """It answered, and wrongly: the request's fault or the backend's. Where another backend then
        serves it, it was the backend's, and counts as a strike. Tried elsewhere only."""
        attempt.failed[member.id] = error
        if not self._untried(attempt):
            raise error
        return self._again(member, attempt, error)

    def _left(self, member: Member, attempt: _Attempt) -> float:
        why = _why_left(member)
        if attempt.handed:
            message = f"backend {member.id} {why} in the middle of an answer"
            raise BackendUnavailable(message, operation="pool.generate")
        attempt.deadline = self._clock.monotonic() + self._settings.wait_s
        return 0.0

    def _again(self, member: Member, attempt: _Attempt, error: BackendError) -> float:
        """Raises when there is no other try. Another backend is tried at once, the same after a
        jittered back-off."""
        attempt.failed[member.id] = error
        attempt.tries += 1
        if attempt.handed or attempt.tries >= self._settings.max_tries:
            raise error
        attempt.deadline = self._clock.monotonic() + self._settings.wait_s
        if self._untried(attempt):
            return 0.0
        return self._backoff_s(attempt.tries, self._settings.retry_first_s, self._settings.retry_max_s)

    def _backoff_s(self, failures: int, first_s: float, max_s: float) -> float:
        return backoff_s(failures, first_s, max_s, jitter=self._rng.random())

    def _untried(self, attempt: _Attempt) -> bool:
        now = self._clock.monotonic()
        return any(member.takes(now) and member.id not in attempt.failed for member in self._members.values())

    def _none_active(self, attempt: _Attempt) -> BackendUnavailable:
        if not self._members:
            message = f"no backend serves {self.model!r}"
        else:
            states = [
                f"{member.id}: {member.stats()['state']}" + (f" ({member.error})" if member.error else "")
                for member in self._members.values()
            ]
            message = f"no backend of {self.model!r} took the call within {self._settings.wait_s:g} s; " + (
                "; ".join(states)
            )
        return BackendUnavailable(message, operation="pool.generate")

    # ── failure and recovery

    def _strike(self, member: Member, error: BackendError) -> None:
        member.strikes += 1
        if member.health is Health.TRIAL:
            member.relapses += 1
        if member.health is Health.TRIAL or member.strikes >= self._settings.strikes_to_fail:
            self._fail(member, str(error))

    def _fail(self, member: Member, detail: str) -> None:
        if member.removed or member.health is Health.FAILED:
            return
        member.health, member.error = Health.FAILED, detail
        self._report(member.id, False, detail)
        member.reviver = self._own(self._background, self._revive(member))
        self._wake()

    async def _revive(self, member: Member) -> None:
        """Ask until its health answers. Calls that still wait on a backend that has twice not answered
        wait in vain: they are sent elsewhere."""
        failures = 0
        while True:
            settings = self._settings
            turn = member.relapses + failures + 1
            await self._clock.sleep(self._backoff_s(turn, settings.probe_first_s, settings.probe_max_s))
            detail = await self._ask(member)
            if detail is None:
                break
            member.error = detail
            failures += 1
            if failures == DEAD_AFTER:
                member.interrupt()
        member.health, member.strikes, member.rest_until = Health.TRIAL, 0, self._clock.monotonic()
        self._report(member.id, True, "")
        self._wake()

    async def _watch_quiet(self) -> None:
        """A backend that hangs fails no call: look at those where nothing has moved for long."""
        while True:
            await self._clock.sleep(self._settings.quiet_s / 2)
            since = self._clock.monotonic() - self._settings.quiet_s
            for member in list(self._members.values()) if self._held is None else ():
                if member.calls and member.moved_at < since and member.health is not Health.FAILED:
                    detail = await self._ask(member)
                    if detail is not None:
                        self._fail(member, detail)

    async def _watch_silent(self) -> None:
        """Wakes when the call that has said nothing for longest may be due; a new one is due later."""
        silent_s = self._settings.silent_s
        while True:
            now = self._clock.monotonic()
            oldest = now
            for call in (call for member in self._members.values() for call in member.calls):
                if self._held is not None:
                    continue
                if call.moved_at + silent_s <= now:
                    call.stop("silent")
                else:
                    oldest = min(oldest, call.moved_at)
            await self._clock.sleep(max(oldest + silent_s - now, silent_s / 1000))

    async def _watch_metrics(self) -> None:
        """Feed the bounds of backends that are at work; a backend that has rested may have room again."""
        while True:
            await self._clock.sleep(self._settings.metrics_s)
            if self._held is None:
                busy = [m for m in self._members.values() if m.calls and m.health is Health.OK]
                if self._settings.concurrency == "auto":
                    await asyncio.gather(*(self._learn(member) for member in busy))
                self._let_in()

    async def _learn(self, member: Member) -> None:
        health = await self._look(member, self._settings.metrics_s)
        if health.ok and self._held is None:
            member.learn(health, self._clock.monotonic())

    async def _ask(self, member: Member) -> str | None:
        """None when it is well, else why not."""
        health = await self._look(member, HEALTH_S)
        return None if health.ok else (health.detail or "not healthy")

    async def _look(self, member: Member, within_s: float) -> BackendHealth:
        """Whatever a third-party backend raises here is an answer: it is not well."""
        try:
            async with asyncio.timeout(within_s):
                return await member.backend.health()
        except TimeoutError:
            return BackendHealth(ok=False, detail=f"health did not answer within {within_s:g} s")
        except Exception as error:
            self._log.warning("pool.health_failed", backend=member.id, error=repr(error))
            return BackendHealth(ok=False, detail=str(error) or repr(error))

    async def stalled(self, session_id: str, run_s: float) -> BackendUnavailable | None:
        if self._held is not None:
            return None
        out = [
            stall.watch(member, call, run_s, self._clock, partial(self._look, member, stall.LOOK_S))
            for member in self._members.values()
            for call in member.calls
            if call.session_id == session_id
        ]
        found = await asyncio.gather(*out)
        return next((error for error in found if error is not None), None)

    def _report(self, backend_id: str, ok: bool, detail: str) -> None:
        self._log.info("pool.backend", backend=backend_id, ok=ok, detail=detail)
        if self._on_report is not None:
            self._on_report(backend_id, ok, detail)

    # ── sessions, numbers, end

    def _place(self, session_id: str, member: Member) -> None:
        home = self._places.get(session_id)
        if home is member:
            return
        if home is not None:
            home.sessions.discard(session_id)
        self._places[session_id] = member
        member.sessions.add(session_id)

    def release(self, session_id: str) -> None:
        member = self._places.pop(session_id, None)
        if member is not None:
            member.sessions.discard(session_id)

    def stats(self) -> dict[str, dict[str, Any]]:
        """By backend id: ``state``, ``in_flight``, ``limit`` (of that), ``sessions``, ``generated_tokens``,
        ``calls`` that succeeded, ``failures``, ``error``, ``held`` (the update for which nothing is sent)."""
        held = {"held": self._held.id if self._held is not None else ""}
        return {member.id: member.stats() | held for member in self._members.values()}

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._line.dismiss()

    def _own(self, tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    async def close(self) -> None:
        """Stop every call (they raise ``BackendUnavailable``), end probes, close connections."""
        self._closed = True
        for member in list(self._members.values()):
            self._remove(member)
        self._wake()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, *self._retiring, return_exceptions=True)
