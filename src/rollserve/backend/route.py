"""One generation route of a server: send, read (whole or as a stream), stop on cancel.

``vllm`` and ``openai`` differ in the bodies alone; what they share stands here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from rollserve.backend.assembly import Assembly, Piece
from rollserve.backend.base import GenerateRequest, Generation, TokenSink
from rollserve.backend.http import Answer, Http
from rollserve.backend.refusals import refusal

OPERATION = "backend.generate"


class Format(Protocol):
    """The bodies of a route. ``decode`` reads a whole answer or one event of a stream, and raises
    ``BackendError`` for what is neither."""

    path: str

    def encode(self, request: GenerateRequest, *, stream: bool) -> bytes: ...
    def decode(self, body: bytes) -> Piece: ...


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
            else:
                await self._streamed(request, assembly, on_tokens)
        except asyncio.CancelledError:
            await finish_anyway(self._stop(request.request_id))
            raise
        return assembly.finish()

    async def _whole(self, request: GenerateRequest, assembly: Assembly) -> None:
        answer = await self._http.post(self._format.path, self._format.encode(request, stream=False))
        if answer.status != 200:
            raise refusal(answer, operation=OPERATION)
        assembly.add(self._format.decode(answer.body))

    async def _streamed(self, request: GenerateRequest, assembly: Assembly, on_tokens: TokenSink) -> None:
        body = self._format.encode(request, stream=True)
        async with self._http.stream(self._format.path, body) as events:
            if isinstance(events, Answer):
                if events.status != 200:
                    raise refusal(events, operation=OPERATION)
                assembly.add(self._format.decode(events.body), on_tokens)
                return
            async for payload in events:
                assembly.add(self._format.decode(payload), on_tokens)


async def finish_anyway(work: Awaitable[None]) -> None:
    """Await ``work``, which has a deadline of its own, to its end, however often we are cancelled."""
    task = asyncio.ensure_future(work)
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            continue
    task.result()
