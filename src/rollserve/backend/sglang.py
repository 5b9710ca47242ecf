"""SGLang's ``POST /generate`` (0.5, written from its source; not run against a real server).

What differs from vLLM: a stream repeats all tokens in each event unless the server runs with
``--incremental-streaming-output``; ids and logprobs come as one list of ``[logprob, id, text]``; an abort
ends every request whose id begins with the one given; prompt and ``max_new_tokens`` together must stay
below the context length; logprobs are those after temperature and before ``top_p`` and ``top_k``; which
adapter a call wants is said beside it, as the route takes no model.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rollserve.backend import probing
from rollserve.backend.aborting import AbortingBackend, Span, labelled
from rollserve.backend.adapters import PATH_FIELD, SGLANG, load_unlisted
from rollserve.backend.assembly import Piece, assembled
from rollserve.backend.base import BackendHealth, GenerateRequest, Generation
from rollserve.backend.engines import refuse_router, refuse_without_abort
from rollserve.backend.http import Http
from rollserve.backend.metrics import Metrics, whole
from rollserve.backend.route import OPERATION, Reader, decoded, each_by
from rollserve.backend.scoring import SCORE_S, refuse_scoring, scored
from rollserve.errors import BackendError, InvalidInput
from rollserve.records.call import SamplingParams
from rollserve.records.ids import with_ids
from rollserve.records.policy import BackendInfo

GENERATE = "/generate"
ABORT = "/abort_request"
END = "."
"""After each id: an abort ends all requests whose id begins so, and the pool's ids begin with each other
(``gen_1``, ``gen_1-1``)."""

_PROBE_IDS = ([1, 2, 3, 4], [3, 1])
_PROBE_TOKENS = 2
_COLD = 0.01
"""At so low a temperature the likeliest token has a logprob of about 0, where temperature counts at all."""

_TRUNCATED = (
    "logprobs are those after temperature and before top_p and top_k: calls that set these are not exact"
)
_METRICS = Metrics(
    "sglang:",
    ("num_running_reqs", "num_queue_reqs", "gen_throughput", "num_retracted_requests_total"),
    greatest=("token_usage",),
)


class _Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """The server's and the model's defaults never apply."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    max_new_tokens: int
    sampling_seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    json_schema: str | None = None


class _Body(msgspec.Struct, frozen=True, omit_defaults=True):
    rid: str
    sampling_params: _Sampling
    return_logprob: bool
    logprob_start_len: int
    return_prompt_token_ids: bool
    stream: bool = False
    routing_key: str | None = None
    cache_salt: str | None = None
    lora_path: str | None = None


class _Reason(msgspec.Struct, frozen=True):
    type: str


_Entry = tuple[float | None, int, Any]
"""Logprob, id, text (None unless asked for). The first token of a prompt has no logprob."""


class _Meta(msgspec.Struct, frozen=True):
    completion_tokens: int
    finish_reason: _Reason | None = None
    output_token_logprobs: list[_Entry] = []
    input_token_logprobs: list[_Entry] = []
    weight_versions: list[Span] | None = None


class _Answer(msgspec.Struct, frozen=True):
    meta_info: _Meta
    prompt_token_ids: list[int] | None = None


class GenerateFormat:
    """The bodies of the route; ``adapter`` is the name of the one that every call wants."""

    path = GENERATE

    def __init__(self, adapter: str | None = None) -> None:
        self._adapter = adapter
        self._encoder = msgspec.json.Encoder()
        self._decoder = msgspec.json.Decoder(_Answer)

    def encode(
        self, request: GenerateRequest, *, stream: bool, ignore_eos: bool = False, score: bool = False
    ) -> bytes:
        sampling = request.sampling
        body = _Body(
            rid=request.request_id + END,
            sampling_params=_Sampling(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k if sampling.top_k > 0 else -1,
                min_p=0.0,
                repetition_penalty=1.0,
                max_new_tokens=0 if score else sampling.max_tokens,
                sampling_seed=sampling.seed,
                stop_token_ids=sampling.stop_token_ids,
                ignore_eos=ignore_eos,
                json_schema=_schema(sampling.json_schema),
            ),
            return_logprob=True,
            logprob_start_len=0 if score else -1,
            return_prompt_token_ids=True,
            stream=stream,
            routing_key=request.session_id or None,
            cache_salt=request.cache_salt or None,
            lora_path=self._adapter,
        )
        return with_ids(self._encoder.encode(body), b"input_ids", request.token_ids)

    def reader(self) -> Reader:
        """Of one answer's events in order."""
        return each_by(_Reader(self.answer).read)

    def answer(self, body: bytes) -> _Answer:
        return decoded(self._decoder, body, "generation")


class _Reader:
    def __init__(self, decode: Callable[[bytes], _Answer]) -> None:
        self._decode = decode
        self._seen = 0

    def read(self, body: bytes) -> Piece:
        answer = self._decode(body)
        meta = answer.meta_info
        new = self._new(meta)
        self._seen += len(new)
        return Piece(
            token_ids=[token_id for _, token_id, _ in new],
            logprobs=[logprob for logprob, _, _ in new if logprob is not None],
            finish_reason=None if meta.finish_reason is None else meta.finish_reason.type,
            prompt_ids=answer.prompt_token_ids,
            spans=labelled(meta.weight_versions),
        )

    def _new(self, meta: _Meta) -> list[_Entry]:
        """An event holds all tokens so far, or those since the last event: the server's count of them
        tells which."""
        entries, total = meta.output_token_logprobs, meta.completion_tokens
        if len(entries) == total >= self._seen:
            return entries[self._seen :]
        if self._seen + len(entries) == total:
            return entries
        raise BackendError(
            f"the answer counts {total} sampled tokens, {self._seen} of them before, and has {len(entries)}",
            operation=OPERATION,
        )


def _schema(schema: dict[str, Any] | None) -> str | None:
    if schema is None:
        return None
    return msgspec.json.encode(schema or {"type": "object"}).decode()


class SglangBackend(AbortingBackend):
    """With ``adapter_path`` the model is an adapter, which a probe loads from there where the server does not
    list it; else it is the server's whole one."""

    def __init__(self, http: Http, model: str, *, adapter_path: str | None = None) -> None:
        self._adapter_path = adapter_path
        self._format = GenerateFormat(None if adapter_path is None else model)
        super().__init__(http, model, self._format, _METRICS)

    # ── what it is

    async def probe(self) -> BackendInfo:
        if self._adapter_path is not None:
            await load_unlisted(self._http, SGLANG, self._model, self._adapter_path)
        models = await probing.served_models(self._http, self._model)
        own = models[0]
        self._check_whole(own)
        base = next((each for each in models if each.id == own.parent), own)
        await refuse_router(self._http)
        engine = await probing.engine_name(self._http, "sglang")
        found = [await self._sample(list(ids), top_k=1, temperature=0.5) for ids in _PROBE_IDS]
        await refuse_without_abort(self._http, ABORT, _abort_body("rollserve-probe-none"))
        mode = await self._logprobs_mode(found)
        versions = own.parent is None and all(one.labels is not None for one in found)
        warnings = [_TRUNCATED if mode == "temperature" else probing.RAW_LOGPROBS]
        context = own.context_tokens or base.context_tokens
        return BackendInfo(
            engine=engine,
            models=[served.id for served in models],
            context_tokens=None if context is None else context - 1,
            logprobs_mode=mode,
            reports_versions=versions,
            structured=True,
            adapter_of=own.parent,
            warnings=warnings if versions else [*warnings, probing.NO_VERSIONS],
        )

    def _check_whole(self, own: probing.Model) -> None:
        """What a call is sent by is settled before the server is asked what it has."""
        if own.parent is not None and self._adapter_path is None:
            message = f"{self._model!r} is an adapter of {own.parent!r}: say from where it is loaded"
            raise InvalidInput(message, field=PATH_FIELD)
        if own.parent is None and self._adapter_path is not None:
            message = f"{self._model!r} is the whole model of {self._http.url}, and no adapter"
            raise InvalidInput(message, field=PATH_FIELD)

    async def _logprobs_mode(self, greedy: list[Generation]) -> str:
        """``raw`` when a low temperature does not move logprobs towards 0."""
        if probing.logprobs_mode(_logprobs(greedy)) == "processed":
            return "unknown"  # it scales nothing when it is greedy: a model this sure of itself tells nothing
        cold = [await self._sample(list(ids), top_k=-1, temperature=_COLD) for ids in _PROBE_IDS]
        mean = sum(_logprobs(cold)) / len(_logprobs(cold))
        return "temperature" if mean > 0.1 * sum(_logprobs(greedy)) / len(_logprobs(greedy)) else "raw"

    async def _sample(self, token_ids: list[int], *, top_k: int, temperature: float) -> Generation:
        """A tiny generation through the real route; what is wrong with it is the address's fault."""
        request = GenerateRequest(
            request_id=f"rollserve-probe-{secrets.token_hex(8)}",
            model=self._model,
            token_ids=token_ids,
            sampling=SamplingParams(top_k=top_k, temperature=temperature, max_tokens=_PROBE_TOKENS),
        )
        body = self._format.encode(request, stream=False, ignore_eos=True)
        try:
            answer = await self._http.control(GENERATE, body, timeout_s=60.0)
            if answer.status != 200:
                hint = "is it SGLang? vLLM is the kind 'vllm', another server 'openai'"
                raise self._no_route(answer, path=GENERATE, absent=(404, 405), hint=hint)
            generation = assembled(self._format.reader()([answer.body]), operation="backend.probe")
        except BackendError as error:
            message = f"{self._http.url} gave no usable generation: {error.message}"
            raise InvalidInput(message, field="url") from error
        if not generation.token_ids:
            raise InvalidInput(f"{self._http.url} sampled no tokens for a test prompt", field="url")
        return generation

    # ── generations

    async def abort(self, request_ids: list[str]) -> None:
        """One request each: the route takes no list."""
        await asyncio.gather(*(self._ask_abort(ABORT, _abort_body(one)) for one in request_ids))

    async def score(self, token_ids: list[int], *, model: str) -> list[float]:
        if len(token_ids) < 2:
            return []
        request = GenerateRequest(
            request_id=f"rollserve-score-{secrets.token_hex(8)}",
            model=model,
            token_ids=token_ids,
            sampling=SamplingParams(),
        )
        body = self._format.encode(request, stream=False, score=True)
        answer = await self._http.control(GENERATE, body, timeout_s=SCORE_S)
        if answer.status != 200:
            raise refuse_scoring(answer)
        entries = self._format.answer(answer.body).meta_info.input_token_logprobs
        return scored(token_ids, [token_id for _, token_id, _ in entries], [value for value, _, _ in entries])

    # ── health

    def _healthy(self, metrics: Mapping[str, float]) -> BackendHealth:
        """Without a count of tokens: the server's own moves only when a request has ended. There are metrics
        with ``--enable-metrics``."""
        return BackendHealth(
            ok=True,
            running=whole(metrics.get("num_running_reqs")),
            waiting=whole(metrics.get("num_queue_reqs")),
            tokens_per_s=metrics.get("gen_throughput"),
            kv_use=metrics.get("token_usage"),
            preemptions=whole(metrics.get("num_retracted_requests_total")),
        )


def _logprobs(generations: list[Generation]) -> list[float]:
    return [value for one in generations for value in one.logprobs]


def _abort_body(request_id: str) -> bytes:
    return msgspec.json.encode({"rid": request_id + END, "abort_all": False})
