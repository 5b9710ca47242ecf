"""Delivery by push: what is in the outbox is sent to its run's callback until it is acknowledged.

A URL has so many messages on their way and no more. After a failure it is tried with one message at a time,
ever less often, until it answers again: what can't be reached costs next to nothing, and holds up no other
URL. A message that fails does not hold up those behind it.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial

from rollserve.backoff import backoff_s
from rollserve.errors import LeaseLost, RollserveError, StaleEpoch
from rollserve.records.callback import CallbackMessage, CallbackMessageState, CallbackStatus
from rollserve.rollouts.bell import Bells, heard_by
from rollserve.rollouts.callback_body import body_of
from rollserve.rollouts.delivery import Deliveries
from rollserve.rollouts.patience import patiently
from rollserve.rollouts.ports import Ports, PostAnswer
from rollserve.rollouts.tally import Tally
from rollserve.store.values import CallbackDue, Outgoing, Page, TryEnd
from rollserve.webhooks import signed

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 600.0
LINE_BACKOFF_S = 60.0
"""The longest time for which a URL that fails is left alone."""
MAX_RETRY_AFTER_S = 3600.0
_AT_ONCE = 16
"""Messages on their way, to all URLs together: each holds its group in memory."""
_RETRY_S = 1.0
_SPARE_S = 60.0
"""A lease outlives its try by so much at least."""
GONE = 410


@dataclass(frozen=True, kw_only=True)
class PushBounds:
    """A try waits ``timeout_s`` for its answer, and its group is leased for ``lease_s`` besides, a minute at
    least; a URL is sent ``at_once`` messages. A message is given up after ``tries``, or when it is ``age_s``
    old."""

    timeout_s: float
    lease_s: float
    at_once: int
    tries: int
    age_s: float


def judged(
    answer: PostAnswer | str, sent: Outgoing, bounds: PushBounds, *, now: float, jitter: float
) -> TryEnd:
    """What a try's answer (or why there was none) means for its message."""
    status, error = (None, answer) if isinstance(answer, str) else (answer.status, None)
    if status is not None and 200 <= status < 300:
        return TryEnd(state=CallbackMessageState.SENT, status=status)
    error = error or f"the receiver answered {status}"
    if status == GONE:
        return TryEnd(state=CallbackMessageState.PENDING, due_at=now, status=status, error=error, stop=True)
    tries = sent.tries + 1
    if tries >= bounds.tries or now - sent.created_at >= bounds.age_s:
        return TryEnd(state=CallbackMessageState.DEAD, status=status, error=error)
    wait_s = backoff_s(tries, FIRST_BACKOFF_S, MAX_BACKOFF_S, jitter=jitter)
    asked = None if isinstance(answer, str) else retry_after_s(answer.retry_after, now)
    wait_s = max(wait_s, min(asked or 0.0, MAX_RETRY_AFTER_S))
    return TryEnd(state=CallbackMessageState.PENDING, due_at=now + wait_s, status=status, error=error)


def retry_after_s(value: str | None, now: float) -> float | None:
    """Of a ``Retry-After``: seconds, or a date."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - now)
    except ValueError:
        return None


@dataclass(slots=True)
class _Line:
    """A URL: how many messages are on their way there, failures in a row, when it may be tried again."""

    busy: int = 0
    failures: int = 0
    open_at: float = 0.0

    def places(self, most: int) -> int:
        return (1 if self.failures else most) - self.busy

    def reset(self) -> None:
        self.failures, self.open_at = 0, 0.0


class Callbacks:
    """``finished`` rings when something may have come into the outbox."""

    def __init__(
        self, ports: Ports, bounds: PushBounds, deliveries: Deliveries, tally: Tally, *, finished: Bells
    ) -> None:
        self._store = ports.store
        self._clock = ports.clock
        self._poster = ports.poster
        self._jitter = ports.jitter
        self._bounds = bounds
        self._deliveries = deliveries
        self._tally = tally
        self._finished = finished
        self._lines: dict[str, _Line] = {}
        self._busy = 0

    async def run(self) -> None:
        """Until cancelled; tries that are on their way then are made again at the next start."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                rung = self._finished.any.listen()
                try:
                    due_s = await self._send_due(tasks)
                except Exception:
                    log.exception("callbacks could not be looked at; again in %g s", _RETRY_S)
                    self._tally.add("store_errors")
                    due_s = _RETRY_S
                await heard_by(rung, self._clock, due_s)

    async def _send_due(self, tasks: asyncio.TaskGroup) -> float | None:
        """Start what may start now; in how many seconds to look again by itself."""
        while True:
            dues = sorted(await self._store.callback_dues(), key=lambda due: due.due_at)
            wanted = {due.url for due in dues}
            self._lines = {url: line for url, line in self._lines.items() if line.busy or url in wanted}
            waits_s = [wait_s for due in dues if (wait_s := await self._look(tasks, due)) is not None]
            next_s = min(waits_s, default=None)
            if next_s is None or next_s > 0:
                return next_s

    async def _look(self, tasks: asyncio.TaskGroup, due: CallbackDue) -> float | None:
        """Start the run's next message if it may be. In how many seconds to look again; None: when a try
        ends."""
        line = self._lines.setdefault(due.url, _Line())
        if line.places(self._bounds.at_once) < 1 or self._busy >= _AT_ONCE:
            return None
        wait_s = max(due.due_at, line.open_at) - self._clock.now()
        if wait_s > 0:
            return wait_s
        await self._start(tasks, due, line)
        return 0.0

    async def _start(self, tasks: asyncio.TaskGroup, due: CallbackDue, line: _Line) -> None:
        ttl_s = self._bounds.timeout_s + max(_SPARE_S, self._bounds.lease_s)
        sent = await self._store.take_callback_message(due.run_id, ttl_s=ttl_s, now=self._clock.now())
        if sent is not None:
            line.busy += 1
            self._busy += 1
            tasks.create_task(self._send(sent, line), name=f"callback {sent.message_id}")

    async def _send(self, sent: Outgoing, line: _Line) -> None:
        try:
            end = await self._tried(sent)
            self._note(sent, end, line)
            now = self._clock.now()
            state = await patiently(
                self._clock, partial(self._store.end_callback_message, sent, end, now=now)
            )
            if state is not None:
                self._tally.add(f"callbacks_{state.value}")
        except Exception:  # an edge: one message must not end the others
            log.exception("message %s is tried again after a restart", sent.message_id)
            self._tally.add("store_errors")
        finally:
            line.busy -= 1
            self._busy -= 1
        self._finished.ring(sent.run_id)

    async def _tried(self, sent: Outgoing) -> TryEnd:
        try:
            return await self._try(sent)
        except Exception as error:  # an edge: what a message is made of may be broken
            log.exception("message %s could not be made", sent.message_id)
            return self._judged(f"{type(error).__name__}: {error}", sent)

    def _note(self, sent: Outgoing, end: TryEnd, line: _Line) -> None:
        if end.state is CallbackMessageState.SENT:
            line.reset()
        if end.error is None:
            return
        line.failures += 1
        wait_s = backoff_s(line.failures, FIRST_BACKOFF_S, LINE_BACKOFF_S, jitter=self._jitter())
        line.open_at = self._clock.now() + wait_s
        self._tally.add("callback_failures")
        level = logging.ERROR if end.state is CallbackMessageState.DEAD or end.stop else logging.WARNING
        log.log(level, "message %s, try %d: %s", sent.message_id, sent.tries + 1, end.error)

    async def _try(self, sent: Outgoing) -> TryEnd:
        found = None
        if sent.lease is not None:
            try:
                found = await self._deliveries.fill(sent.lease)
            except (LeaseLost, StaleEpoch):  # it ran out, or its trainer was rewound
                return TryEnd(state=CallbackMessageState.PENDING, due_at=self._clock.now())
            if found.lease is None:
                return TryEnd(state=CallbackMessageState.SKIPPED)
        make = partial(body_of, sent.type, sent.run_id, sent.created_at, sent.data, found)
        body = await asyncio.to_thread(make)
        headers = signed(sent.secret.get_secret_value(), sent.message_id, self._clock.now(), body)
        try:
            answer = await self._poster.post(sent.url, headers, body, self._bounds.timeout_s)
        except RollserveError as error:
            return self._judged(error.message, sent)
        return self._judged(answer, sent)

    def _judged(self, answer: PostAnswer | str, sent: Outgoing) -> TryEnd:
        return judged(answer, sent, self._bounds, now=self._clock.now(), jitter=self._jitter())

    # -- looking, and sending again
    async def status(self, run_id: str) -> CallbackStatus:
        """Raises ``NotFound`` where the run has no callback."""
        return await self._store.callback_status(run_id)

    async def messages(
        self,
        run_id: str,
        *,
        state: CallbackMessageState | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[CallbackMessage]:
        return await self._store.list_callback_messages(run_id, state=state, cursor=cursor, limit=limit)

    async def resend(self, run_id: str, ids: list[str] | None) -> int:
        """Dead messages (None: all of the run's) go out again, and a stopped callback goes on."""
        many = await self._store.resend_callback_messages(run_id, ids, now=self._clock.now())
        for line in self._lines.values():
            line.reset()
        self._finished.ring(run_id)
        return many
