"""A server without a route that aborts by id: ``abort`` and a cancel close the connection."""

from __future__ import annotations

import asyncio

from rollserve.backend import probing
from rollserve.backend.assembly import Assembly
from rollserve.backend.base import BackendHealth, GenerateRequest, Generation, TokenSink
from rollserve.backend.http import Http
from rollserve.backend.refusals import describe
from rollserve.backend.route import OPERATION, Format, Route
from rollserve.errors import BackendError


class ClosingBackend:
    """What such backends share; probing and scoring are their own."""

    def __init__(self, http: Http, model: str, format: Format) -> None:
        self._http = http
        self._model = model
        self._route = Route(http, format, self._closed_is_stopped)
        self._running: dict[str, asyncio.Task[Generation]] = {}

    async def generate(self, request: GenerateRequest, on_tokens: TokenSink | None = None) -> Generation:
        hear = None if request.chat is None else request.chat.hear
        assembly = Assembly(OPERATION, request.sampling.max_tokens, hear)
        inner = asyncio.create_task(self._route.generate(request, on_tokens, assembly))
        self._running[request.request_id] = inner
        try:
            return await inner
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if inner.cancelled() and task is not None and not task.cancelling():
                return assembly.aborted()
            raise
        finally:
            self._running.pop(request.request_id, None)

    async def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if (running := self._running.get(request_id)) is not None:
                running.cancel()

    async def _closed_is_stopped(self, request_id: str) -> None:
        """Nothing more to do: the connection is closed by now."""

    async def health(self) -> BackendHealth:
        """``/health`` where there is one, else the list of models."""
        try:
            answer = await self._http.get("/health")
            if answer.status in (404, 405):
                answer = await self._http.get("/v1/models")
        except BackendError as error:
            return BackendHealth(ok=False, detail=error.message)
        if answer.status == 200:
            return BackendHealth(ok=True)
        return BackendHealth(ok=False, detail=describe(answer))

    async def look(self) -> BackendHealth:
        return await probing.looked_at(self._http, self._model, await self.health())

    async def close(self) -> None:
        await self._http.close()
