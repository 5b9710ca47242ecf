"""The backends of one policy, as one: its members, and the tries of a call.

A call goes where ``choosing`` says; how well backends are is for ``watching``; ``holding`` stops all for an
update of the weights. What this process has seen of a backend counts, not what the server last heard from
other workers; draining and removal are orders. Calls beyond what backends can do at once (``concurrency``)
stand in ``line``, which ``admitting`` keeps moving; one whose session has a backend waits for that a while
(``homing``).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import msgspec

from rollserve.backend import latency
from rollserve.backend.admitting import Admitting
from rollserve.backend.base import (
    Backend,
    GenerateRequest,
    Generation,
    Routed,
    TokenSink,
    unrefunded,
)
from rollserve.backend.choosing import Choosing
from rollserve.backend.concurrency import Concurrency
from rollserve.backend.holding import Holding
from rollserve.backend.homing import Patience, sampled
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
from rollserve.backend.roster import OnReport, Roster
from rollserve.backend.tries import Interrupted, Silent, Tries, why_left
from rollserve.backend.watching import Watching
from rollserve.errors import BackendError, BackendUnavailable, RollserveError
from rollserve.records import policy
from rollserve.records.policy import BackendSpec, BackendState
from rollserve.records.update import WeightUpdate

MakeBackend = Callable[[BackendSpec, str], Backend]
Refundable = Callable[[], Callable[[], None]]


def _same_server(one: BackendSpec, other: BackendSpec) -> bool:
    return one == other.model_copy(update={"weight": one.weight})


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
        self._roster = Roster(
            model=model,
            settings=settings or PoolSettings(),
            clock=clock or LoopClock(),
            on_report=on_report,
        )
        self._choosing = Choosing(self._roster)
        self._admitting = Admitting(self._roster, self._choosing)
        self._watching = Watching(self._roster, rng or random.Random(), self._admitting.let_in)
        self._holding = Holding(self._roster)
        self._retiring: set[asyncio.Task[None]] = set()
        self._closed = False

    # ── membership

    def update(self, backends: list[policy.Backend]) -> None:
        """Take these as the policy's backends: new ones are added, missing ones removed (their calls are
        stopped and sent elsewhere), draining ones finish what they have."""
        if self._closed:
            return
        wanted = {backend.id: backend for backend in backends}
        for member in list(self._roster.members.values()):
            record = wanted.get(member.id)
            if record is None or not _same_server(record.spec, member.record.spec):
                self._remove(member)
            else:
                self._take(member, record)
        for backend_id, record in wanted.items():
            if backend_id not in self._roster.members:
                self._add(record)
        self._roster.wake()

    def _add(self, record: policy.Backend) -> None:
        try:
            backend = self._make(record.spec, self.model)
        except RollserveError as error:
            self._roster.report(record.id, False, str(error))
            return
        member = Member(record, backend, self._roster.clock.monotonic(), self._bound())
        self._roster.members[member.id] = member
        if record.state is BackendState.FAILED:
            self._watching.fail(member, record.error or "reported as failed")
        self._watching.begin()

    def _bound(self) -> Concurrency | int | None:
        asked = self._roster.settings.concurrency
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
            member.since = self._roster.clock.monotonic()

    def _remove(self, member: Member) -> None:
        del self._roster.members[member.id]
        member.removed = True
        if member.reviver is not None:
            member.reviver.cancel()
        for session_id in list(member.sessions):
            self.release(session_id)
        member.interrupt()
        self._roster.own(self._retire(member), self._retiring)

    async def _retire(self, member: Member) -> None:
        """Wait until what was in flight there has stopped, and close the connections."""
        give_up = self._roster.clock.monotonic() + self._roster.settings.close_s
        while member.calls and (left := give_up - self._roster.clock.monotonic()) > 0:
            await wait_any(self._roster.clock, self._roster.changed, left)
        await member.backend.close()

    # ── updates of the weights

    def hold(self, update: WeightUpdate | None) -> None:
        """Send nothing while ``update`` is open (None: go on). What is in flight ends first (*drain*), is
        stopped and ends as an ``abort`` with what it had (*abort*), or stands still in the engine, with its
        caller's time paused (*keep*)."""
        self._holding.hold(update)

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
        attempt = Tries(
            session_id,
            self._roster.clock.monotonic() + self._roster.settings.wait_s,
            pause,
            prompt_tokens=None if request.chat is not None else len(request.token_ids),
            salt=request.cache_salt,
        )
        while True:
            member = await self._acquire(attempt)
            refund = refundable()
            try:
                generation = await self._try(member, attempt, request, on_tokens)
            except (BackendError, Interrupted) as error:
                refund()
                pause_s = self._lost(member, attempt, error)
            else:
                self._succeeded(member, attempt, generation)
                return Routed(generation=generation, backend_id=member.id, info=member.record.info)
            if pause_s > 0:
                with pause():
                    await self._roster.clock.sleep(pause_s)

    async def _acquire(self, attempt: Tries) -> Member:
        """A member for the next try. The choice and the count of what is in flight must not be apart by
        an await: ``_try`` enters ``member.call()`` before its first."""
        while True:
            if self._closed:
                raise BackendUnavailable("the pool is closed", operation="pool.generate")
            changed = self._roster.changed
            if self._roster.held is not None:
                with attempt.pause():
                    await changed.wait()
                attempt.deadline = self._roster.clock.monotonic() + self._roster.settings.wait_s
                attempt.patience = Patience()
                continue
            now = self._roster.clock.monotonic()
            if self._choosing.able(attempt.failed, now):
                if (member := await self._admitting.admit(attempt)) is not None:
                    self._choosing.place(attempt.session_id, member)
                    attempt.patience = Patience()
                    return member
                attempt.deadline = self._roster.clock.monotonic() + self._roster.settings.wait_s
                continue
            if now >= attempt.deadline:
                raise self._none_active(attempt)
            rests = [member.rest_until for member in self._roster.members.values() if member.rest_until > now]
            with attempt.pause():
                await wait_any(self._roster.clock, changed, min([attempt.deadline, *rests]) - now)

    async def _try(
        self, member: Member, attempt: Tries, request: GenerateRequest, on_tokens: TokenSink | None
    ) -> Generation:
        if attempt.sent:
            request = msgspec.structs.replace(request, request_id=f"{request.request_id}-{attempt.sent}")
        attempt.sent += 1
        try:
            now = self._roster.clock.monotonic()
            with member.call(attempt.session_id, request.request_id, attempt.pause, now) as call:
                attempt.call = call
                sink = None if on_tokens is None else self._sink(member, call, attempt, on_tokens)
                try:
                    return await member.backend.generate(request, sink)
                except asyncio.CancelledError:
                    task = asyncio.current_task()
                    if call.cut is not None and task is not None and task.uncancel() == 0:
                        raise self._cut(member, call) from None
                    raise
        finally:
            if member.removed or member.health is not Health.OK:
                self._roster.wake()
            else:
                self._admitting.let_in()

    def _sink(self, member: Member, call: InFlight, attempt: Tries, on_tokens: TokenSink) -> TokenSink:
        taken = False

        def sink(token_ids: list[int], logprobs: list[float]) -> bool | None:
            nonlocal taken
            if token_ids or taken:
                attempt.handed = True
                if token_ids and call.first_at is None:
                    call.first_at = self._roster.clock.monotonic()
                member.moved(call, self._roster.clock.monotonic())
            taken = True
            return on_tokens(token_ids, logprobs)

        return sink

    def _cut(self, member: Member, call: InFlight) -> Exception:
        if call.cut == "left":
            return Interrupted()
        silent_s = self._roster.settings.silent_s
        message = f"backend {member.id} took a call and then said nothing for {silent_s:g} s"
        return Silent(message, operation="pool.generate")

    # ── how a try ended: each says how long to pause before the next, or raises

    def _lost(self, member: Member, attempt: Tries, error: BackendError | Interrupted) -> float:
        if isinstance(error, Interrupted):
            return self._left(member, attempt)
        member.failures += 1
        if isinstance(error, Silent):
            self._watching.strike(member, error)
        elif isinstance(error, BackendUnavailable):
            return self._unavailable(member, attempt, error)
        return self._broken(member, attempt, error)

    def _succeeded(self, member: Member, attempt: Tries, generation: Generation) -> None:
        member.succeeded += 1
        member.generated_tokens += len(generation.token_ids)
        member.moved_at = self._roster.clock.monotonic()
        member.strikes = member.relapses = 0
        self._time(member, attempt.call, generation)
        self._choosing.keep(attempt, member, generation)
        if member.health is Health.TRIAL:
            member.recover(member.moved_at)
            self._roster.wake()
        for backend_id, error in attempt.failed.items():
            other = self._roster.members.get(backend_id)
            if other is not None and other is not member and not isinstance(error, BackendUnavailable):
                self._watching.strike(other, error)

    def _time(self, member: Member, call: InFlight | None, generation: Generation) -> None:
        """How fast it was; a call that stood still for an update says nothing of that."""
        if call is None or call.stood:
            return
        sample = latency.sample(call.started_at, call.first_at, member.moved_at, len(generation.token_ids))
        if member.health is Health.SLOW:
            self._watching.probed(member, sample)
        else:
            member.latency.add(sample)
        member.pace.add(member.moved_at - call.started_at, sampled(generation))

    def _unavailable(self, member: Member, attempt: Tries, error: BackendUnavailable) -> float:
        """Busy (it says when to come back): it rests, and that is no failure. Otherwise a strike."""
        now = self._roster.clock.monotonic()
        if error.retry_after_s is None:
            self._watching.strike(member, error)
            return self._again(member, attempt, error)
        if attempt.handed:
            raise error
        member.rest_until = now + min(error.retry_after_s, self._roster.settings.busy_max_s)
        return 0.0

    def _broken(self, member: Member, attempt: Tries, error: BackendError) -> float:
        """It answered, and wrongly: the request's fault or the backend's. Where another backend then
        serves it, it was the backend's, and counts as a strike. Tried elsewhere only."""
        attempt.failed[member.id] = error
        if not self._untried(attempt):
            raise error
        return self._again(member, attempt, error)

    def _left(self, member: Member, attempt: Tries) -> float:
        why = why_left(member)
        if attempt.handed:
            message = f"backend {member.id} {why} in the middle of an answer"
            raise BackendUnavailable(message, operation="pool.generate")
        attempt.deadline = self._roster.clock.monotonic() + self._roster.settings.wait_s
        return 0.0

    def _again(self, member: Member, attempt: Tries, error: BackendError) -> float:
        """Raises when there is no other try. Another backend is tried at once, the same after a
        jittered back-off."""
        attempt.failed[member.id] = error
        attempt.tries += 1
        if attempt.handed or attempt.tries >= self._roster.settings.max_tries:
            raise error
        attempt.deadline = self._roster.clock.monotonic() + self._roster.settings.wait_s
        if self._untried(attempt):
            return 0.0
        return self._watching.backoff_s(
            attempt.tries, self._roster.settings.retry_first_s, self._roster.settings.retry_max_s
        )

    def _untried(self, attempt: Tries) -> bool:
        now = self._roster.clock.monotonic()
        return any(
            member.takes(now) and member.id not in attempt.failed for member in self._roster.members.values()
        )

    def _none_active(self, attempt: Tries) -> BackendUnavailable:
        if not self._roster.members:
            message = f"no backend serves {self.model!r}"
        else:
            states = [
                f"{member.id}: {member.stats()['state']}" + (f" ({member.error})" if member.error else "")
                for member in self._roster.members.values()
            ]
            message = (
                f"no backend of {self.model!r} took the call within {self._roster.settings.wait_s:g} s; "
                + ("; ".join(states))
            )
        return BackendUnavailable(message, operation="pool.generate")

    async def stalled(self, session_id: str, run_s: float) -> BackendUnavailable | None:
        return await self._watching.stalled(session_id, run_s)

    # ── sessions, numbers, end

    def release(self, session_id: str) -> None:
        self._choosing.release(session_id)

    def stats(self) -> dict[str, dict[str, Any]]:
        """By backend id: ``state``, ``in_flight``, ``limit`` (of that), ``sessions``, ``generated_tokens``,
        ``calls`` that succeeded, ``failures``, ``error``, ``held`` (the update for which nothing is sent)."""
        held = {"held": self._roster.held.id if self._roster.held is not None else ""}
        return {member.id: member.stats() | held for member in self._roster.members.values()}

    async def close(self) -> None:
        """Stop every call (they raise ``BackendUnavailable``), end probes, close connections."""
        self._closed = True
        for member in list(self._roster.members.values()):
            self._remove(member)
        self._roster.wake()
        for task in self._roster.background:
            task.cancel()
        await asyncio.gather(*self._roster.background, *self._retiring, return_exceptions=True)
