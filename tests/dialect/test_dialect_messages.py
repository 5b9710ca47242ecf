"""Anthropic Messages with the official client: what it sends, and what it makes of our answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from anthropic import Anthropic, APIError
from anthropic.types import Message as TheirMessage

from rollserve.dialect.base import Answered
from rollserve.dialect.messages import MessagesDialect
from rollserve.dialect.tool_input import as_arguments, as_object
from rollserve.records.call import ChatRequest, Message, ToolCall
from rollserve.records.image import Image
from rollserve.testing.dialect_cases import encoded, parts_of
from rollserve.testing.dialect_conformance import DialectConformance
from rollserve.testing.dialect_subject import CREATED_S, DialectSubject, Heard, Sent

from .wire import Wire

REASONS = {"end_turn": "stop", "stop_sequence": "stop", "tool_use": "tool_calls", "max_tokens": "length"}


class OfficialWire(Wire):
    def __init__(self) -> None:
        super().__init__()
        self.client = Anthropic(api_key="k", base_url="http://gateway", max_retries=0, http_client=self.http)


class Subject(DialectSubject):
    dialect = MessagesDialect()
    marks = False  # a turn without a thought has no place for one
    known_path = "/v1/messages"

    def __init__(self) -> None:
        self.wire = OfficialWire()

    def send(self, request: ChatRequest, *, stream: bool = False, n: int = 1, logprobs: bool = False) -> Sent:
        return self._send(request, [_theirs(m) for m in request.messages if m.role != "system"], stream)

    def send_after(self, request: ChatRequest, answer: bytes, then: Sequence[Message]) -> Sent:
        kept = TheirMessage.model_validate_json(answer).content
        turns = [_theirs(m) for m in request.messages if m.role != "system"]
        after = [_theirs(m) for m in then]
        return self._send(request, [*turns, {"role": "assistant", "content": kept}, *after], False)

    def _send(self, request: ChatRequest, messages: list[Any], stream: bool) -> Sent:
        system = [m.content for m in request.messages if m.role == "system"]
        tools: list[Any] = [
            {
                "name": each["function"]["name"],
                "description": each["function"]["description"],
                "input_schema": each["function"]["parameters"],
            }
            for each in request.tools
        ]
        self.wire.streams(b"") if stream else self.wire.answers(b"{}")
        extra: dict[str, Any] = {"system": system[0]} if system else {}
        self.wire.client.messages.create(
            model="m", max_tokens=9, messages=messages, tools=tools, stream=stream, **extra
        )
        return self.wire.sent()

    def read(self, answer: bytes) -> list[Heard]:
        return [_heard(TheirMessage.model_validate_json(answer))]

    def read_stream(self, stream: bytes) -> list[Heard]:
        self.wire.streams(stream)
        with self.wire.client.messages.stream(model="m", max_tokens=9, messages=[]) as events:
            return [_heard(events.get_final_message())]

    def read_error(self, body: bytes) -> str:
        self.wire.answers(body, status=400)
        return self._failure(stream=False)

    def read_failure(self, stream: bytes) -> str:
        self.wire.streams(stream)
        return self._failure(stream=True)

    def _failure(self, *, stream: bool) -> str:
        with pytest.raises(APIError) as caught:
            answer = self.wire.client.messages.create(model="m", max_tokens=9, messages=[], stream=stream)
            list(answer)
        assert isinstance(caught.value.body, dict)
        assert caught.value.body["type"] == "error"
        return str(caught.value.body["error"]["message"])

    def read_models(self, body: bytes) -> list[str]:
        self.wire.answers(body)
        found = list(self.wire.client.models.list())
        assert self.dialect.speaks(self.wire.sent().headers)
        return [each.id for each in found]


def _theirs(message: Message) -> dict[str, Any]:
    """A message as a client of Anthropic's holds it."""
    if message.role == "tool":
        result = {"type": "tool_result", "tool_use_id": message.tool_call_id, "content": _shown(message)}
        return {"role": "user", "content": [result]}
    if message.role == "user":
        return {"role": "user", "content": _shown(message)}
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": "foreign"})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        given = as_object(call.arguments)
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
    return {"role": "assistant", "content": blocks}


def _shown(message: Message) -> Any:
    return [_block(part) for part in parts_of(message)] if message.images else message.content


def _block(part: str | Image) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if part.url is not None:
        return {"type": "image", "source": {"type": "url", "url": part.url}}
    source = {"type": "base64", "media_type": part.media_type, "data": encoded(part)}
    return {"type": "image", "source": source}


def _heard(message: TheirMessage) -> Heard:
    texts, thoughts, calls = [], [], []
    for block in message.content:
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "thinking":
            thoughts.append(block.thinking)
        elif block.type == "tool_use":
            call = ToolCall(id=block.id, name=block.name, arguments=as_arguments(block.input))
            calls.append(call)
    cached = message.usage.cache_read_input_tokens or 0
    assert message.stop_reason is not None
    return Heard(
        message=Message(
            role="assistant",
            content="".join(texts),
            reasoning="".join(thoughts) or None,
            tool_calls=tuple(calls),
        ),
        finish_reason=REASONS[message.stop_reason],
        prompt_tokens=message.usage.input_tokens + cached,
        sampled_tokens=message.usage.output_tokens,
        cached_tokens=cached,
    )


class TestMessages(DialectConformance):
    @pytest.fixture
    def subject(self) -> DialectSubject:
        return Subject()


def _answer(**fields: Any) -> Answered:
    told = {"finish_reason": "stop", "prompt_tokens": 7, "sampled_tokens": 3, **fields}
    return Answered(call_id="mc_1", **told)


THOUGHT = Message(role="assistant", content="yes", reasoning="hm")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_thought_leads_back_to_its_call(streamed: bool) -> None:
    subject = Subject()
    request = ChatRequest(messages=(Message(role="user", content="hi"),))
    asked = subject.parse(subject.send(request, stream=streamed))
    answer = _answer(message=THOUGHT)
    whole = subject.dialect.whole(asked, [answer], created_s=CREATED_S)
    if streamed:
        subject.wire.streams(subject.stream(asked, [answer], [1], 9))
        with subject.wire.client.messages.stream(model="m", max_tokens=9, messages=[]) as events:
            whole = events.get_final_message().to_json().encode()
    back = subject.parse(subject.send_after(request, whole, [Message(role="user", content="go on")]))
    assert [m.call_id for m in back.request.messages] == [None, "mc_1", None]


def test_the_stop_string_that_ended_an_answer() -> None:
    subject = Subject()
    asked = subject.parse(subject.send(ChatRequest(messages=(Message(role="user", content="hi"),))))
    answer = _answer(message=Message(role="assistant", content="a"), stopped_by="END")
    whole = TheirMessage.model_validate_json(subject.dialect.whole(asked, [answer], created_s=CREATED_S))
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", "END")


def test_an_answer_without_anything_still_has_a_block() -> None:
    subject = Subject()
    asked = subject.parse(subject.send(ChatRequest(messages=(Message(role="user", content="hi"),))))
    answer = _answer(message=Message(role="assistant"))
    whole = json.loads(subject.dialect.whole(asked, [answer], created_s=CREATED_S))
    assert whole["content"] == [{"type": "text", "text": ""}]
    subject.wire.streams(subject.stream(asked, [answer], [], 0))
    with subject.wire.client.messages.stream(model="m", max_tokens=9, messages=[]) as events:
        assert [block.type for block in events.get_final_message().content] == ["text"]


def test_the_events_of_a_stream() -> None:
    """In the order the API documents, with what each needs."""
    subject = Subject()
    asked = subject.parse(subject.send(ChatRequest(messages=(Message(role="user", content="hi"),))))
    said = Message(
        role="assistant",
        content="yes",
        reasoning="hm",
        tool_calls=(ToolCall(id="c1", name="shell", arguments='{"a": 1}'),),
    )
    stream = subject.stream(asked, [_answer(message=said, finish_reason="tool_calls")], [], 1)
    names = [line[7:].decode() for line in stream.splitlines() if line.startswith(b"event: ")]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    thought = [*block[:2], "ping", "content_block_delta", block[2]]
    assert names == ["message_start", "ping", *thought, *block, *block, "message_delta", "message_stop"]


def test_tokens_are_counted() -> None:
    subject = Subject()
    subject.wire.answers(subject.dialect.counted(subject.parse(_count(subject)), 42))
    counted = subject.wire.client.messages.count_tokens(
        model="m", messages=[{"role": "user", "content": "hi"}]
    )
    assert counted.input_tokens == 42


def _count(subject: Subject) -> Sent:
    subject.wire.answers(b'{"input_tokens": 0}')
    subject.wire.client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "hi"}])
    sent = subject.wire.sent()
    target = subject.dialect.target(sent.method, sent.path)
    assert target is not None
    assert target.operation == "count"
    return sent


def test_one_model() -> None:
    subject = Subject()
    subject.wire.answers(subject.dialect.model("policy", created_s=CREATED_S))
    found = subject.wire.client.models.retrieve("policy")
    sent = subject.wire.sent()
    target = subject.dialect.target(sent.method, sent.path)
    assert target is not None
    assert (target.operation, target.model) == ("models", "policy")
    assert (found.id, found.type, found.created_at.timestamp()) == ("policy", "model", CREATED_S)
