"""vLLM's token-in/token-out route ``POST /inference/v1/generate`` (0.32, ``--enable-scale-out``).

``rollserve.localserver`` and ``rollserve.testing.scripted_server`` speak it too.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rollserve.backend import probing
from rollserve.backend.aborting import AbortingBackend, Span, labelled, unreadable
from rollserve.backend.assembly import Assembly, Piece
from rollserve.backend.base import BackendHealth, GenerateRequest, Generation
from rollserve.backend.engines import refuse_router, refuse_without_abort
from rollserve.backend.http import Http
from rollserve.backend.metrics import Metrics, whole
from rollserve.backend.scoring import SCORE_S, PromptLogprobs, of_mappings, refuse_scoring
from rollserve.errors import BackendError, InvalidInput
from rollserve.records.call import SamplingParams
from rollserve.records.policy import BackendInfo

GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
ENGINE_PREFIX = "generate-tokens-"
"""vLLM's engine knows a request of this route by the caller's id with this before it."""

_PROBE_IDS = ([1, 2, 3, 4], [3, 1])
_PROBE_TOKENS = 2
_UNSTRUCTURED = "rollserve-local"
"""Speaks the route, and can't be held to a schema."""

_METRICS = Metrics(
    "vllm:",
    ("num_requests_running", "num_requests_waiting", "generation_tokens_total", "num_preemptions_total"),
    greatest=("kv_cache_usage_perc",),
)


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
    prompt_logprobs: int | None = None
    structured_outputs: dict[str, Any] | None = None


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


_NOTHING = msgspec.Raw(b"null")


class _Choice(msgspec.Struct, frozen=True):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[Span] | None = None
    routed_experts: msgspec.Raw = _NOTHING
    sampling_mask: msgspec.Raw = _NOTHING


class _Answer(msgspec.Struct, frozen=True):
    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None


class _Scored(msgspec.Struct, frozen=True):
    prompt_logprobs: PromptLogprobs | None = None


class _Abort(msgspec.Struct, frozen=True):
    request_ids: list[str]


class GenerateFormat:
    """The bodies of the route."""

    path = GENERATE

    def __init__(self) -> None:
        self._encoder = msgspec.json.Encoder()
        self._decoder = msgspec.json.Decoder(_Answer)

    def encode(
        self, request: GenerateRequest, *, stream: bool, ignore_eos: bool = False, score: bool = False
    ) -> bytes:
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
                prompt_logprobs=0 if score else None,
                structured_outputs=_structured(sampling.json_schema),
            ),
            return_token_ids=True,
            stream=stream,
            cache_salt=request.cache_salt or None,
        )
        return self._encoder.encode(body)

    def reader(self) -> Callable[[bytes], Piece]:
        return self.decode

    def decode(self, body: bytes) -> Piece:
        try:
            answer = self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise unreadable(body, error) from error
        if not answer.choices:
            return Piece([], [], prompt_ids=answer.prompt_token_ids)
        choice = answer.choices[0]
        return Piece(
            token_ids=choice.token_ids or [],
            logprobs=[] if choice.logprobs is None else [one.logprob for one in choice.logprobs.content],
            finish_reason=choice.finish_reason,
            prompt_ids=answer.prompt_token_ids,
            spans=labelled(choice.weight_versions),
            extras=_extras(choice),
        )


def _structured(schema: dict[str, Any] | None) -> dict[str, Any] | None:
    if schema is None:
        return None
    return {"json": schema} if schema else {"json_object": True}


def _extras(choice: _Choice) -> dict[str, bytes]:
    """Opaque arrays, as bytes: base64 text decoded (an ``.npy``), anything else as the JSON it was."""
    found: dict[str, bytes] = {}
    if choice.routed_experts is _NOTHING and choice.sampling_mask is _NOTHING:
        return found
    for name, raw in (("routed_experts", choice.routed_experts), ("sampling_mask", choice.sampling_mask)):
        data = bytes(raw)
        if data == b"null":
            continue
        try:
            found[name] = base64.b64decode(data[1:-1], validate=True) if data[:1] == b'"' else data
        except ValueError:
            found[name] = data
    return found


class VllmBackend(AbortingBackend):
    """``engine`` is what it is called when it does not say."""

    def __init__(self, http: Http, model: str, *, engine: str = "vllm") -> None:
        self._engine = engine
        self._format = GenerateFormat()
        super().__init__(http, model, self._format, _METRICS)

    async def probe(self) -> BackendInfo:
        models = await probing.served_models(self._http, self._model)
        await refuse_router(self._http)
        engine = await probing.engine_name(self._http, self._engine)
        found = [await self._sample(list(ids)) for ids in _PROBE_IDS]
        await refuse_without_abort(self._http, ABORT, _abort_body(["rollserve-probe-none"]))
        mode = probing.logprobs_mode([value for one in found for value in one.logprobs])
        versions = all(one.labels is not None for one in found)
        warnings = [probing.RAW_LOGPROBS] if mode == "raw" else []
        return BackendInfo(
            engine=engine,
            models=[served.id for served in models],
            context_tokens=models[0].context_tokens,
            logprobs_mode=mode,
            reports_versions=versions,
            structured=not engine.startswith(_UNSTRUCTURED),
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
            hint = "start vLLM (0.30 or newer) with --enable-scale-out"
            raise self._no_route(answer, path=GENERATE, absent=(403, 404, 405), hint=hint)
        assembly = Assembly("backend.probe")
        try:
            assembly.add(self._format.decode(answer.body))
            return assembly.finish()
        except BackendError as error:
            message = f"{self._http.url} gave no usable generation: {error.message}"
            raise InvalidInput(message, field="url") from error

    async def abort(self, request_ids: list[str]) -> None:
        if request_ids:
            await self._ask_abort(ABORT, _abort_body(request_ids))

    async def score(self, token_ids: list[int], *, model: str) -> list[float]:
        """A generation of one token, for its prompt's logprobs."""
        if len(token_ids) < 2:
            return []
        request = GenerateRequest(
            request_id=f"rollserve-score-{secrets.token_hex(8)}",
            model=model,
            token_ids=token_ids,
            sampling=SamplingParams(max_tokens=1),
        )
        body = self._format.encode(request, stream=False, score=True)
        answer = await self._http.control(GENERATE, body, timeout_s=SCORE_S)
        if answer.status != 200:
            raise refuse_scoring(answer)
        try:
            given = msgspec.json.decode(answer.body, type=_Scored).prompt_logprobs
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BackendError(f"the answer is no score: {error}", operation="backend.score") from error
        return of_mappings(token_ids, given)

    def _healthy(self, metrics: Mapping[str, float]) -> BackendHealth:
        return BackendHealth(
            ok=True,
            running=whole(metrics.get("num_requests_running")),
            waiting=whole(metrics.get("num_requests_waiting")),
            generated_tokens=whole(metrics.get("generation_tokens_total")),
            kv_use=metrics.get("kv_cache_usage_perc"),
            preemptions=whole(metrics.get("num_preemptions_total")),
        )


def _abort_body(request_ids: list[str]) -> bytes:
    """With and without what vLLM's engine puts before an id."""
    wanted = [*request_ids, *(ENGINE_PREFIX + request_id for request_id in request_ids)]
    return msgspec.json.encode(_Abort(wanted))
