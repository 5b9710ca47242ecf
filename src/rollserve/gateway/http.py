"""The gateway over HTTP: a raw ASGI application for agents outside the worker.

Bodies are read raw and decoded once; errors are in OpenAI's form. A client that goes away cancels its
call, which aborts the generation at the backend.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
import structlog

from rollserve.dialect import chat
from rollserve.errors import (
    BackendError,
    BackendUnavailable,
    EpisodeFailure,
    NotFound,
    RollserveError,
    TooLarge,
    Unauthenticated,
)
from rollserve.gateway.forward import Answer
from rollserve.gateway.service import GatewayService
from rollserve.gateway.sessions import GatewaySession
from rollserve.gateway.streaming import AnswerStream, Piece

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

_log = structlog.get_logger(__name__)


class _Gone(Exception):
    """The client has closed its connection; nobody is left to answer."""


class MethodNotAllowed(RollserveError):
    code = "method_not_allowed"
    status = 405


def make_app(
    service: GatewayService, *, max_body_bytes: int = 64 * 1024 * 1024, keep_alive_s: float = 10.0
) -> ASGIApp:
    """The application. A stream's headers are sent with its first text, or after ``keep_alive_s``,
    and a comment line each ``keep_alive_s`` afterwards."""
    return _App(service, max_body_bytes, keep_alive_s)


class _App:
    def __init__(self, service: GatewayService, max_body_bytes: int, keep_alive_s: float) -> None:
        self._service = service
        self._max_body_bytes = max_body_bytes
        self._keep_alive_s = keep_alive_s
        self._routes = {
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/models": ("GET", self._models),
            "/healthz": ("GET", self._healthz),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, _Answering(send))

    async def _http(self, scope: Scope, receive: Receive, out: _Answering) -> None:
        try:
            method, handler = self._route(scope["path"])
            if scope["method"] != method:
                raise MethodNotAllowed(f"use {method}")
            await handler(scope, receive, out)
        except _Gone:
            return
        except RollserveError as error:
            await out.error(error)
        except Exception as error:  # the edge: recorded, and answered as ours
            _log.exception("gateway.request_failed", path=scope["path"])
            await out.error(RollserveError(f"internal error: {type(error).__name__}"))

    def _route(self, path: str) -> tuple[str, Callable[[Scope, Receive, _Answering], Awaitable[None]]]:
        if path.startswith("/s/"):  # a session's own prefix: /s/<name>/v1/…
            path = "/" + path[3:].partition("/")[2]
        found = self._routes.get(path)
        if found is None:
            raise NotFound(f"no such path: {path}")
        return found

    async def _healthz(self, scope: Scope, receive: Receive, out: _Answering) -> None:
        await out.whole(200, b'{"status":"ok"}')

    async def _models(self, scope: Scope, receive: Receive, out: _Answering) -> None:
        model = self._session(scope).model_name
        entry = {"id": model, "object": "model", "created": 0, "owned_by": "rollserve"}
        await out.whole(200, msgspec.json.encode({"object": "list", "data": [entry]}))

    async def _chat(self, scope: Scope, receive: Receive, out: _Answering) -> None:
        session = self._session(scope)
        request = chat.parse_request(await self._body(scope, receive))
        if request.stream:
            await self._stream(session, request, receive, out)
            return
        answer = await _while_connected(session.call(request.request), receive)
        reply = answer.reply
        document = chat.completion(
            call_id=reply.call_id,
            created_s=int(time.time()),
            model=request.model or session.model_name,
            message=reply.message,
            finish=reply.finish_reason,
            prompt_tokens=reply.prompt_tokens,
            sampled_tokens=reply.sampled_tokens,
            tokens=_token_logprobs(session, answer) if request.logprobs else None,
        )
        await out.whole(200, document)

    def _session(self, scope: Scope) -> GatewaySession:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, secret = given.decode("latin-1").partition(" ")
        session = self._service.session(secret.strip()) if kind.lower() == "bearer" else None
        if session is None:
            raise Unauthenticated("no open session has this secret", hint="a session ends with its attempt")
        return session

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        too_large = TooLarge(f"the body is larger than {self._max_body_bytes} bytes", field="body")
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if length.isdigit() and int(length) > self._max_body_bytes:
            raise too_large
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            part: bytes = message.get("body", b"")
            size += len(part)
            if size > self._max_body_bytes:
                raise too_large
            parts.append(part)
            more = message.get("more_body", False)
        return b"".join(parts)

    async def _stream(
        self, session: GatewaySession, request: chat.ChatCall, receive: Receive, out: _Answering
    ) -> None:
        """Text as it comes, then what is left of the answer once it is recorded."""
        pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        stream = AnswerStream(pieces.put_nowait)
        task = asyncio.create_task(_while_connected(session.call(request.request, stream), receive))
        task.add_done_callback(lambda _: pieces.put_nowait(None))
        writer = chat.ChunkWriter(
            stream_id=f"chatcmpl-{session.id}-{len(session.call_ids)}",
            created_s=int(time.time()),
            model=request.model or session.model_name,
            include_usage=request.include_usage,
        )
        try:
            while (piece := await self._next(pieces, out)) is not None:
                await out.part(self._opening(writer, out) + writer.delta(_delta(piece)))
            answer = await task
            opening = self._opening(writer, out)
            logprobs = chat.logprobs_block(_token_logprobs(session, answer)) if request.logprobs else None
            await out.part(opening + _closing(writer, stream, answer, logprobs), last=True)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _next(self, pieces: asyncio.Queue[Piece | None], out: _Answering) -> Piece | None:
        while True:
            try:
                async with asyncio.timeout(self._keep_alive_s):
                    return await pieces.get()
            except TimeoutError:
                await out.part(chat.KEEP_ALIVE)

    @staticmethod
    def _opening(writer: chat.ChunkWriter, out: _Answering) -> bytes:
        """The first chunk says who speaks."""
        if out.opened:
            return b""
        out.opened = True
        return writer.delta({"role": "assistant", "content": ""})


def _delta(piece: Piece) -> dict[str, Any]:
    return {"content" if piece.kind == "content" else "reasoning_content": piece.text}


def _closing(
    writer: chat.ChunkWriter, stream: AnswerStream, answer: Answer, logprobs: dict[str, Any] | None
) -> bytes:
    reply = answer.reply
    parts = [writer.delta(_delta(piece)) for piece in stream.rest(reply.message)]
    if reply.message.tool_calls:
        parts.append(writer.delta({"tool_calls": chat.tool_calls(reply.message, indexed=True)}))
    parts.append(writer.delta({}, finish=reply.finish_reason, logprobs=logprobs))
    parts.append(writer.usage(reply.prompt_tokens, reply.sampled_tokens))
    return b"".join([*parts, chat.DONE])


def _token_logprobs(session: GatewaySession, answer: Answer) -> list[chat.TokenLogprob]:
    text = session.conversation_state.rendering.tokenizer.token_text
    pairs = zip(answer.sampled_ids, answer.logprobs, strict=False)
    return [chat.TokenLogprob(text(token_id), logprob) for token_id, logprob in pairs]


async def _while_connected(call: Awaitable[Answer], receive: Receive) -> Answer:
    """The answer, unless the client goes away first: then the call is cancelled, and has stopped when
    ``_Gone`` is raised."""
    answering = asyncio.ensure_future(call)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            return answering.result()
        raise _Gone
    finally:
        for task in (gone, answering):
            task.cancel()
        await asyncio.gather(gone, answering, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        elif message["type"] == "lifespan.shutdown":
            await send({"type": "lifespan.shutdown.complete"})
            return


def _status(error: RollserveError) -> int:
    """Statuses that make clients do the right thing: try again where that helps (5xx), stop where a
    budget is gone (4xx)."""
    if isinstance(error, BackendUnavailable):
        return 503
    if isinstance(error, BackendError):
        return 502
    if isinstance(error, EpisodeFailure):
        return 400 if error.kind in ("limit", "cancelled") else 500
    return error.status


class _Answering:
    """The answer being sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._started = False
        self.opened = False

    async def whole(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        self._started = True
        head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": head + (headers or [])})
        await self._send({"type": "http.response.body", "body": body})

    async def part(self, body: bytes, *, last: bool = False) -> None:
        if not self._started:
            self._started = True
            headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": not last})

    async def error(self, error: RollserveError) -> None:
        """A status and a body; an event when a stream has begun."""
        status = _status(error)
        document = chat.error_body(error, status)
        if self._started:
            await self.part(chat.event(document), last=True)
            return
        headers: list[tuple[bytes, bytes]] = []
        if error.retry_after_s is not None:
            headers.append((b"retry-after", str(max(1, round(error.retry_after_s))).encode()))
        if isinstance(error, TooLarge):
            headers.append((b"connection", b"close"))
        await self.whole(status, msgspec.json.encode(document), headers)
