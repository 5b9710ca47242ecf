"""The backends of one policy, as one.

A session stays on its backend (prefix cache). A new one goes to the least busy. A backend that fails
some times in a row takes no more calls; its health is asked in the background with back-off, and once
it answers, one trial call at a time goes there until the first succeeds. What this process has seen of
a backend counts, not what the server last heard from other workers; draining and removal are orders.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog

from rollserve.backend.base import Backend, GenerateRequest, Generation, Routed, TokenSink
from rollserve.backend.member import (
    Clock,
    Health,
    LoopClock,
    Member,
    PoolSettings,
    backoff_s,
    wait_any,
)
from rollserve.backend.registry import make_backend
from rollserve.errors import BackendError, BackendUnavailable, RollserveError
from rollserve.records import policy
from rollserve.records.policy import BackendSpec, BackendState

DEAD_AFTER = 2
"""Health checks without an answer, after a failure, until calls in flight are given up."""

HEALTH_S = 30.0

MakeBackend = Callable[[BackendSpec, str], Backend]
Pause = Callable[[], AbstractContextManager[None]]
OnReport = Callable[[str, bool, str], None]
"""Backend id, whether it is well, and why not. Called in the event loop; must not block."""


class _Interrupted(Exception):
    """The member was removed, or found dead, under a call."""


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
        self._watch: asyncio.Task[None] | None = None
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
            if record is None or record.spec != member.record.spec:
                self._remove(member)
            else:
                member.record = record
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
        member = Member(record, backend, self._clock.monotonic())
        self._members[member.id] = member
        if record.state is BackendState.FAILED:
            self._fail(member, record.error or "reported as failed")
        if self._watch is None:
            self._watch = self._own(self._background, self._watch_quiet())

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

    # ── calls

    async def generate(
        self,
        session_id: str,
        request: GenerateRequest,
        on_tokens: TokenSink | None = None,
        *,
        pause: Pause = nullcontext,
    ) -> Routed:
        attempt = _Attempt(session_id, self._clock.monotonic() + self._settings.wait_s, pause)
        while True:
            member = await self._acquire(attempt)
            try:
                generation = await self._try(member, attempt, request, on_tokens)
            except BackendUnavailable as error:
                member.failures += 1
                pause_s = self._unavailable(member, attempt, error)
            except BackendError as error:
                member.failures += 1
                pause_s = self._broken(member, attempt, error)
            except _Interrupted:
                pause_s = self._left(member, attempt)
            else:
                self._succeeded(member, attempt, generation)
                return Routed(generation=generation, backend_id=member.id, info=member.record.info)
            if pause_s > 0:
                with pause():
                    await self._clock.sleep(pause_s)

    async def _acquire(self, attempt: _Attempt) -> Member:
        """A member for the next try. The choice and the count of what is in flight must not be apart by
        an await: ``_try`` enters ``member.call()`` before its first."""
        while True:
            if self._closed:
                raise BackendUnavailable("the pool is closed", operation="pool.generate")
            changed = self._changed
            now = self._clock.monotonic()
            member = self._choose(attempt, now)
            if member is not None:
                self._place(attempt.session_id, member)
                return member
            if now >= attempt.deadline:
                raise self._none_active(attempt)
            rests = [member.rest_until for member in self._members.values() if member.rest_until > now]
            with attempt.pause():
                await wait_any(self._clock, changed, min([attempt.deadline, *rests]) - now)

    def _choose(self, attempt: _Attempt, now: float) -> Member | None:
        able = [member for member in self._members.values() if member.takes(now)]
        fresh = [member for member in able if member.id not in attempt.failed] or able
        if not fresh:
            return None
        least = min(fresh, key=lambda member: (member.in_flight, len(member.sessions)))
        home = self._places.get(attempt.session_id)
        if home is None or home not in fresh:
            return least
        lead = home.in_flight - least.in_flight
        return home if lead <= max(self._settings.imbalance, least.in_flight) else least

    async def _try(
        self, member: Member, attempt: _Attempt, request: GenerateRequest, on_tokens: TokenSink | None
    ) -> Generation:
        if attempt.sent:
            request = msgspec.structs.replace(request, request_id=f"{request.request_id}-{attempt.sent}")
        attempt.sent += 1
        sink = None if on_tokens is None else self._sink(member, attempt, on_tokens)
        if not member.calls:
            member.moved_at = self._clock.monotonic()
        try:
            with member.call() as token:
                try:
                    return await member.backend.generate(request, sink)
                except asyncio.CancelledError:
                    task = asyncio.current_task()
                    if token in member.interrupted and task is not None and task.uncancel() == 0:
                        raise _Interrupted from None
                    raise
        finally:
            if member.removed or member.health is Health.TRIAL:
                self._wake()

    def _sink(self, member: Member, attempt: _Attempt, on_tokens: TokenSink) -> TokenSink:
        def sink(token_ids: list[int], logprobs: list[float]) -> None:
            attempt.handed = True
            member.moved_at = self._clock.monotonic()
            on_tokens(token_ids, logprobs)

        return sink

    # ── how a try ended: each says how long to pause before the next, or raises

    def _succeeded(self, member: Member, attempt: _Attempt, generation: Generation) -> None:
        member.succeeded += 1
        member.generated_tokens += len(generation.token_ids)
        member.moved_at = self._clock.monotonic()
        member.strikes = member.relapses = 0
        if member.health is Health.TRIAL:
            member.health, member.error = Health.OK, None
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
        serves it, it was the backend's, and counts as a strike."""
        attempt.failed[member.id] = error
        if not self._untried(attempt):
            raise error
        return self._again(member, attempt, error)

    def _left(self, member: Member, attempt: _Attempt) -> float:
        why = "was removed" if member.removed else f"stopped answering ({member.error})"
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
        return backoff_s(
            attempt.tries - 1, self._settings.retry_first_s, self._settings.retry_max_s, self._rng
        )

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
            turn = member.relapses + failures
            await self._clock.sleep(backoff_s(turn, settings.probe_first_s, settings.probe_max_s, self._rng))
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
            for member in list(self._members.values()):
                if member.calls and member.moved_at < since and member.health is not Health.FAILED:
                    detail = await self._ask(member)
                    if detail is not None:
                        self._fail(member, detail)

    async def _ask(self, member: Member) -> str | None:
        """None when it is well, else why not. Whatever a third-party backend raises here is an answer:
        it is not well."""
        try:
            async with asyncio.timeout(HEALTH_S):
                health = await member.backend.health()
        except TimeoutError:
            return f"health did not answer within {HEALTH_S:g} s"
        except Exception as error:
            self._log.warning("pool.health_failed", backend=member.id, error=repr(error))
            return str(error) or repr(error)
        return None if health.ok else (health.detail or "not healthy")

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
        """By backend id: ``state``, ``in_flight``, ``sessions``, ``generated_tokens``, ``calls`` that
        succeeded, ``failures``, ``error``."""
        return {member.id: member.stats() for member in self._members.values()}

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

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
