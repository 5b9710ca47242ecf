from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from rollserve.dialect import chat
from rollserve.errors import ContextTooLong, InvalidInput, SessionClosed
from rollserve.records.call import Message, ToolCall

USER = {"role": "user", "content": "hi"}


def parse(**body: Any) -> chat.ChatCall:
    return chat.parse_request(json.dumps({"model": "m", "messages": [USER], **body}).encode())


def test_a_whole_conversation() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "shell", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "d"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "name": "n",
        },
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "out"},
    ]
    tool = {"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}}
    parsed = parse(messages=messages, tools=[tool], stream=True, stream_options={"include_usage": True})
    assert parsed.request.messages == (
        Message(role="system", content="d"),
        Message(role="user", content="ab", name="n"),
        Message(
            role="assistant",
            reasoning="hm",
            tool_calls=(ToolCall(id="c1", name="shell", arguments='{"a": 1}'),),
        ),
        Message(role="tool", content="out", tool_call_id="c1"),
    )
    assert parsed.request.tools == (tool,)
    assert (parsed.stream, parsed.include_usage, parsed.logprobs, parsed.model) == (True, True, False, "m")


def test_what_is_asked_for_is_kept_and_what_is_unknown_too() -> None:
    parsed = parse(temperature=0.2, max_tokens=5, wobble={"a": 1}, seed=None, user="u")
    assert parsed.request.asked == {"temperature": 0.2, "max_tokens": 5, "wobble": {"a": 1}, "user": "u"}


def test_arguments_given_as_an_object() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    (message,) = parse(messages=[{"role": "assistant", "tool_calls": [call]}]).request.messages
    assert message.tool_calls == (ToolCall(id="", name="f", arguments='{"a":1}'),)


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["x"]}, "messages.0"),
        ({"messages": [USER, {"role": 1}]}, "messages.1.role"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0.type"),
        (
            {"messages": [{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}]},
            "messages.0.tool_calls",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.function"),
        ({"n": 2}, "n"),
        ({"top_logprobs": 5, "logprobs": True}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"functions": []}, "functions"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function"}]}, "tools.0.function.name"),
    ],
)
def test_bad_requests_name_the_parameter(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse(**body)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"a": NaN}',
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    ],
)
def test_broken_bodies(body: bytes) -> None:
    with pytest.raises(InvalidInput) as caught:
        chat.parse_request(body)
    assert caught.value.field == "body"


def test_a_tool_that_is_too_deep() -> None:
    deep: Any = {}
    for _ in range(70):
        deep = {"properties": deep}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    with pytest.raises(InvalidInput, match="deeper than 64"):
        parse(tools=[tool])


def test_an_answer() -> None:
    message = Message(
        role="assistant", reasoning="hm", tool_calls=(ToolCall(id="c", name="f", arguments="{bad"),)
    )
    tokens = [chat.TokenLogprob("é", -0.5)]
    document = msgspec.json.decode(
        chat.completion(
            call_id="x",
            created_s=1,
            model="m",
            message=message,
            finish="tool_calls",
            prompt_tokens=3,
            sampled_tokens=2,
            tokens=tokens,
        )
    )
    (choice,) = document["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{bad"}}],
    }
    assert choice["logprobs"]["content"] == [
        {"token": "é", "logprob": -0.5, "bytes": [0xC3, 0xA9], "top_logprobs": []}
    ]
    assert document["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def test_an_aborted_answer_was_cut() -> None:
    assert chat.finish_reason("abort") == "length"
    assert chat.finish_reason("tool_calls") == "tool_calls"


def test_errors_in_openais_form() -> None:
    assert chat.error_body(ContextTooLong("too long", field="messages"), 400) == {
        "error": {
            "message": "too long",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        }
    }
    closed = chat.error_body(SessionClosed("over", hint="start again"), 400)["error"]
    assert (closed["message"], closed["code"]) == ("over (start again)", "session_closed")
