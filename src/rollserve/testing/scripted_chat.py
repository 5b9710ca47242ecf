"""The scripted policy behind ``/v1/chat/completions``, as engines that render have it: for tests.

It renders with a template of its own (Qwen3's, which drops earlier thinking as the real one does), samples
the script's ids, and reads tool calls and reasoning back out of them. ``form`` says whose answers it gives:
``vllm`` (ids where ``return_token_ids`` asks for them), ``sglang``, ``llama.cpp`` (ids in the logprobs, and
the prompt's by ``/apply-template`` and ``/tokenize``) or ``text`` (no ids; unknown fields are refused).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from rollserve.backend.base import GenerateRequest
from rollserve.dialect.base import Piece
from rollserve.errors import InvalidInput
from rollserve.gateway.rendering import Rendering
from rollserve.gateway.streaming import AnswerText, LetOut
from rollserve.gateway.tokens import load_tokenizer
from rollserve.records.call import Message, SamplingParams, ToolCall
from rollserve.records.image import Image, split_at_images
from rollserve.records.policy import RendererSpec
from rollserve.testing.asgi import Receive, Scope, Send, answer
from rollserve.testing.scripted import Chunk, ScriptedEngine
from rollserve.testing.scripted_images import MARK, Part, expanded, read_parts
from rollserve.testing.scripted_server import ScriptedApp

Form = Literal["vllm", "sglang", "llama.cpp", "text"]

_OURS = frozenset(
    {"model", "messages", "tools", "max_tokens", "temperature", "top_p", "stream", "stream_options", "seed"}
    | {"response_format"}
)
"""What a service that gives text alone takes."""


class _Function(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class _Call(msgspec.Struct, frozen=True):
    id: str
    function: _Function


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | tuple[Part, ...] = ""
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[_Call, ...] = ()
    tool_call_id: str | None = None

    def ours(self) -> Message:
        """Raises ``InvalidInput`` for arguments that are no JSON, as vLLM does."""
        for call in self.tool_calls:
            try:
                msgspec.json.decode(call.function.arguments)
            except msgspec.DecodeError as error:
                raise InvalidInput(f"arguments are no JSON: {error}", field="messages") from error
        text, images = self.seen()
        return Message(
            role=self.role,
            content=MARK.join(split_at_images(text, images)),
            reasoning=self.reasoning or self.reasoning_content,
            tool_calls=tuple(
                ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
                for call in self.tool_calls
            ),
            tool_call_id=self.tool_call_id,
            name=self.name,
        )

    def seen(self) -> tuple[str, tuple[Image, ...]]:
        """Its text, and the images in it."""
        return (self.content, ()) if isinstance(self.content, str) else read_parts(self.content)


class ChatAsked(msgspec.Struct, frozen=True):
    model: str
    messages: list[ChatMessage]
    tools: tuple[dict[str, Any], ...] = ()
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stream: bool = False
    logprobs: bool = False
    return_token_ids: bool = False
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    response_format: dict[str, Any] | None = None


class _Tokenize(msgspec.Struct, frozen=True):
    content: str


class _Apply(msgspec.Struct, frozen=True):
    messages: list[ChatMessage]
    tools: tuple[dict[str, Any], ...] = ()


class ChatApp(ScriptedApp):
    """``asked`` are the requests so far. ``takes_tools`` False is a server without a tool parser,
    ``takes_images`` one whose model sees."""

    def __init__(self, engine: ScriptedEngine, form: Form = "vllm") -> None:
        super().__init__(engine)
        self.form = form
        self.takes_tools = True
        self.takes_images = False
        self.asked: list[ChatAsked] = []
        self.rendering = Rendering(RendererSpec(), load_tokenizer("tiny"), "strip")
        self._ids = itertools.count()
        self._routes = {
            "/v1/chat/completions": self._chat,
            "/v1/models": self._models,
            "/health": self._health,
        }
        if form == "llama.cpp":
            self._routes |= {"/apply-template": self._apply, "/tokenize": self._tokenize}

    async def _chat(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        if self.form == "text":
            self._refuse_unknown(msgspec.json.decode(body))
        asked = msgspec.json.decode(body, type=ChatAsked)
        self.asked.append(asked)
        if asked.tools and not self.takes_tools:
            raise InvalidInput('"auto" tool choice requires --enable-auto-tool-choice', field="tools")
        prompt = self._prompt(asked)
        request = GenerateRequest(
            request_id=f"chatcmpl-{next(self._ids)}",
            model=asked.model,
            token_ids=prompt,
            sampling=SamplingParams(
                temperature=asked.temperature,
                top_p=asked.top_p,
                top_k=asked.top_k,
                max_tokens=asked.max_tokens,
                seed=asked.seed,
                stop_token_ids=(*asked.stop_token_ids, *self.rendering.stop_token_ids),
            ),
        )
        encode = _Encode(self.form, asked, prompt, self.rendering)
        await self._run(request, asked.stream, encode, receive, send)

    def _prompt(self, asked: ChatAsked) -> list[int]:
        images = [image for message in asked.messages for image in message.seen()[1]]
        if images and not self.takes_images:
            raise InvalidInput("At most 0 image(s) may be provided in one prompt.", field="messages")
        ids = self.rendering.render([message.ours() for message in asked.messages], asked.tools)
        return expanded(ids, images, self.rendering.tokenizer) if images else ids

    def _refuse_unknown(self, body: dict[str, Any]) -> None:
        for name in body:
            if name not in _OURS:
                raise InvalidInput("unrecognized request argument", field=name)
        if any("reasoning" in message or "reasoning_content" in message for message in body["messages"]):
            raise InvalidInput("unrecognized request argument", field="messages")

    async def _apply(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        asked = msgspec.json.decode(body, type=_Apply)
        prompt = self.rendering.render([message.ours() for message in asked.messages], asked.tools)
        await answer(send, 200, {"prompt": self.rendering.tokenizer.decode(prompt)})

    async def _tokenize(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        asked = msgspec.json.decode(body, type=_Tokenize)
        await answer(send, 200, {"tokens": self.rendering.tokenizer.encode(asked.content)})


class _Encode:
    """The bodies of one answer; called with all chunks so far, as a stream's or in one go."""

    def __init__(self, form: Form, asked: ChatAsked, prompt: list[int], rendering: Rendering) -> None:
        self._form = form
        self._asked = asked
        self._prompt = prompt
        self._rendering = rendering
        self._pieces: list[Piece] = []
        self._told = LetOut()
        self._text = AnswerText(rendering, prompt, bool(asked.tools), (), self._let_out)

    def _let_out(self, piece: Piece) -> None:
        self._told.add(piece)
        self._pieces.append(piece)

    def __call__(self, chunks: list[Chunk], request_id: str, model: str, prompt: list[int] | None) -> bytes:
        return self._event(chunks) if self._asked.stream else self._whole(chunks)

    def _whole(self, chunks: list[Chunk]) -> bytes:
        ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        logprobs = [value for chunk in chunks for value in chunk.logprobs]
        reason = chunks[-1].finish_reason
        message = self._message(ids, reason)
        choice = {"message": _said(message), **self._evidence(ids, logprobs, True)}
        return self._body(choice, _finish(message, reason), len(ids), first=True)

    def _event(self, chunks: list[Chunk]) -> bytes:
        """Of the last chunk. Tool calls come with the end, as from a parser that waits for them."""
        chunk, first = chunks[-1], len(chunks) == 1
        self._pieces = []
        self._text.take(chunk.token_ids)
        message: Message | None = None
        ids = [token_id for each in chunks for token_id in each.token_ids]
        if chunk.finish_reason is not None:
            message = self._message(ids, chunk.finish_reason)
            self._pieces += self._told.rest(message)
        evidence = self._evidence(chunk.token_ids, chunk.logprobs, first)
        choice = {"delta": _delta(self._pieces, message), **evidence}
        return self._body(choice, _finish(message, chunk.finish_reason), len(ids), first=first)

    def _message(self, ids: list[int], reason: str | None) -> Message:
        return self._rendering.parse(ids, self._asked.tools, self._prompt, cut=reason != "stop").message

    def _evidence(self, ids: Sequence[int], logprobs: Sequence[float], first: bool) -> dict[str, Any]:
        """What this kind of server tells of tokens, in a choice."""
        if self._form == "text" or not self._asked.logprobs:
            return {}
        own = self._form == "llama.cpp"
        content = [
            {"token": "", "logprob": logprob, **({"id": token_id} if own else {})}
            for token_id, logprob in zip(ids, logprobs, strict=True)
        ]
        told: dict[str, Any] = {"logprobs": {"content": content}}
        if self._form == "sglang":
            told |= {"response_token_ids": list(ids)}
            if first:
                told["prompt_token_ids"] = self._prompt
        elif self._form == "vllm" and self._asked.return_token_ids:
            told["token_ids"] = list(ids)
        return told

    def _body(self, choice: dict[str, Any], finish: str | None, sampled: int, *, first: bool) -> bytes:
        body: dict[str, Any] = {"choices": [{"index": 0, "finish_reason": finish, **choice}]}
        if self._form == "vllm" and self._asked.return_token_ids and first:
            body["prompt_token_ids"] = self._prompt
        if finish is not None:
            body["usage"] = {"prompt_tokens": len(self._prompt), "completion_tokens": sampled}
        return msgspec.json.encode(body)


def _finish(message: Message | None, reason: str | None) -> str | None:
    return "tool_calls" if message is not None and message.tool_calls and reason == "stop" else reason


def _said(message: Message) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant", "content": message.content or None}
    if message.reasoning:
        said["reasoning"] = message.reasoning
    if message.tool_calls:
        said["tool_calls"] = _calls(message)
    return said


def _delta(pieces: Sequence[Piece], message: Message | None) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    for kind, name in (("reasoning", "reasoning_content"), ("content", "content")):
        if text := "".join(piece.text for piece in pieces if piece.kind == kind):
            delta[name] = text
    if message is not None and message.tool_calls:
        delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(_calls(message))]
    return delta


def _calls(message: Message) -> list[dict[str, Any]]:
    """With ids of the engine's own."""
    return [
        {
            "id": f"chatcmpl-tool-{at}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for at, call in enumerate(message.tool_calls)
    ]
