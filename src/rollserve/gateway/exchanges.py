"""Requests of a session that are being answered, or whose answer may not have arrived.

A client that lost its connection sends its request again, asking for the same. The generation of the first
goes on for the client's grace, and the second *joins* it, or is *replayed* its answer: the model is asked
once. The same request after its answer has arrived is a new one (an agent may want another answer), as it is
while the first is being answered on a connection that lives. See promise 10 of the design.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Sequence
from typing import Any

from msgspec.structs import replace

from rollserve.dialect.base import Asked, Piece
from rollserve.errors import RollserveError, forget_frames
from rollserve.gateway.forward import Conversation, session_closed
from rollserve.gateway.recording import Answer
from rollserve.gateway.streaming import LetOut
from rollserve.records.base import new_id
from rollserve.records.call import ChatRequest

MOST_LEFT = 64
"""Exchanges of a session that nobody listens to and whose answer has not arrived."""

KEPT_ARRIVED = 4
"""Answers that have arrived and can be had again by a request that is marked as a retry."""

GIVES_UP_S = 0.2
"""A client that gives up closes its connection and sends again at once, in either order."""

PATIENCE_S = 5.0
"""No client gives up earlier."""


class Bell:
    """Wakes one waiter. With ``text`` it wants to hear of text, too."""

    __slots__ = ("_future", "_rung", "text")

    def __init__(self) -> None:
        self._rung = False
        self._future: asyncio.Future[None] | None = None
        self.text = True

    def ring(self, *_: object) -> None:
        self._rung = True
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    async def wait(self, timeout_s: float) -> None:
        """Until it rings, has rung since the last wait, or the time is over."""
        if not self._rung and timeout_s > 0:
            loop = asyncio.get_running_loop()
            self._future = loop.create_future()
            timer = loop.call_later(timeout_s, _over, self._future)
            try:
                await self._future
            finally:
                timer.cancel()
                self._future = None
        self._rung = False


def _over(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Exchange:
    """One request and what is known of its answer: ``pieces`` let out so far by choice, then ``answers`` with
    the ``rest`` of each, or ``error``; from then on ``asked`` is without its messages, which may be large.
    ``stream_id`` is what the first answer's call is named. ``bells`` are
    those who listen now."""

    def __init__(self, key: Hashable, asked: Asked, created_s: int) -> None:
        self.key = key
        self.asked = asked
        self.created_s = created_s
        self.begun_at = asyncio.get_running_loop().time()
        self.admitted = False
        self.arrived = False
        self.pieces: list[tuple[int, Piece]] = []
        self.answers: tuple[Answer, ...] = ()
        self.rest: tuple[list[Piece], ...] = ()
        self.error: RollserveError | None = None
        self.bells: set[Bell] = set()
        self.left = asyncio.Event()
        self.grace: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None
        self._call_ids = tuple(new_id("mc") for _ in range(asked.n))

    @property
    def stream_id(self) -> str:
        return self._call_ids[0]

    @property
    def done(self) -> bool:
        return self.error is not None or bool(self.answers)

    def let_out(self, choice: int, piece: Piece) -> None:
        self.pieces.append((choice, piece))
        self.admitted = True
        for bell in self.bells:
            if bell.text:
                bell.ring()

    def admit(self) -> None:
        if not self.admitted:
            self.admitted = True
            self._ring()

    async def run(self, conversation: Conversation) -> None:
        """Forward it, and keep how that ended."""
        try:
            await self._forward(conversation)
        except RollserveError as error:
            self.error = error
        except asyncio.CancelledError:
            if conversation.ended is None:
                raise
            self.error = session_closed(conversation.ended)
        forget_frames(self.error)
        self.task = None
        self.asked = replace(self.asked, request=ChatRequest(messages=()))
        self._ring()

    async def _forward(self, conversation: Conversation) -> None:
        asked = self.asked
        choices = [_Choice(self, index) for index in range(asked.n)]
        answers = await _all(
            [
                conversation.forward(asked.request, choice if asked.stream else None, call_id=call_id)
                for choice, call_id in zip(choices, self._call_ids, strict=True)
            ]
        )
        if asked.continuable:
            conversation.images.keep(asked.request.pictures)
        pairs = zip(choices, answers, strict=True)
        self.rest = tuple(choice.known.rest(answer.reply.message) for choice, answer in pairs)
        self.answers = answers

    def _ring(self) -> None:
        for bell in self.bells:
            bell.ring()


class _Choice:
    """``gateway.stopping.Listener`` of one of the answers that were asked for."""

    def __init__(self, exchange: Exchange, index: int) -> None:
        self._exchange = exchange
        self._index = index
        self.known = LetOut()

    def admitted(self) -> None:
        self._exchange.admit()

    def let_out(self, piece: Piece) -> None:
        self.known.add(piece)
        self._exchange.let_out(self._index, piece)


async def _all(calls: Sequence[Coroutine[Any, Any, Answer]]) -> tuple[Answer, ...]:
    """Several answers at once; the first failure ends them all."""
    if len(calls) == 1:
        return (await calls[0],)
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return tuple(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Exchanges:
    """Those of one session; ``open`` ones run, or have not arrived. ``own`` starts a task that ends with the
    session."""

    def __init__(self, conversation: Conversation, own: Callable[[Coroutine[Any, Any, None]], Any]) -> None:
        self._conversation = conversation
        self._own = own
        self.open: dict[Exchange, None] = {}
        self._arrived: deque[Exchange] = deque(maxlen=KEPT_ARRIVED)

    async def enter(self, key: Hashable, asked: Asked, bell: Bell, created_s: int) -> Exchange:
        """The exchange that answers a request, found or begun. ``bell`` hears of it until ``leave``. Raises
        ``SessionClosed``."""
        found = self._find(key, asked)
        if found is None and (older := self._waited_for(key)) is not None:
            await _left(older)
            found = self._find(key, asked)
        if found is None:
            found = self._begin(key, asked, created_s)
        if found.grace is not None:
            found.grace.cancel()
            found.grace = None
        found.bells.add(bell)
        found.left.clear()
        return found

    def leave(self, exchange: Exchange, bell: Bell, *, arrived: bool, grace_s: float) -> None:
        """``arrived``: the whole answer has reached this listener's connection."""
        exchange.bells.discard(bell)
        exchange.arrived = exchange.arrived or arrived
        if exchange.bells:
            return
        exchange.left.set()
        if exchange.arrived:
            if self.open.pop(exchange, exchange) is None:
                self._arrived.append(exchange)
        elif exchange in self.open:
            if not exchange.done:
                loop = asyncio.get_running_loop()
                exchange.grace = loop.call_later(grace_s, self._abandon, exchange)
            self._bound()

    @property
    def left(self) -> list[Exchange]:
        """Those nobody listens to, oldest first."""
        return [exchange for exchange in self.open if not exchange.bells]

    def close(self) -> None:
        """The session is over: nothing can be joined any more. What runs is its owner's to end."""
        for exchange in self.open:
            if exchange.grace is not None:
                exchange.grace.cancel()
        self.open.clear()
        self._arrived.clear()

    def _begin(self, key: Hashable, asked: Asked, created_s: int) -> Exchange:
        if self._conversation.ended is not None:
            raise session_closed(self._conversation.ended)
        exchange = Exchange(key, asked, created_s)
        self.open[exchange] = None
        exchange.task = self._own(exchange.run(self._conversation))
        return exchange

    def _find(self, key: Hashable, asked: Asked) -> Exchange | None:
        same = [exchange for exchange in (*self.open, *self._arrived) if exchange.key == key]
        for exchange in same:
            if not exchange.bells and not exchange.arrived:
                return exchange
        newest = max(same, key=lambda exchange: exchange.begun_at, default=None)
        if newest is None or (newest.arrived and newest.error) or not asked.request.hints.get("retry"):
            return None
        return newest

    def _waited_for(self, key: Hashable) -> Exchange | None:
        """The one whose client may be giving up just now."""
        before = asyncio.get_running_loop().time() - PATIENCE_S
        return next((e for e in self.open if e.key == key and not e.done and e.begun_at < before), None)

    def _bound(self) -> None:
        for exchange in self.left[:-MOST_LEFT]:
            self._abandon(exchange)

    def _abandon(self, exchange: Exchange) -> None:
        self.open.pop(exchange, None)
        if exchange.grace is not None:
            exchange.grace.cancel()
            exchange.grace = None
        if exchange.task is not None:
            exchange.task.cancel()


async def _left(exchange: Exchange) -> None:
    """Until nobody listens to it any more, for a moment at most."""
    try:
        async with asyncio.timeout(GIVES_UP_S):
            await exchange.left.wait()
    except TimeoutError:
        return
