from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from openai import Omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types import Model
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from rollserve.dialect.base import TokenLogprob
from rollserve.dialect.responses import ResponsesDialect
from rollserve.records.call import ChatRequest, Message, ToolCall
from rollserve.records.image import Image
from rollserve.testing.dialect_cases import address, parts_of
from rollserve.testing.dialect_conformance import DialectConformance
from rollserve.testing.dialect_subject import DialectSubject, Heard, Sent

EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


class ResponsesSubject(DialectSubject):
    """The ``openai`` package, as agents use it: the items of an answer go back as they came, with their
    ids or without."""

    logprobs = True

    def __init__(self, *, keeps_ids: bool = True) -> None:
        self.dialect = ResponsesDialect()
        self.marks = keeps_ids

    def send(self, request: ChatRequest, *, stream: bool = False, n: int = 1, logprobs: bool = False) -> Sent:
        items = [item for message in request.messages for item in _put(message)]
        return _sent(items, request, stream, logprobs)

    def send_after(self, request: ChatRequest, answer: bytes, then: Sequence[Message]) -> Sent:
        items = [item for message in request.messages for item in _put(message)]
        for item in Response.model_validate_json(answer).output:
            plain = item.model_dump(exclude_unset=True)
            if not self.marks:
                del plain["id"]
            items.append(plain)
        items += [item for message in then for item in _put(message)]
        return _sent(items, request)

    def read(self, answer: bytes) -> list[Heard]:
        return [_heard(Response.model_validate_json(answer))]

    def read_stream(self, stream: bytes) -> list[Heard]:
        state: ResponseStreamState[None] = ResponseStreamState(input_tools=Omit(), text_format=Omit())
        events = _events(stream)
        for number, event in enumerate(events):
            assert event.sequence_number == number
            state.handle_event(event)
        last = events[-1]
        assert last.type in ("response.completed", "response.incomplete")
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert [item.model_dump() for item in last.response.output] == [item.model_dump() for item in done]
        _check_deltas(events)
        return [_heard(last.response)]

    def read_error(self, body: bytes) -> str:
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return str(error["message"])

    def read_failure(self, stream: bytes) -> str:
        *before, last = _documents(stream)
        for each in before:
            EVENT.validate_python(each)
        assert last["type"] == "response.failed"
        assert last["response"]["status"] == "failed"
        return str(last["response"]["error"]["message"])

    def read_models(self, body: bytes) -> list[str]:
        return [Model.model_validate(each).id for each in json.loads(body)["data"]]


def _sent(items: list[Any], request: ChatRequest, stream: bool = False, logprobs: bool = False) -> Sent:
    body: dict[str, Any] = {"model": "m", "input": items, "store": False}
    body["tools"] = [{"type": "function", **tool["function"]} for tool in request.tools]
    if stream:
        body["stream"] = True
    if logprobs:
        body["include"] = ["message.output_text.logprobs"]
    return Sent(path="/v1/responses", body=json.dumps(body).encode())


def _put(message: Message) -> list[dict[str, Any]]:
    if message.role == "tool":
        kind = "function_call_output"
        output = [_part(part) for part in parts_of(message)] if message.images else message.content
        return [{"type": kind, "call_id": message.tool_call_id, "output": output}]
    if message.role != "assistant":
        return [{"role": message.role, "content": [_part(part) for part in parts_of(message)]}]
    items: list[dict[str, Any]] = []
    if message.reasoning:
        items.append({"type": "reasoning", "summary": [{"type": "summary_text", "text": message.reasoning}]})
    if message.content or not (message.reasoning or message.tool_calls):
        part = {"type": "output_text", "text": message.content, "annotations": []}
        items.append({"type": "message", "role": "assistant", "content": [part]})
    for call in message.tool_calls:
        named = {"name": call.name, "arguments": call.arguments}
        items.append({"type": "function_call", "call_id": call.id, **named})
    return items


def _part(part: str | Image) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "input_text", "text": part}
    return {"type": "input_image", "image_url": address(part), "detail": "auto"}


def _documents(stream: bytes) -> list[Any]:
    found = []
    for block in stream.decode().split("\n\n")[:-1]:
        name, _, data = block.partition("\n")
        document = json.loads(data.removeprefix("data: "))
        assert name == f"event: {document['type']}"
        found.append(document)
    return found


def _events(stream: bytes) -> list[ResponseStreamEvent]:
    return [EVENT.validate_python(each) for each in _documents(stream)]


def _check_deltas(events: Sequence[Any]) -> None:
    """What came in pieces is what the finished items say."""
    texts: dict[str, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            texts[event.item_id] = texts.get(event.item_id, "") + event.delta
        elif event.type == "response.output_item.done":
            assert texts.get(event.item.id, "") == _item_text(event.item)


def _item_text(item: Any) -> str:
    if item.type == "reasoning":
        return "".join(part.text for part in item.summary)
    if item.type == "message":
        return "".join(part.text for part in item.content)
    return str(item.input if item.type == "custom_tool_call" else item.arguments)


def _heard(response: Response) -> Heard:
    usage, tokens = response.usage, []
    assert usage is not None
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    for item in response.output:
        if item.type == "message":
            parts = [part for part in item.content if part.type == "output_text"]
            tokens += [_token(each) for part in parts for each in part.logprobs or ()]
    calls = tuple(
        ToolCall(id=item.call_id, name=item.name, arguments=item.arguments)
        for item in response.output
        if item.type == "function_call"
    )
    thoughts = [_item_text(item) for item in response.output if item.type == "reasoning"]
    message = Message(
        role="assistant",
        content=response.output_text,
        reasoning="".join(thoughts) or None,
        tool_calls=calls,
    )
    return Heard(
        message=message,
        finish_reason=_finish(response, bool(calls)),
        prompt_tokens=usage.input_tokens,
        sampled_tokens=usage.output_tokens,
        cached_tokens=usage.input_tokens_details.cached_tokens,
        tokens=tuple(tokens) or None,
    )


def _token(entry: Any) -> TokenLogprob:
    assert bytes(entry.bytes).decode() == entry.token
    return TokenLogprob(entry.token, entry.logprob)


def _finish(response: Response, calls: bool) -> str:
    if response.status == "incomplete":
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        return "length"
    assert response.status == "completed"
    return "tool_calls" if calls else "stop"


class TestResponses(DialectConformance):
    @pytest.fixture
    def subject(self) -> DialectSubject:
        return ResponsesSubject()


class TestResponsesOfAClientThatDropsIds(DialectConformance):
    @pytest.fixture
    def subject(self) -> DialectSubject:
        return ResponsesSubject(keeps_ids=False)
