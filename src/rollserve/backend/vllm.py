"""vLLM's token-in/token-out route ``POST /inference/v1/generate`` (0.32, ``--enable-scale-out``).

``rollserve.localserver`` and ``rollserve.testing.scripted_server`` speak it too.
"""

from __future__ import annotations

import base64
import re
from typing import Any

import msgspec
import structlog

from rollserve.backend import probing
from rollserve.backend.assembly import Assembly, Piece
from rollserve.backend.base import BackendHealth, GenerateRequest, Generation, TokenSink
from rollserve.backend.http import Answer, Http
from rollserve.backend.refusals import describe, refusal
from rollserve.backend.route import OPERATION, Route
from rollserve.errors import BackendError, BackendUnavailable, InvalidInput
from rollserve.records.call import SamplingParams
from rollserve.records.policy import BackendInfo

GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
ENGINE_PREFIX = "generate-tokens-"
"""vLLM's engine knows a request of this route by the caller's id with this before it."""

_PROBE_IDS = ([1, 2, 3, 4], [3, 1])
_PROBE_TOKENS = 2
_GAUGE = re.compile(rb"^vllm:num_requests_(running|waiting)(?:\{[^}]*\})? ([0-9.eE+]+)$", re.MULTILINE)


class _Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """The server's defaults never apply: whatever shapes the distribution is always sent."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    logprobs: int
    detokenize: bool
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class _Body(msgspec.Struct, frozen=True, omit_defaults=True):
    request_id: str
    model: str
    token_ids: list[int]
    sampling_params: _Sampling
    return_token_ids: bool
    stream: bool = False
    cache_salt: str | None = None


class _Logprob(msgspec.Struct, frozen=True, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct, frozen=True):
    content: list[_Logprob]


class _Span(msgspec.Struct, frozen=True, gc=False):
    version: str | int | None
    start: int
    end: int


class _Choice(msgspec.Struct, frozen=True):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None
    routed_experts: msgspec.Raw = msgspec.Raw(b"null")
    sampling_mask: msgspec.Raw = msgspec.Raw(b"null")


class _Answer(msgspec.Struct, frozen=True):
    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None


class _Failure(msgspec.Struct, frozen=True):
    error: Any


class _Abort(msgspec.Struct, frozen=True):
    request_ids: list[str]


class GenerateFormat:
    """The bodies of the route."""

    path = GENERATE

    def __init__(self) -> None:
        self._encoder = msgspec.json.Encoder()
        self._decoder = msgspec.json.Decoder(_Answer)

    def encode(self, request: GenerateRequest, *, stream: bool, ignore_eos: bool = False) -> bytes:
        sampling = request.sampling
        body = _Body(
            request_id=request.request_id,
            model=request.model,
            token_ids=request.token_ids,
            sampling_params=_Sampling(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_tokens,
                logprobs=0,
                detokenize=False,
                seed=sampling.seed,
                stop_token_ids=sampling.stop_token_ids,
                ignore_eos=ignore_eos,
            ),
            return_token_ids=True,
            stream=stream,
            cache_salt=request.cache_salt or None,
        )
        return self._encoder.encode(body)

    def decode(self, body: bytes) -> Piece:
        try:
            answer = self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._unreadable(body, error) from error
        if not answer.choices:
            return Piece([], [], prompt_ids=answer.prompt_token_ids)
        choice = answer.choices[0]
        spans = choice.weight_versions
        return Piece(
            token_ids=choice.token_ids or [],
            logprobs=[] if choice.logprobs is None else [one.logprob for one in choice.logprobs.content],
            finish_reason=choice.finish_reason,
            prompt_ids=answer.prompt_token_ids,
            spans=None if spans is None else _labelled(spans),
            extras=_extras(choice),
        )

    def _unreadable(self, body: bytes, error: Exception) -> BackendError:
        try:
            failure = msgspec.json.decode(body, type=_Failure).error
        except (msgspec.DecodeError, UnicodeDecodeError):
            return BackendError(f"the answer is not a generation: {error}", operation=OPERATION)
        text = failure.get("message", failure) if isinstance(failure, dict) else failure
        return BackendError(f"the backend gave up: {text}", operation=OPERATION)


def _labelled(spans: list[_Span]) -> list[tuple[int, int, str]] | None:
    """None when a span has no version: the server runs without one."""
    if any(span.version is None for span in spans):
        return None
    return [(span.start, span.end, str(span.version)) for span in spans]


def _extras(choice: _Choice) -> dict[str, bytes]:
    """Opaque arrays, as bytes: base64 text decoded (an ``.npy``), anything else as the JSON it was."""
    found = {}
    for name, raw in (("routed_experts", choice.routed_experts), ("sampling_mask", choice.sampling_mask)):
        data = bytes(raw)
        if data == b"null":
            continue
        try:
            found[name] = base64.b64decode(data[1:-1], validate=True) if data[:1] == b'"' else data
        except ValueError:
            found[name] = data
    return found


class VllmBackend:
    """``model`` is the name the server serves the policy's weights under."""

    def __init__(self, http: Http, model: str, *, engine: str = "vllm") -> None:
        self._http = http
        self._model = model
        self._engine = engine
        self._format = GenerateFormat()
        self._route = Route(http, self._format, self._stop)
        self._log = structlog.get_logger(__name__).bind(backend=http.url)

    async def probe(self) -> BackendInfo:
        models = await probing.served_models(self._http, self._model)
        engine = await probing.engine_name(self._http, self._engine)
        found = [await self._sample(list(ids)) for ids in _PROBE_IDS]
        mode = probing.logprobs_mode([value for one in found for value in one.logprobs])
        versions = all(one.labels is not None for one in found)
        warnings = [probing.RAW_LOGPROBS] if mode == "raw" else []
        return BackendInfo(
            engine=engine,
            models=[served.id for served in models],
            context_tokens=models[0].context_tokens,
            logprobs_mode=mode,
            reports_versions=versions,
            warnings=warnings if versions else [*warnings, probing.NO_VERSIONS],
        )

    async def _sample(self, token_ids: list[int]) -> Generation:
        """A tiny greedy generation through the real route; what is wrong with it is the address's
        fault."""
        request = GenerateRequest(
            request_id=f"rollserve-probe-{len(token_ids)}",
            model=self._model,
            token_ids=token_ids,
            sampling=SamplingParams(top_k=1, temperature=0.5, max_tokens=_PROBE_TOKENS),
        )
        body = self._format.encode(request, stream=False, ignore_eos=True)
        try:
            answer = await self._http.control(GENERATE, body, timeout_s=60.0)
        except BackendError as error:
            raise InvalidInput(f"{self._http.url}: {error.message}", field="url") from error
        if answer.status != 200:
            raise self._no_route(answer)
        assembly = Assembly("backend.probe")
        try:
            assembly.add(self._format.decode(answer.body))
            return assembly.finish()
        except BackendError as error:
            message = f"{self._http.url} gave no usable generation: {error.message}"
            raise InvalidInput(message, field="url") from error

    def _no_route(self, answer: Answer) -> InvalidInput:
        if answer.status == 401:
            return InvalidInput(f"{self._http.url} refused the key", field="api_key")
        if answer.status in (403, 404, 405):
            return InvalidInput(
                f"{self._http.url} serves {self._model!r}, but not POST {GENERATE}: {describe(answer)}",
                field="url",
                hint="start vLLM (0.30 or newer) with --enable-scale-out",
            )
        wrong = refusal(answer, operation="backend.probe")
        return InvalidInput(f"{self._http.url}: a test generation failed: {wrong.message}", field="url")

    async def generate(self, request: GenerateRequest, on_tokens: TokenSink | None = None) -> Generation:
        return await self._route.generate(request, on_tokens)

    async def abort(self, request_ids: list[str]) -> None:
        if not request_ids:
            return
        wanted = [*request_ids, *(ENGINE_PREFIX + request_id for request_id in request_ids)]
        body = msgspec.json.encode(_Abort(wanted))
        answer = await self._http.control(ABORT, body, timeout_s=self._http.timeouts.abort_s)
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
            gauges = await self._gauges()
        except BackendUnavailable as error:
            return BackendHealth(ok=False, detail=error.message)
        return BackendHealth(ok=True, running=gauges.get(b"running"), waiting=gauges.get(b"waiting"))

    async def _gauges(self) -> dict[bytes, int]:
        """Summed over engines; empty where there are no metrics."""
        answer = await self._http.get("/metrics")
        sums: dict[bytes, int] = {}
        for name, value in _GAUGE.findall(answer.body) if answer.status == 200 else ():
            sums[name] = sums.get(name, 0) + int(float(value))
        return sums

    async def close(self) -> None:
        await self._http.close()
