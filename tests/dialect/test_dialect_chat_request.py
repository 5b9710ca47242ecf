from __future__ import annotations

import json
from typing import Any

import pytest

from rollserve.dialect.base import Asked, Target
from rollserve.dialect.chat import ChatDialect
from rollserve.errors import InvalidInput, MethodNotAllowed
from rollserve.records.call import Message, ToolCall

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "shell", "arguments": '{"a": 1}'}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


def parse(headers: dict[str, str] | None = None, **body: Any) -> Asked:
    raw = json.dumps({"model": "m", "messages": [USER], **body}).encode()
    return ChatDialect().parse(Target(operation="generate"), raw, headers or {}, {})


def refused(**body: Any) -> str | None:
    with pytest.raises(InvalidInput) as caught:
        parse(**body)
    return caught.value.field


def test_paths() -> None:
    target = ChatDialect().target
    assert target("POST", "/v1/chat/completions") == Target(operation="generate")
    assert target("GET", "/v1/models") == Target(operation="models")
    assert target("GET", "/v1/models/org/name") == Target(operation="models", model="org/name")
    assert target("POST", "/v1/completions") is None
    for method, path in (("GET", "/v1/chat/completions"), ("POST", "/v1/models"), ("DELETE", "/v1/models/m")):
        with pytest.raises(MethodNotAllowed):
            target(method, path)


def test_a_whole_conversation() -> None:
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "name": "shell", "content": [{"type": "text", "text": "out"}]},
        {"role": "assistant", "tool_calls": [], "reasoning": "so", "content": "done"},
        {"role": "user", "content": "more", "name": "n"},
    ]
    assert parse(messages=messages).request.messages == (
        Message(role="system", content="d"),
        Message(role="user", content="ab"),
        Message(
            role="assistant",
            reasoning="hm",
            tool_calls=(ToolCall(id="c1", name="shell", arguments='{"a": 1}'),),
        ),
        Message(role="tool", content="out", tool_call_id="c1", name="shell"),
        Message(role="assistant", reasoning="so", content="done"),
        Message(role="user", content="more", name="n"),
    )


def test_content_that_is_null_empty_or_absent_is_the_same() -> None:
    turns = [{"role": "assistant", "tool_calls": [CALL], **more} for more in ({}, {"content": None})]
    turns.append({"role": "assistant", "tool_calls": [CALL], "content": ""})
    first, *others = (parse(messages=[turn]).request.messages for turn in turns)
    assert others == [first, first]


def test_a_refusal_is_what_the_model_said() -> None:
    turns = [
        {"role": "assistant", "content": None, "refusal": "no"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]
    for turn in turns:
        assert parse(messages=[turn]).request.messages == (Message(role="assistant", content="no"),)


def test_arguments_given_as_an_object_or_not_at_all() -> None:
    calls = [{"function": {"name": "f", "arguments": {"a": 1}}}, {"function": {"name": "g"}, "id": None}]
    (message,) = parse(messages=[{"role": "assistant", "tool_calls": calls}]).request.messages
    assert message.tool_calls == (
        ToolCall(id="", name="f", arguments='{"a":1}'),
        ToolCall(id="", name="g", arguments="{}"),
    )


def test_what_is_asked_for_is_kept_and_what_is_unknown_too() -> None:
    asked = parse(temperature=0.2, max_tokens=5, wobble={"a": 1}, seed=None, parallel_tool_calls=False)
    assert asked.request.asked == {
        "temperature": 0.2,
        "max_tokens": 5,
        "wobble": {"a": 1},
        "parallel_tool_calls": False,
    }


def test_what_has_a_place_of_its_own_is_not_kept_twice() -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    asked = parse(n=3, stop=["a", "b"], response_format=form, logprobs=True, stream=True, tools=[TOOL])
    assert asked.request.asked == {}
    assert (asked.n, asked.logprobs, asked.stream, asked.model) == (3, True, True, "m")
    assert (asked.request.stop, asked.request.schema, asked.request.tools) == (("a", "b"), schema, (TOOL,))


@pytest.mark.parametrize(
    ("given", "schema"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, {}),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, {}),
    ],
)
def test_formats(given: Any, schema: Any) -> None:
    assert parse(response_format=given).request.schema == schema


def test_one_stop_or_none() -> None:
    assert parse(stop="x").request.stop == ("x",)
    assert parse(stop=None).request.stop == ()
    assert parse(stop=[]).request.stop == ()


def test_a_forced_tool_is_advice_and_none_means_that_none_is_offered() -> None:
    named = {"type": "function", "function": {"name": "shell"}}
    for choice in ("auto", "required", named, {"type": "allowed_tools", "allowed_tools": {}}):
        asked = parse(tools=[TOOL], tool_choice=choice)
        assert (asked.request.tools, asked.request.asked) == ((TOOL,), {"tool_choice": choice})
    asked = parse(tools=[TOOL], tool_choice="none")
    assert (asked.request.tools, asked.request.asked) == ((), {"tool_choice": "none"})


def test_a_client_that_asks_for_token_ids_is_told_the_parameters_name() -> None:
    with pytest.raises(InvalidInput, match="return_token_ids") as caught:
        parse(logprobs=True, return_token_ids=True)
    assert caught.value.field == "return_token_ids"
    assert parse(logprobs=True, return_token_ids=False).logprobs


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["x"]}, "messages.0"),
        ({"messages": [USER, {"role": 1}]}, "messages.1.role"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0.image_url"),
        ({"messages": [{"role": "system", "content": [IMAGE]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "assistant", "content": [IMAGE]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "tool", "content": [IMAGE]}]}, "messages.0.content.0.image_url"),
        ({"messages": [{"role": "user", "tool_calls": [CALL]}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.function"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [CALL, {"type": "custom", "custom": {}}]}]},
            "messages.0.tool_calls.1.type",
        ),
        (
            {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": ""}}]},
            "messages.0.function_call",
        ),
        ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages.0.audio"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 1.5}, "n"),
        ({"top_logprobs": 5, "logprobs": True}, "top_logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": ["function"]}}, "tool_choice"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": True}}},
            "response_format.schema",
        ),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": 7}, "stop"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"functions": []}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"seed": 10**30}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function"}]}, "tools.0.function.name"),
        ({"tools": [{**TOOL, "x": 2**64}]}, "tools.0"),
    ],
)
def test_bad_requests_name_the_parameter(body: dict[str, Any], field: str) -> None:
    assert refused(**body) == field
