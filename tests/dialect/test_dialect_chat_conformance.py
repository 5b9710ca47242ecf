from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from rollserve.dialect.base import TokenLogprob
from rollserve.dialect.chat import ChatDialect
from rollserve.records.call import ChatRequest, Message, ToolCall
from rollserve.records.image import Image
from rollserve.testing.dialect_cases import address, parts_of
from rollserve.testing.dialect_conformance import DialectConformance
from rollserve.testing.dialect_subject import DialectSubject, Heard, Sent


class ChatSubject(DialectSubject):
    """The ``openai`` package, as agents use it: an answer goes back as it came."""

    choices = 4
    logprobs = True
    marks = False

    def __init__(self) -> None:
        self.dialect = ChatDialect()

    def send(self, request: ChatRequest, *, stream: bool = False, n: int = 1, logprobs: bool = False) -> Sent:
        return _sent([_put(message) for message in request.messages], request, stream, n, logprobs)

    def send_after(self, request: ChatRequest, answer: bytes, then: Sequence[Message]) -> Sent:
        said = ChatCompletion.model_validate_json(answer).choices[0].message
        messages = [_put(message) for message in request.messages]
        messages += [said.model_dump(exclude_unset=True), *(_put(message) for message in then)]
        return _sent(messages, request)

    def read(self, answer: bytes) -> list[Heard]:
        completion = ChatCompletion.model_validate_json(answer)
        assert completion.usage is not None
        return [
            _heard(choice.message.model_dump(), choice.finish_reason, completion.usage, choice.logprobs)
            for choice in completion.choices
        ]

    def read_stream(self, stream: bytes) -> list[Heard]:
        *events, last = _data(stream)
        assert last == "[DONE]"
        chunks = [ChatCompletionChunk.model_validate_json(each) for each in events]
        assert len({(chunk.id, chunk.model, chunk.created) for chunk in chunks}) == 1
        *chunks, counted = chunks
        assert not counted.choices
        assert counted.usage is not None
        state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
        for chunk in chunks:
            state.handle_chunk(chunk)
        said = state.current_completion_snapshot.choices
        return [
            _heard(choice.message.model_dump(), choice.finish_reason, counted.usage, choice.logprobs)
            for choice in said
        ]

    def read_error(self, body: bytes) -> str:
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return str(error["message"])

    def read_failure(self, stream: bytes) -> str:
        return self.read_error(_data(stream)[-1].encode())

    def read_models(self, body: bytes) -> list[str]:
        document = json.loads(body)
        assert document["object"] == "list"
        return [Model.model_validate(each).id for each in document["data"]]


def _sent(
    messages: list[Any], request: ChatRequest, stream: bool = False, n: int = 1, logprobs: bool = False
) -> Sent:
    body: dict[str, Any] = {"model": "m", "messages": messages, "tools": list(request.tools)}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if n > 1:
        body["n"] = n
    if logprobs:
        body["logprobs"] = True
    return Sent(path="/v1/chat/completions", body=json.dumps(body).encode())


def _put(message: Message) -> dict[str, Any]:
    content = [_part(part) for part in parts_of(message)] if message.images else message.content
    put: dict[str, Any] = {"role": message.role, "content": content}
    if message.reasoning:
        put["reasoning_content"] = message.reasoning
    if message.tool_call_id is not None:
        put["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        put["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return put


def _part(part: str | Image) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image_url", "image_url": {"url": address(part)}}


def _data(stream: bytes) -> list[str]:
    return [line.removeprefix("data: ") for line in stream.decode().split("\n\n") if line]


def _heard(said: Any, finish_reason: str, usage: Any, logprobs: Any) -> Heard:
    assert said["role"] == "assistant"
    calls = tuple(
        ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
        for call in said.get("tool_calls") or ()
    )
    message = Message(
        role="assistant",
        content=said["content"] or "",
        reasoning=said.get("reasoning_content") or None,
        tool_calls=calls,
    )
    return Heard(
        message=message,
        finish_reason=finish_reason,
        prompt_tokens=usage.prompt_tokens,
        sampled_tokens=usage.completion_tokens,
        cached_tokens=usage.prompt_tokens_details.cached_tokens,
        tokens=None if logprobs is None else tuple(_token(each) for each in logprobs.content),
    )


def _token(entry: Any) -> TokenLogprob:
    assert bytes(entry.bytes).decode() == entry.token
    return TokenLogprob(entry.token, entry.logprob)


class TestChat(DialectConformance):
    @pytest.fixture
    def subject(self) -> DialectSubject:
        return ChatSubject()
