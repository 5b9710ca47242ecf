"""One generation route of a server: send, read (whole or as a stream), stop on cancel.

The kinds differ in the bodies alone; what they share stands here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from rollserve.backend.assembly import Assembly, Piece
from rollserve.backend.base import GenerateRequest, Generation, TokenSink
from rollserve.backend.http import Answer, Http
from rollserve.backend.refusals import refusal
from rollserve.cancelling import uninterrupted

OPERATION = "backend.generate"


class Format(Protocol):
    """The bodies of a route. A ``reader`` reads a whole answer, or the events of one stream in their
    order, and raises ``BackendError`` for what is neither."""

    path: str

    def encode(self, request: GenerateRequest, *, stream: bool) -> bytes: ...
    def reader(self) -> Callable[[bytes], Piece]: ...


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
        assembly.add(self._format.reader()(answer.body))

    async def _streamed(self, request: GenerateRequest, assembly: Assembly, on_tokens: TokenSink) -> bool:
        """Whether the sink had enough before the end; then the connection is closed."""
        body, read = self._format.encode(request, stream=True), self._format.reader()
        async with self._http.stream(self._format.path, body) as events:
            if isinstance(events, Answer):
                if events.status != 200:
                    raise refusal(events, operation=OPERATION)
                return assembly.add(read(events.body), on_tokens)
            on_tokens([], [])
            async for payloads in events:
                before = len(assembly)
                for payload in payloads:
                    assembly.add(read(payload))
                if assembly.hand_over(on_tokens, before):
                    return True
        return False
