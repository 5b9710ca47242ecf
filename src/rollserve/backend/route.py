"""One generation route of a server: send, read (whole or as a stream), stop on cancel.

The kinds differ in the bodies alone; what they share stands here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from rollserve.backend.assembly import Assembly, Piece
from rollserve.backend.base import GenerateRequest, Generation, TokenSink
from rollserve.backend.http import Answer, Http
from rollserve.backend.refusals import refusal
from rollserve.cancelling import uninterrupted
from rollserve.errors import BackendError

T = TypeVar("T")

OPERATION = "backend.generate"

Reader = Callable[[Sequence[bytes]], Sequence[Piece]]


def each_by(read: Callable[[bytes], Piece]) -> Reader:
    """Reads one body after another."""
    return lambda bodies: [read(body) for body in bodies]


class _Failure(msgspec.Struct, frozen=True):
    error: Any


def decoded(decoder: msgspec.json.Decoder[T], body: bytes, name: str) -> T:
    """A body as the route's form, which is called ``name``. Raises ``BackendError``: the failure that the
    body tells of, or what is wrong with it."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BackendError(_unreadable(body, name, error), operation=OPERATION) from error


def _unreadable(body: bytes, name: str, error: Exception) -> str:
    try:
        failure = msgspec.json.decode(body, type=_Failure).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        start = body[:300].decode(errors="replace")
        return f"the answer is not a {name} ({error}): {start}"
    text = failure.get("message", failure) if isinstance(failure, dict) else failure
    return f"the backend gave up: {text}"


class Format(Protocol):
    """The bodies of a route. A ``reader`` reads a whole answer, or the events of one stream in their
    order, those that came together at once, and raises ``BackendError`` for what is neither."""

    path: str

    def encode(self, request: GenerateRequest, *, stream: bool) -> bytes: ...
    def reader(self) -> Reader: ...


class Route:
    """``stop`` is asked to end a generation at the server when its await is cancelled; closing the
    connection, which comes first, is what most servers take for an abort."""

    def __init__(self, http: Http, format: Format, stop: Callable[[str], Awaitable[None]]) -> None:
        self._http = http
        self._format = format
        self._stop = stop

    async def generate(
        self, request: GenerateRequest, on_tokens: TokenSink | None, assembly: Assembly | None = None
    ) -> Generation:
        assembly = Assembly(OPERATION, request.sampling.max_tokens) if assembly is None else assembly
        try:
            if on_tokens is None:
                await self._whole(request, assembly)
            elif await self._streamed(request, assembly, on_tokens):
                if not assembly.finished:
                    await self._stop(request.request_id)
                return assembly.aborted()
        except asyncio.CancelledError:
            await uninterrupted(self._stop(request.request_id))
            raise
        return assembly.finish()

    async def _whole(self, request: GenerateRequest, assembly: Assembly) -> None:
        answer = await self._http.post(self._format.path, self._format.encode(request, stream=False))
        if answer.status != 200:
            raise refusal(answer, operation=OPERATION)
        for piece in self._format.reader()([answer.body]):
            assembly.add(piece)

    async def _streamed(self, request: GenerateRequest, assembly: Assembly, on_tokens: TokenSink) -> bool:
        """Whether the sink had enough before the end; then the connection is closed."""
        body, read = self._format.encode(request, stream=True), self._format.reader()
        async with self._http.stream(self._format.path, body) as events:
            if isinstance(events, Answer):
                if events.status != 200:
                    raise refusal(events, operation=OPERATION)
                return self._added(read([events.body]), assembly, on_tokens)
            on_tokens([], [])
            async for payloads in events:
                if self._added(read(payloads), assembly, on_tokens):
                    return True
        return False

    def _added(self, pieces: Sequence[Piece], assembly: Assembly, on_tokens: TokenSink) -> bool:
        before = len(assembly)
        for piece in pieces:
            assembly.add(piece)
        return assembly.hand_over(on_tokens, before)
