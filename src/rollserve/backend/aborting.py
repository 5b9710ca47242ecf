"""A server with a route that aborts by id. vLLM and SGLang have more in common: labels of their weights, and
metrics; they differ in routes, bodies and names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import msgspec
import structlog

from rollserve.backend import probing
from rollserve.backend.base import BackendHealth, GenerateRequest, Generation, TokenSink
from rollserve.backend.http import MAX_METRICS_BYTES, Answer, Http
from rollserve.backend.metrics import Metrics
from rollserve.backend.refusals import describe, refusal
from rollserve.backend.route import Format, Route
from rollserve.errors import BackendError, InvalidInput


class AbortingBackend(ABC):
    """``model`` is the name the server serves the policy's weights under. Probing, scoring and aborting are
    the kind's own; so is what of its ``metrics`` means what."""

    def __init__(self, http: Http, model: str, format: Format, metrics: Metrics) -> None:
        self._http = http
        self._model = model
        self._metrics = metrics
        self._route = Route(http, format, self._stop)
        self._log = structlog.get_logger(__name__).bind(backend=http.url)

    async def generate(self, request: GenerateRequest, on_tokens: TokenSink | None = None) -> Generation:
        return await self._route.generate(request, on_tokens)

    @abstractmethod
    async def abort(self, request_ids: list[str]) -> None: ...

    async def _ask_abort(self, path: str, body: bytes) -> None:
        answer = await self._http.control(path, body, timeout_s=self._http.timeouts.abort_s)
        if answer.status >= 300:
            raise refusal(answer, operation="backend.abort")

    async def _stop(self, request_id: str) -> None:
        """After a cancel. The closed connection stops the generation too, so a failure here is noted
        and no more."""
        try:
            await self.abort([request_id])
        except BackendError as error:
            self._log.warning("backend.abort_failed", request_id=request_id, error=str(error))

    async def health(self) -> BackendHealth:
        try:
            answer = await self._http.get("/health")
            if answer.status != 200:
                return BackendHealth(ok=False, detail=f"/health gave {describe(answer)}")
            answer = await self._http.get("/metrics", max_bytes=MAX_METRICS_BYTES)
        except BackendError as error:
            return BackendHealth(ok=False, detail=error.message)
        return self._healthy(self._metrics.read(answer.body) if answer.status == 200 else {})

    async def look(self) -> BackendHealth:
        return await probing.looked_at(self._http, self._model, await self.health())

    @abstractmethod
    def _healthy(self, metrics: Mapping[str, float]) -> BackendHealth:
        """Over all replicas; there may be no metrics at all."""

    def _no_route(self, answer: Answer, *, path: str, absent: Sequence[int], hint: str) -> InvalidInput:
        """Why a test generation got no answer; ``absent`` are statuses of a server without the route."""
        if answer.status in absent:
            return InvalidInput(
                f"{self._http.url} serves {self._model!r}, but not POST {path}: {describe(answer)}",
                field="url",
                hint=hint,
            )
        if answer.status in (401, 403):
            return InvalidInput(f"{self._http.url} refused the key", field="api_key")
        wrong = refusal(answer, operation="backend.probe")
        return InvalidInput(f"{self._http.url}: a test generation failed: {wrong.message}", field="url")

    async def close(self) -> None:
        await self._http.close()


class Span(msgspec.Struct, frozen=True, gc=False):
    """Sampled tokens ``[start, end)`` of one version of the weights, as both engines tell it."""

    version: str | int | None
    start: int
    end: int


def labelled(spans: Sequence[Span] | None) -> list[tuple[int, int, str]] | None:
    """None when a span has no version, too: the server runs without one."""
    if spans is None or any(span.version is None for span in spans):
        return None
    return [(span.start, span.end, str(span.version)) for span in spans if span.end > span.start]
