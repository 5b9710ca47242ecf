"""vLLM's token-in/token-out route ``POST /inference/v1/generate`` (0.32, ``--enable-scale-out``).

``rollserve.localserver`` and ``rollserve.testing.scripted_server`` speak it too.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollserve.backend import probing
from rollserve.backend.aborting import AbortingBackend, Span, labelled
from rollserve.backend.adapters import VLLM as ADAPTERS
from rollserve.backend.adapters import load_unlisted
from rollserve.backend.assembly import Piece, assembled
from rollserve.backend.base import BackendHealth, GenerateRequest, Generation
from rollserve.backend.engines import refuse_router, refuse_without_abort
from rollserve.backend.http import Http
from rollserve.backend.metrics import Metrics, whole
from rollserve.backend.route import Reader, decoded
from rollserve.backend.scoring import SCORE_S, PromptLogprobs, of_mappings, refuse_scoring
from rollserve.errors import BackendError, CannotScore, InvalidInput
from rollserve.records.call import SamplingParams
from rollserve.records.ids import with_ids
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
    sampling_params: _Sampling
    return_token_ids: bool
    stream: bool = False
    cache_salt: str | None = None


class _Logprob(msgspec.Struct, frozen=True, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct, frozen=True):
    content: list[_Logprob]


_NOTHING = msgspec.Raw(b"null")
_MIXED = "\x00mixed"
"""No version."""


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
        self._together = msgspec.json.Decoder(list[_Answer])

    def encode(
        self, request: GenerateRequest, *, stream: bool, ignore_eos: bool = False, score: bool = False
    ) -> bytes:
        sampling = request.sampling
        body = _Body(
            request_id=request.request_id,
            model=request.model,
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
        return with_ids(self._encoder.encode(body), b"token_ids", request.token_ids)

    def reader(self) -> Reader:
        """Of one answer's events in order."""
        return _Reader(self).read

    def decode_all(self, bodies: Sequence[bytes]) -> list[_Answer]:
        """Where one of them can't be read each is read alone, so that it is told by itself."""
        try:
            return self._together.decode(b"[%b]" % b",".join(bodies))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return [self.answer(body) for body in bodies]

    def decode(self, body: bytes) -> Piece:
        return _piece(self.answer(body))

    def answer(self, body: bytes) -> _Answer:
        return decoded(self._decoder, body, "generation")


class _Reader:
    def __init__(self, format: GenerateFormat) -> None:
        self._format = format
        self._seen = 0

    def read(self, bodies: Sequence[bytes]) -> list[Piece]:
        if len(bodies) == 1:
            pieces = [self._format.decode(bodies[0])]
        else:
            answers = self._format.decode_all(bodies)
            run = _run(answers, self._seen)
            pieces = [_piece(answer) for answer in answers] if run is None else [run]
        self._seen += sum(len(piece.token_ids) for piece in pieces)
        return pieces


def _run(answers: Sequence[_Answer], start: int) -> Piece | None:
    """Events that came together as one piece: tokens after the first ``start``, of one version. None where
    they are of several, or hold anything else."""
    ids, logprobs, finish = list[int](), list[float](), None
    version = None
    for at, answer in enumerate(answers):
        if len(answer.choices) != 1 or answer.prompt_token_ids is not None:
            return None
        choice = answer.choices[0]
        before = start + len(ids)
        ids += choice.token_ids or ()
        if choice.logprobs is not None:
            for one in choice.logprobs.content:
                logprobs.append(one.logprob)
        label = _version(choice.weight_versions, before, start + len(ids))
        plain = choice.routed_experts is _NOTHING and choice.sampling_mask is _NOTHING
        if len(ids) != len(logprobs) or not plain or label is _MIXED or (at and label != version):
            return None
        version, finish = label, choice.finish_reason or finish
    spans = None if version is None else [(start, start + len(ids), version)]
    return Piece(ids, logprobs, finish, spans=spans)


def _version(spans: Sequence[Span] | None, start: int, end: int) -> str | None:
    """That of the tokens ``[start, end)``, None where none is told, ``_MIXED`` where it takes more to say."""
    if spans is None:
        return None
    if len(spans) != 1 or spans[0].version is None or (spans[0].start, spans[0].end) != (start, end):
        return _MIXED
    return str(spans[0].version)


def _piece(answer: _Answer) -> Piece:
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
    """``engine`` is what it is called when it does not say. A probe loads the model from ``adapter_path``
    where the server does not list it."""

    def __init__(
        self, http: Http, model: str, *, engine: str = "vllm", adapter_path: str | None = None
    ) -> None:
        self._engine = engine
        self._adapter_path = adapter_path
        self._format = GenerateFormat()
        super().__init__(http, model, self._format, _METRICS)

    async def probe(self) -> BackendInfo:
        if self._adapter_path is not None:
            await load_unlisted(self._http, ADAPTERS, self._model, self._adapter_path)
        models = await probing.served_models(self._http, self._model)
        own = models[0]
        base = next((each for each in models if each.id == own.parent), own)
        await refuse_router(self._http)
        engine = await probing.engine_name(self._http, self._engine)
        found = [await self._sample(list(ids)) for ids in _PROBE_IDS]
        await refuse_without_abort(self._http, ABORT, _abort_body(["rollserve-probe-none"]))
        mode = probing.logprobs_mode([value for one in found for value in one.logprobs])
        adapter = own.parent is not None
        versions = not adapter and all(one.labels is not None for one in found)
        warnings = [probing.RAW_LOGPROBS] if mode == "raw" else []
        return BackendInfo(
            engine=engine,
            models=[served.id for served in models],
            context_tokens=own.context_tokens or base.context_tokens,
            logprobs_mode=mode,
            reports_versions=versions,
            structured=not engine.startswith(_UNSTRUCTURED),
            adapter_of=own.parent,
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
        try:
            return assembled([self._format.decode(answer.body)], operation="backend.probe")
        except BackendError as error:
            message = f"{self._http.url} gave no usable generation: {error.message}"
            raise InvalidInput(message, field="url") from error

    async def abort(self, request_ids: list[str]) -> None:
        if request_ids:
            await self._ask_abort(ABORT, _abort_body(request_ids))

    async def score(self, token_ids: list[int], *, model: str) -> list[float]:
        """A generation of one token, for its prompt's logprobs. Not of a server that has adapters: a vLLM
        0.32 whose output layer may have one (``--lora-target-modules`` left out) ended on the CPU when it was
        asked for them."""
        if len(token_ids) < 2:
            return []
        await self._refuse_adapters()
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

    async def _refuse_adapters(self) -> None:
        listed = await probing.listed_models(self._http)
        adapters = [served.id for served in listed if served.parent is not None]
        if adapters:
            message = f"vLLM may end when it scores beside adapters, and has {', '.join(adapters)[:200]}"
            raise CannotScore(message, operation="backend.score")

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
