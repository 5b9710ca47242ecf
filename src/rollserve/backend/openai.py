"""Any OpenAI-compatible ``POST /v1/completions`` that takes prompt ids and gives ids and logprobs back.

Three dialects of the answer are read: vLLM's and SGLang's (``choices[].token_ids`` beside the legacy
``logprobs.token_logprobs``, asked for with ``return_token_ids``), the ``token_id:374`` names of servers
that return tokens as ids, and llama.cpp's (``logprobs.content[].id``). A server that gives text alone
is refused at registration: its text can't be made into the ids that were sampled.
"""

from __future__ import annotations

import asyncio

import msgspec

from rollserve.backend import probing
from rollserve.backend.assembly import Assembly, Piece
from rollserve.backend.base import BackendHealth, GenerateRequest, Generation, TokenSink
from rollserve.backend.http import Http
from rollserve.backend.refusals import describe, refusal
from rollserve.backend.route import OPERATION, Route
from rollserve.errors import BackendError, BackendUnavailable, InvalidInput
from rollserve.records.call import SamplingParams
from rollserve.records.policy import BackendInfo

COMPLETIONS = "/v1/completions"
_ID_NAME = "token_id:"
_PROBE_IDS = ([1, 2, 3, 4], [3, 1])
_PROBE_TOKENS = 2


class _Body(msgspec.Struct, frozen=True, omit_defaults=True):
    """Everything that shapes the distribution is sent: servers have defaults of their own (llama.cpp
    samples with ``top_k=40``, vLLM as the model's generation config says)."""

    model: str
    prompt: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    logprobs: int
    return_token_ids: bool
    stream: bool = False
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    cache_salt: str | None = None


class _Entry(msgspec.Struct, frozen=True, gc=False):
    logprob: float
    id: int | None = None


class _Logprobs(msgspec.Struct, frozen=True):
    token_logprobs: list[float] | None = None
    tokens: list[str] | None = None
    content: list[_Entry] | None = None


class _Choice(msgspec.Struct, frozen=True):
    token_ids: list[int] | None = None
    response_token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    text: str | None = None


class _Answer(msgspec.Struct, frozen=True):
    choices: list[_Choice]


class CompletionsFormat:
    """The bodies of the route."""

    path = COMPLETIONS

    def __init__(self) -> None:
        self._encoder = msgspec.json.Encoder()
        self._decoder = msgspec.json.Decoder(_Answer)

    def encode(self, request: GenerateRequest, *, stream: bool) -> bytes:
        sampling = request.sampling
        body = _Body(
            model=request.model,
            prompt=request.token_ids,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=0.0,
            repetition_penalty=1.0,
            logprobs=1,
            return_token_ids=True,
            stream=stream,
            seed=sampling.seed,
            stop_token_ids=sampling.stop_token_ids,
            cache_salt=request.cache_salt or None,
        )
        return self._encoder.encode(body)

    def decode(self, body: bytes) -> Piece:
        try:
            answer = self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            start = body[:300].decode(errors="replace")
            message = f"the answer is not a completion ({error}): {start}"
            raise BackendError(message, operation=OPERATION) from error
        if not answer.choices:
            return Piece([], [])
        choice = answer.choices[0]
        logprobs = _logprobs(choice)
        ids = _ids(choice)
        if ids is None:
            if choice.text or logprobs:
                raise BackendError("the answer has text and no token ids", operation=OPERATION)
            ids = []
        return Piece(ids, logprobs, choice.finish_reason, choice.prompt_token_ids)


def _ids(choice: _Choice) -> list[int] | None:
    """The sampled ids, wherever this server puts them."""
    given = choice.token_ids if choice.token_ids is not None else choice.response_token_ids
    if given is not None or choice.logprobs is None:
        return given
    if choice.logprobs.content is not None:
        found = [entry.id for entry in choice.logprobs.content if entry.id is not None]
        return found if len(found) == len(choice.logprobs.content) else None
    names = choice.logprobs.tokens or []
    if names and all(name.startswith(_ID_NAME) and name[len(_ID_NAME) :].isdecimal() for name in names):
        return [int(name.removeprefix(_ID_NAME)[:20]) for name in names]
    return None


def _logprobs(choice: _Choice) -> list[float]:
    if choice.logprobs is None:
        return []
    if choice.logprobs.content is not None:
        return [entry.logprob for entry in choice.logprobs.content]
    return choice.logprobs.token_logprobs or []


class OpenAIBackend:
    """There is no route that aborts by id: ``abort`` and a cancel close the connection."""

    def __init__(self, http: Http, model: str) -> None:
        self._http = http
        self._model = model
        self._format = CompletionsFormat()
        self._route = Route(http, self._format, self._closed_is_stopped)
        self._running: dict[str, asyncio.Task[Generation]] = {}

    async def probe(self) -> BackendInfo:
        models = await probing.served_models(self._http, self._model)
        engine = await probing.engine_name(self._http, models[0].owned_by or "openai")
        found = [await self._sample(list(ids)) for ids in _PROBE_IDS]
        mode = probing.logprobs_mode([value for one in found for value in one.logprobs])
        warnings = [probing.NO_VERSIONS]
        if mode == "raw":
            warnings.append(probing.RAW_LOGPROBS)
        if any(one.prompt_ids is None for one in found):
            warnings.append("does not say which prompt ids it consumed: that can't be checked")
        return BackendInfo(
            engine=engine,
            models=[served.id for served in models],
            context_tokens=models[0].context_tokens,
            logprobs_mode=mode,
            reports_versions=False,
            warnings=warnings,
        )

    async def _sample(self, token_ids: list[int]) -> Generation:
        request = GenerateRequest(
            request_id="rollserve-probe",
            model=self._model,
            token_ids=token_ids,
            sampling=SamplingParams(top_k=1, temperature=0.5, max_tokens=_PROBE_TOKENS),
        )
        where = f"{self._http.url}{COMPLETIONS}"
        try:
            answer = await self._http.control(
                COMPLETIONS, self._format.encode(request, stream=False), timeout_s=60.0
            )
            if answer.status in (404, 405):
                raise InvalidInput(f"no completions route at {where}: {describe(answer)}", field="url")
            if answer.status != 200:
                raise refusal(answer, operation="backend.probe")
            assembly = Assembly("backend.probe")
            assembly.add(self._format.decode(answer.body))
            generation = assembly.finish()
        except BackendError as error:
            message = f"{where} can't be used, a prompt of token ids gave: {error.message}"
            hint = "token ids and logprobs are needed, as vLLM and SGLang give them with return_token_ids"
            raise InvalidInput(message, field="url", hint=hint) from error
        if not generation.token_ids:
            raise InvalidInput(f"{where} sampled no tokens for a test prompt", field="url")
        if generation.prompt_ids is not None and generation.prompt_ids != token_ids:
            raise InvalidInput(
                f"{where} changed the prompt: sent {token_ids}, consumed {generation.prompt_ids}", field="url"
            )
        return generation

    async def generate(self, request: GenerateRequest, on_tokens: TokenSink | None = None) -> Generation:
        assembly = Assembly(OPERATION, request.sampling.max_tokens)
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
        except BackendUnavailable as error:
            return BackendHealth(ok=False, detail=error.message)
        if answer.status == 200:
            return BackendHealth(ok=True)
        return BackendHealth(ok=False, detail=describe(answer))

    async def close(self) -> None:
        await self._http.close()
