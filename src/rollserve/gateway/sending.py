"""An exchange as one connection sees it: its answer sent whole, or as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rollserve.dialect.base import Answered, Dialect, Piece, StreamWriter, TokenLogprob
from rollserve.dialect.clients import Client, Trouble, trouble_of
from rollserve.errors import RollserveError
from rollserve.gateway.asgi import Answering, Gone
from rollserve.gateway.dialects import in_its_words
from rollserve.gateway.exchanges import Bell, Exchange
from rollserve.gateway.recording import Answer

_RETRY_S = 1.0
_SPACE = b" "
"""Of an answer that is JSON, it may come first as often as one likes."""


@dataclass(frozen=True, kw_only=True)
class Waits:
    """``body_s`` is how long a request's body may take to arrive, ``hold_s`` how long a client waits for a
    status while none can be told, ``keep_alive_s`` how long for the next sign of life, ``coalesce_s`` how
    long text is gathered, ``grace_s`` how long a generation goes on with nobody there (None: the client's
    own)."""

    body_s: float = 120.0
    hold_s: float = 10.0
    keep_alive_s: float = 10.0
    coalesce_s: float = 0.02
    grace_s: float | None = None


class Sender:
    """The answer to one request, by one connection. ``send`` returns when it has arrived; raises ``Gone``."""

    def __init__(
        self,
        out: Answering,
        dialect: Dialect,
        client: Client,
        waits: Waits,
        exchange: Exchange,
        bell: Bell,
        gone: asyncio.Future[None],
    ) -> None:
        self._out = out
        self._dialect = dialect
        self._client = client
        self._waits = waits
        self._exchange = exchange
        self._bell = bell
        self._gone = gone

    async def send(self) -> None:
        exchange = self._exchange
        if exchange.asked.stream:
            await self._stream()
        else:
            await self._whole()
        if self._gone.done():
            raise Gone

    async def _whole(self) -> None:
        """Blanks keep a client that waits for long; what fails then has no status any more: the connection
        breaks off, and the client, which asks again, is told."""
        exchange, out = self._exchange, self._out
        self._bell.text = False
        wait_s = self._waits.hold_s
        while await self._not_done(wait_s):
            if not out.started:
                await out.begin(b"application/json")
            await out.part(_SPACE)
            wait_s = self._waits.keep_alive_s
        if exchange.error is not None:
            await self._failed(exchange.error)
            return
        body = self._dialect.whole(exchange.asked, self._answered(), created_s=exchange.created_s)
        if out.started:
            await out.end(body)
        else:
            await out.whole(200, body)

    async def _not_done(self, wait_s: float) -> bool:
        """False when it is done within ``wait_s``."""
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        while not self._exchange.done:
            if self._gone.done():
                raise Gone
            if (left := until - loop.time()) <= 0:
                return True
            await self._bell.wait(left)
        return False

    async def _stream(self) -> None:
        exchange, out = self._exchange, self._out
        writer = self._dialect.writer(
            exchange.asked, stream_id=exchange.stream_id, created_s=exchange.created_s
        )
        sent = await self._text(writer)
        if exchange.error is not None:
            await self._failed(exchange.error, writer)
            return
        parts = [] if out.started else [writer.opening()]
        if not out.started:
            await out.begin(b"text/event-stream")
        parts.append(_written(writer, exchange.pieces[sent:]))
        parts.append(writer.closing(self._answered(), exchange.rest))
        await out.end(b"".join(parts))

    async def _text(self, writer: StreamWriter) -> int:
        """Send what is let out until the exchange is done; how many pieces were."""
        loop, waits, exchange, bell = asyncio.get_running_loop(), self._waits, self._exchange, self._bell
        sent, gather_until, silent_until = 0, 0.0, loop.time() + waits.hold_s
        while not exchange.done:
            if self._gone.done():
                raise Gone
            now, body = loop.time(), b""
            if not self._out.started and (exchange.admitted or now >= silent_until):
                await self._out.begin(b"text/event-stream")
                body = writer.opening()
            if sent < len(exchange.pieces) and now >= gather_until:
                body += _written(writer, exchange.pieces[sent:])
                sent, gather_until = len(exchange.pieces), now + waits.coalesce_s
            elif not body and now >= silent_until:
                body = writer.keep_alive()
            if body:
                await self._out.part(body)
                silent_until = now + waits.keep_alive_s
            bell.text = now >= gather_until
            waiting = sent < len(exchange.pieces)
            await bell.wait((gather_until if waiting or not bell.text else silent_until) - loop.time())
        return sent

    async def _failed(self, error: RollserveError, writer: StreamWriter | None = None) -> None:
        status = self._client.status(error)
        if not self._out.started:
            await refuse(self._out, error, self._dialect, self._client)
        elif writer is None or (self._client.drops_streams and status >= 500):
            await self._out.break_off()
            raise Gone
        else:
            told = in_its_words(error, self._dialect)
            bare = self._dialect.name in self._client.bare_errors
            await self._out.end(self._dialect.error(told, status) if bare else writer.failure(told, status))

    def _answered(self) -> list[Answered]:
        logprobs = self._exchange.asked.logprobs
        return [_answered(answer, logprobs) for answer in self._exchange.answers]


async def refuse(
    out: Answering, error: RollserveError, dialect: Dialect, client: Client, status: int | None = None
) -> None:
    """An error's status and body."""
    status = status or client.status(error)
    headers: list[tuple[bytes, bytes]] = []
    retry_s = error.retry_after_s
    if retry_s is None and trouble_of(error) is Trouble.BUSY:
        retry_s = _RETRY_S
    if retry_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, round(retry_s))))
    if status < 500:
        headers.append((b"x-should-retry", b"false"))
    await out.whole(status, dialect.error(in_its_words(error, dialect), status), headers)


def _written(writer: StreamWriter, pieces: Sequence[tuple[int, Piece]]) -> bytes:
    """Neighbours of one kind as one piece."""
    parts = []
    for (choice, kind), group in groupby(pieces, key=lambda each: (each[0], each[1].kind)):
        text = "".join(piece.text for _, piece in group)
        parts.append(writer.piece(Piece(kind, text), choice=choice))
    return b"".join(parts)


def _answered(answer: Answer, logprobs: bool) -> Answered:
    reply, tokens = answer.reply, None
    if logprobs:
        pairs = zip(answer.sampled_ids, answer.logprobs, strict=False)
        tokens = [TokenLogprob(answer.spell(token_id), logprob) for token_id, logprob in pairs]
    return Answered(
        call_id=reply.call_id,
        message=reply.message,
        finish_reason=reply.finish_reason,
        prompt_tokens=reply.prompt_tokens,
        sampled_tokens=reply.sampled_tokens,
        cached_tokens=answer.cached_tokens,
        stopped_by=answer.stopped_by,
        tokens=tokens,
    )
