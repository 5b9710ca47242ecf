"""The ``openai`` package itself, through a transport that is served by the dialects alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from rollserve.dialect.base import Answered, Asked, Dialect, Piece, Target
from rollserve.dialect.chat import ChatDialect
from rollserve.dialect.responses import ResponsesDialect
from rollserve.errors import BackendUnavailable, ContextTooLong, RollserveError
from rollserve.records.call import Message, ToolCall

PIECES = (Piece("reasoning", "hm"), Piece("content", "Hello "), Piece("content", "world"))
TOOL: Any = {"type": "function", "name": "shell", "parameters": {"type": "object", "properties": {}}}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}}


class Served:
    """Answers every request with the same words and, where tools are offered, a call. What is asked for is
    kept in ``heard``; ``fails`` is raised instead, within the stream where there is one."""

    def __init__(self) -> None:
        self.heard: list[Asked] = []
        self.fails: RollserveError | None = None

    def __call__(self, request: httpx.Request) -> httpx.Response:
        for dialect in (ChatDialect(), ResponsesDialect()):
            target = dialect.target(request.method, request.url.path)
            if target is not None:
                try:
                    return self._serve(dialect, target, request)
                except RollserveError as error:
                    return httpx.Response(error.status, content=dialect.error(error, error.status))
        return httpx.Response(404)

    def _serve(self, dialect: Dialect, target: Target, request: httpx.Request) -> httpx.Response:
        if target.operation == "models":
            assert isinstance(dialect, ChatDialect)
            body = dialect.models(["policy"], created_s=1)
            return httpx.Response(
                200, content=dialect.model(target.model, created_s=1) if target.model else body
            )
        asked = dialect.parse(target, request.content, dict(request.headers), {})
        self.heard.append(asked)
        if target.operation == "count":
            return httpx.Response(200, content=dialect.counted(asked, 12))
        if asked.stream:
            head = {"content-type": "text/event-stream"}
            return httpx.Response(200, headers=head, content=b"".join(self._events(dialect, asked)))
        if self.fails is not None:
            raise self.fails
        answers = [_answer(asked)] * asked.n
        return httpx.Response(200, content=dialect.whole(asked, answers, created_s=1))

    def _events(self, dialect: Dialect, asked: Asked) -> Iterator[bytes]:
        writer = dialect.writer(asked, stream_id="mc_1", created_s=1)
        yield writer.opening()
        for piece in PIECES[:2]:
            yield writer.keep_alive()
            yield writer.piece(piece)
        if self.fails is not None:
            yield writer.failure(self.fails, self.fails.status)
        else:
            yield writer.closing([_answer(asked)], [PIECES[2:]])


def _answer(asked: Asked) -> Answered:
    calls = (ToolCall(id="call_1", name="shell", arguments='{"input":"ls"}'),) if asked.request.tools else ()
    return Answered(
        call_id="mc_1",
        message=Message(role="assistant", reasoning="hm", content="Hello world", tool_calls=calls),
        finish_reason="tool_calls" if calls else "stop",
        prompt_tokens=5,
        sampled_tokens=3,
    )


@pytest.fixture
def served() -> Served:
    return Served()


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    http: Any = httpx.Client(transport=httpx.MockTransport(served))
    with openai.OpenAI(base_url="http://test/v1", api_key="k", http_client=http, max_retries=0) as made:
        yield made


def test_chat(client: openai.OpenAI, served: Served) -> None:
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    first = client.chat.completions.create(model="m", messages=messages, tools=[CHAT_TOOL], n=2)
    assert [choice.message.content for choice in first.choices] == ["Hello world"] * 2
    messages += [first.choices[0].message, {"role": "tool", "tool_call_id": "call_1", "content": "a.txt"}]
    with client.chat.completions.stream(model="m", messages=messages, tools=[CHAT_TOOL]) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert message.role == "assistant"
    assert message.content == "Hello world"
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.arguments == '{"input":"ls"}'
    assert served.heard[1].request.messages == (
        Message(role="user", content="hi"),
        _answer(served.heard[0]).message,
        Message(role="tool", content="a.txt", tool_call_id="call_1"),
    )


def test_responses(client: openai.OpenAI, served: Served) -> None:
    items: list[Any] = [{"role": "user", "content": "hi"}]
    with client.responses.stream(model="m", input=items, tools=[TOOL]) as stream:
        for _ in stream:
            pass
        first = stream.get_final_response()
    assert first.output_text == "Hello world"
    items += [*first.output, {"type": "function_call_output", "call_id": "call_1", "output": "a.txt"}]
    second = client.responses.create(model="m", input=items, instructions="Be kind.")
    assert second.output_text == "Hello world"
    said = _answer(served.heard[0]).message
    assert served.heard[1].request.messages == (
        Message(role="system", content="Be kind."),
        Message(role="user", content="hi"),
        Message(
            role="assistant",
            reasoning="hm",
            content="Hello world",
            tool_calls=said.tool_calls,
            call_id="mc_1",
        ),
        Message(role="tool", content="a.txt", tool_call_id="call_1"),
    )
    client.responses.create(model="m", input="go on", previous_response_id=second.id)
    assert served.heard[2].continues == "mc_1"


def test_counts_and_models(client: openai.OpenAI) -> None:
    assert client.responses.input_tokens.count(model="m", input="hi").input_tokens == 12
    assert [model.id for model in client.models.list()] == ["policy"]
    assert client.models.retrieve("policy").id == "policy"


def test_errors(client: openai.OpenAI, served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], top_logprobs=3
        )
    assert (refused.value.param, refused.value.code) == ("top_logprobs", "invalid_input")
    served.fails = ContextTooLong("maximum context length is 10 tokens, the prompt has 12")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 10") as too_long:
        client.responses.create(model="m", input="hi")
    assert too_long.value.code == "context_length_exceeded"


def test_failures_within_a_stream(client: openai.OpenAI, served: Served) -> None:
    served.fails = BackendUnavailable("nobody there")
    chunks = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "hi"}], stream=True
    )
    with pytest.raises(openai.APIError, match="nobody there"):
        list(chunks)
    *_, last = client.responses.create(model="m", input="hi", stream=True)
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert (last.response.error.code, last.response.error.message) == ("server_error", "nobody there")
