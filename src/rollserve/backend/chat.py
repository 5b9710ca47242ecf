"""``POST /v1/chat/completions``: messages in; the engine renders, and reads what was said.

With ``tokens`` an answer must say which ids it consumed and sampled, with their logprobs, in one of three
dialects: vLLM's (``prompt_token_ids`` beside ``choices[].token_ids``, asked for with ``return_token_ids``),
SGLang's (``choices[].prompt_token_ids`` and ``response_token_ids``) or llama.cpp's
(``logprobs.content[].id``; the prompt is asked of ``/apply-template`` and ``/tokenize``, and must be as long
as the answer's ``usage`` says). Without, any service that speaks this route will do: there is text, and what
was consumed and sampled is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from rollserve.backend import probing
from rollserve.backend.assembly import Piece, assembled
from rollserve.backend.base import Chat, Delta, GenerateRequest, Generation, TokenSink, Usage
from rollserve.backend.closing import ClosingBackend
from rollserve.backend.engines import refuse_router
from rollserve.backend.http import Http
from rollserve.backend.pictures import content_parts, image_token, images_of, probe_picture
from rollserve.backend.refusals import describe, refusal
from rollserve.backend.route import OPERATION, Reader, decoded, each_by
from rollserve.backend.saying import CallPart, Said
from rollserve.errors import BackendError, CannotScore, InvalidInput
from rollserve.records.call import Message, SamplingParams
from rollserve.records.image import digest_of
from rollserve.records.policy import BackendInfo

T = TypeVar("T")

CHAT = "/v1/chat/completions"
_PROBE_TEXTS = ("Hi", "Count to three.")
_PROBE_TOKENS = 2
_PROBE_TEXT_TOKENS = 16
_PROBE_S = 60.0
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": "probe", "description": "-", "parameters": {"type": "object", "properties": {}}},
}
_NEEDED = (
    "token ids and logprobs are needed, as vLLM gives them with return_token_ids; a service that gives text "
    "alone is of kind 'text', in a policy of that interface"
)
_FINISHES = {"tool_calls": "stop", "function_call": "stop", "content_filter": "length"}


class _Body(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    model: str
    messages: list[dict[str, Any]]
    max_tokens: int
    temperature: float
    top_p: float
    tools: tuple[dict[str, Any], ...] = ()
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    logprobs: bool = False
    return_token_ids: bool = False
    return_prompt_token_ids: bool = False
    stream: bool = False
    stream_options: dict[str, bool] | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    response_format: dict[str, Any] | None = None
    cache_salt: str | None = None


class _Entry(msgspec.Struct, frozen=True, gc=False):
    logprob: float
    id: int | None = None


class _Logprobs(msgspec.Struct, frozen=True):
    content: list[_Entry] | None = None


class _Function(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct, frozen=True):
    index: int | None = None
    id: str | None = None
    function: _Function = _Function()


class _Message(msgspec.Struct, frozen=True):
    """``reasoning_content`` is what ``reasoning`` was called first."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct, frozen=True):
    message: _Message | None = None
    delta: _Message | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None
    response_token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int | None = None


class _Answer(msgspec.Struct, frozen=True):
    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None
    usage: _Usage | None = None


class _Template(msgspec.Struct, frozen=True):
    prompt: str


class _Tokens(msgspec.Struct, frozen=True):
    tokens: list[int]


class ChatFormat:
    """The bodies of the route. To a service without ``tokens`` nothing goes that is not OpenAI's."""

    path = CHAT

    def __init__(self, *, tokens: bool) -> None:
        self._tokens = tokens
        self._encoder = msgspec.json.Encoder()
        self._decoder = msgspec.json.Decoder(_Answer)

    def encode(self, request: GenerateRequest, *, stream: bool) -> bytes:
        """Raises ``BackendError`` for a request of ids."""
        chat, sampling, tokens = request.chat, request.sampling, self._tokens
        if chat is None:
            raise BackendError("this server takes messages, no token ids", operation=OPERATION)
        body = _Body(
            model=request.model,
            messages=chat_messages(chat, reasoning=tokens),
            tools=chat.tools,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k if tokens or sampling.top_k > 0 else None,
            min_p=0.0 if tokens else None,
            repetition_penalty=1.0 if tokens else None,
            logprobs=tokens,
            return_token_ids=tokens,
            return_prompt_token_ids=tokens,
            stream=stream,
            stream_options={"include_usage": True} if stream else None,
            seed=sampling.seed,
            stop_token_ids=sampling.stop_token_ids if tokens else (),
            response_format=_response_format(sampling.json_schema),
            cache_salt=request.cache_salt or None if tokens else None,
        )
        return self._encoder.encode(body)

    def reader(self) -> Reader:
        return each_by(self.decode)

    def decode(self, body: bytes) -> Piece:
        answer = decoded(self._decoder, body, "chat completion")
        usage = None
        if answer.usage is not None:
            sampled = answer.usage.completion_tokens or 0
            usage = Usage(prompt_tokens=answer.usage.prompt_tokens, sampled_tokens=sampled)
        if not answer.choices:
            return Piece([], [], prompt_ids=answer.prompt_token_ids, usage=usage)
        choice = answer.choices[0]
        said = _said(choice.message or choice.delta)
        finish = None if choice.finish_reason is None else _FINISHES.get(choice.finish_reason)
        piece = Piece([], [], finish or choice.finish_reason, said=said, usage=usage)
        if self._tokens:
            piece.token_ids, piece.logprobs = _sampled(choice, said)
            at_top = answer.prompt_token_ids
            piece.prompt_ids = choice.prompt_token_ids if at_top is None else at_top
        return piece


def _sampled(choice: _Choice, said: Said) -> tuple[list[int], list[float]]:
    """Ids, wherever this server puts them, and logprobs."""
    entries = (choice.logprobs.content if choice.logprobs is not None else None) or []
    ids = choice.token_ids if choice.token_ids is not None else choice.response_token_ids
    if ids is None:
        ids = [entry.id for entry in entries if entry.id is not None]
        if len(ids) != len(entries) or (not ids and (said.deltas or said.calls)):
            raise BackendError("the answer has text and no token ids", operation=OPERATION)
    return ids, [entry.logprob for entry in entries]


def _said(message: _Message | None) -> Said:
    if message is None:
        return Said()
    deltas = [Delta("reasoning", text)] if (text := message.reasoning or message.reasoning_content) else []
    if message.content:
        deltas.append(Delta("content", message.content))
    calls = [
        CallPart(
            index=at if call.index is None else call.index,
            id=call.id or "",
            name=call.function.name or "",
            arguments=call.function.arguments or "",
        )
        for at, call in enumerate(message.tool_calls or ())
    ]
    return Said(tuple(deltas), tuple(calls))


def chat_messages(chat: Chat, *, reasoning: bool) -> list[dict[str, Any]]:
    """In OpenAI's form; with ``reasoning`` under both names that engines read."""
    return [_chat_message(message, reasoning, chat.pictures) for message in chat.messages]


def _chat_message(message: Message, reasoning: bool, pictures: Mapping[str, bytes]) -> dict[str, Any]:
    content = content_parts(message, pictures) if message.images else message.content
    sent: dict[str, Any] = {"role": message.role, "content": content}
    if message.name:
        sent["name"] = message.name
    if message.tool_call_id is not None:
        sent["tool_call_id"] = message.tool_call_id
    if message.reasoning and reasoning:
        sent["reasoning"] = sent["reasoning_content"] = message.reasoning
    if message.tool_calls:
        sent["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return sent


def _response_format(schema: dict[str, Any] | None) -> dict[str, Any] | None:
    if schema is None:
        return None
    if not schema:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


class ChatBackend(ClosingBackend):
    """``tokens`` says whether ids are wanted; an answer without them is then an error. ``images``: the model
    is said to take them, which a probe tries."""

    def __init__(self, http: Http, model: str, *, tokens: bool, images: bool = False) -> None:
        self._format = ChatFormat(tokens=tokens)
        self._tokens = tokens
        self._images = images
        super().__init__(http, model, self._format)

    async def probe(self) -> BackendInfo:
        models = await probing.served_models(self._http, self._model)
        if self._tokens:
            await refuse_router(self._http)
        engine = await probing.engine_name(self._http, models[0].owned_by or "openai")
        found = [await self._sample(text) for text in _PROBE_TEXTS[: 2 if self._tokens else 1]]
        mode = probing.logprobs_mode([value for one in found for value in one.logprobs])
        warnings = [probing.NO_VERSIONS] if self._tokens else [probing.NO_TOKENS]
        if self._tokens and mode == "raw":
            warnings.append(probing.RAW_LOGPROBS)
        try:
            await self._sample(_PROBE_TEXTS[0], tools=(_PROBE_TOOL,))
        except InvalidInput as error:
            warnings.append(f"does not take tools: {error.message}")
        token = await self._image_token(found[0]) if self._images else None
        return BackendInfo(
            engine=engine,
            models=[served.id for served in models],
            context_tokens=models[0].context_tokens,
            logprobs_mode=mode if self._tokens else "unknown",
            structured=self._tokens,
            image_token=token,
            warnings=warnings,
        )

    async def _image_token(self, without: Generation) -> int | None:
        """``without`` an image is what the first text made. Raises ``InvalidInput`` (field ``accepts``) where
        one is refused."""
        data = probe_picture()
        try:
            seen = await self._sample(_PROBE_TEXTS[0], pictures={digest_of(data): data})
        except InvalidInput as error:
            raise InvalidInput(
                f"it is said to take images, and does not: {error.message}", field="accepts"
            ) from error
        return image_token(without.prompt_ids or (), seen.prompt_ids or ())

    async def _sample(
        self,
        text: str,
        tools: tuple[dict[str, Any], ...] = (),
        pictures: Mapping[str, bytes] = MappingProxyType({}),
    ) -> Generation:
        """A tiny answer through the real route; what is wrong with it is the address's fault."""
        where = f"{self._http.url}{CHAT}"
        sampling = SamplingParams(max_tokens=_PROBE_TEXT_TOKENS)
        if self._tokens:
            sampling = SamplingParams(top_k=1, temperature=0.5, max_tokens=_PROBE_TOKENS)
        request = GenerateRequest(
            request_id="rollserve-probe",
            model=self._model,
            token_ids=[],
            sampling=sampling,
            chat=Chat(
                messages=(Message(role="user", content=text, images=images_of(pictures)),),
                tools=tools,
                pictures=pictures,
            ),
        )
        try:
            made = await self._answer(request)
        except BackendError as error:
            message = f"{where} can't be used, a test message gave: {error.message}"
            raise InvalidInput(message, field="url", hint=_NEEDED if self._tokens else None) from error
        if self._tokens and not made.token_ids:
            raise InvalidInput(f"{where} sampled no tokens for a test message", field="url")
        return made

    async def _answer(self, request: GenerateRequest) -> Generation:
        body = self._format.encode(request, stream=False)
        answer = await self._http.control(CHAT, body, timeout_s=_PROBE_S)
        if answer.status in (404, 405):
            raise BackendError(f"there is no such route: {describe(answer)}", operation="backend.probe")
        if answer.status != 200:
            raise refusal(answer, operation="backend.probe")
        made = assembled([self._format.decode(answer.body)], operation="backend.probe")
        return await self._with_prompt(request, made)

    async def generate(self, request: GenerateRequest, on_tokens: TokenSink | None = None) -> Generation:
        made = await super().generate(request, on_tokens)
        return await self._with_prompt(request, made)

    async def _with_prompt(self, request: GenerateRequest, made: Generation) -> Generation:
        """With the prompt's ids, where the server tells them only when it is asked (llama.cpp)."""
        told = made.prompt_ids is not None or (made.finish_reason == "abort" and not made.token_ids)
        if not self._tokens or told or request.chat is None:
            return made
        asked: dict[str, Any] = {"messages": chat_messages(request.chat, reasoning=True)}
        if request.chat.tools:
            asked["tools"] = request.chat.tools
        prompt = (await self._ask("/apply-template", asked, _Template)).prompt
        text = {"content": prompt, "add_special": True, "parse_special": True}
        ids = (await self._ask("/tokenize", text, _Tokens)).tokens
        if made.usage is not None and made.usage.prompt_tokens != len(ids):
            raise BackendError(
                f"its template makes {len(ids)} tokens of the prompt, and it consumed "
                f"{made.usage.prompt_tokens}",
                operation=OPERATION,
            )
        return replace(made, prompt_ids=ids)

    async def _ask(self, path: str, body: dict[str, Any], form: type[T]) -> T:
        answer = await self._http.control(path, msgspec.json.encode(body))
        if answer.status == 200:
            try:
                return msgspec.json.decode(answer.body, type=form)
            except (msgspec.DecodeError, UnicodeDecodeError):
                pass
        message = f"the answer does not say which prompt ids it consumed, and {path} gave {describe(answer)}"
        raise BackendError(message, operation=OPERATION)

    async def score(self, token_ids: list[int], *, model: str) -> list[float]:
        raise CannotScore("a chat route scores no tokens", operation="backend.score")
