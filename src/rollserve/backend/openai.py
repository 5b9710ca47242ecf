"""Any OpenAI-compatible ``POST /v1/completions`` that takes prompt ids and gives ids and logprobs back.

Three dialects of the answer are read: vLLM's and SGLang's (``choices[].token_ids`` beside the legacy
``logprobs.token_logprobs``, asked for with ``return_token_ids``), the ``token_id:374`` names of servers
that return tokens as ids, and llama.cpp's (``logprobs.content[].id``). A server that gives text alone
is refused at registration: its text can't be made into the ids that were sampled.
"""

from __future__ import annotations

import msgspec

from rollserve.backend import probing
from rollserve.backend.assembly import Piece, assembled
from rollserve.backend.base import GenerateRequest, Generation
from rollserve.backend.closing import ClosingBackend
from rollserve.backend.engines import refuse_router
from rollserve.backend.http import Http
from rollserve.backend.refusals import describe, refusal
from rollserve.backend.route import OPERATION, Reader, decoded, each_by
from rollserve.backend.scoring import SCORE_S, PromptLogprobs, of_mappings, refuse_scoring, scored
from rollserve.errors import BackendError, CannotScore, InvalidInput
from rollserve.records.call import SamplingParams
from rollserve.records.ids import with_ids
from rollserve.records.policy import BackendInfo

COMPLETIONS = "/v1/completions"
_ID_NAME = "token_id:"
_PROBE_IDS = ([1, 2, 3, 4], [3, 1])
_PROBE_TOKENS = 2


class _Body(msgspec.Struct, frozen=True, omit_defaults=True):
    """Everything that shapes the distribution is sent: servers have defaults of their own (llama.cpp
    samples with ``top_k=40``, vLLM as the model's generation config says)."""

    model: str
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
    echo: bool = False


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


class _ScoredLogprobs(msgspec.Struct, frozen=True):
    token_logprobs: list[float | None] = []


class _ScoredChoice(msgspec.Struct, frozen=True):
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    logprobs: _ScoredLogprobs | None = None


class _Scored(msgspec.Struct, frozen=True):
    choices: list[_ScoredChoice]


class CompletionsFormat:
    """The bodies of the route."""

    path = COMPLETIONS

    def __init__(self) -> None:
        self._encoder = msgspec.json.Encoder()
        self._decoder = msgspec.json.Decoder(_Answer)

    def encode(self, request: GenerateRequest, *, stream: bool, echo: bool = False) -> bytes:
        sampling = request.sampling
        body = _Body(
            model=request.model,
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
            echo=echo,
        )
        return with_ids(self._encoder.encode(body), b"prompt", request.token_ids)

    def reader(self) -> Reader:
        return each_by(self.decode)

    def decode(self, body: bytes) -> Piece:
        answer = decoded(self._decoder, body, "completion")
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


class OpenAIBackend(ClosingBackend):
    """``model`` is the name the server serves the policy's weights under."""

    def __init__(self, http: Http, model: str) -> None:
        self._format = CompletionsFormat()
        super().__init__(http, model, self._format)

    async def probe(self) -> BackendInfo:
        models = await probing.served_models(self._http, self._model)
        await refuse_router(self._http)
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
            generation = assembled([self._format.decode(answer.body)], operation="backend.probe")
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

    async def score(self, token_ids: list[int], *, model: str) -> list[float]:
        """``echo`` with ``logprobs``, as completions have it; many servers ignore it, or refuse."""
        if len(token_ids) < 2:
            return []
        sampling = SamplingParams(max_tokens=1)
        request = GenerateRequest(
            request_id="rollserve-score", model=model, token_ids=token_ids, sampling=sampling
        )
        body = self._format.encode(request, stream=False, echo=True)
        answer = await self._http.control(COMPLETIONS, body, timeout_s=SCORE_S)
        if answer.status != 200:
            raise refuse_scoring(answer)
        try:
            choices = msgspec.json.decode(answer.body, type=_Scored).choices
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BackendError(f"the answer is no score: {error}", operation="backend.score") from error
        return _echoed(token_ids, choices[0] if choices else _ScoredChoice())


def _echoed(token_ids: list[int], choice: _ScoredChoice) -> list[float]:
    """From vLLM's own field where there is one; else from the echo, which an answer without it lacks:
    a prompt's first token has no logprob, a sampled one has."""
    if choice.prompt_logprobs is not None:
        return of_mappings(token_ids, choice.prompt_logprobs)
    given = [] if choice.logprobs is None else choice.logprobs.token_logprobs
    if len(given) < len(token_ids) or given[0] is not None:
        raise CannotScore("the server does not echo the prompt with its logprobs", operation="backend.score")
    ids = token_ids if choice.prompt_token_ids is None else choice.prompt_token_ids
    return scored(token_ids, ids, given[: len(token_ids)])
