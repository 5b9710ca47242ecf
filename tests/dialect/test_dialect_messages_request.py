"""What Claude Code and others put into a Messages request, and what is refused of it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollserve.dialect.base import Asked, Operation, Target
from rollserve.dialect.marks import mark
from rollserve.dialect.messages import MessagesDialect
from rollserve.errors import ContextTooLong, InvalidInput, MethodNotAllowed
from rollserve.records.call import Message, ToolCall
from rollserve.testing.dialect_cases import mutated
from rollserve.testing.dialect_conformance import examples

DIALECT = MessagesDialect()
USER = {"role": "user", "content": "hi"}
CACHED = {"cache_control": {"type": "ephemeral"}}


def parse(
    *messages: Any, headers: dict[str, str] | None = None, operation: Operation = "generate", **body: Any
) -> Asked:
    document = {"model": "m", "max_tokens": 9, "messages": messages or [USER], **body}
    target = Target(operation=operation)
    return DIALECT.parse(target, json.dumps(document).encode(), headers or {}, {"beta": "true"})


def text(content: str, **extra: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **extra}


def use(call_id: str, **extra: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "Bash", "input": {"command": "ls"}, **extra}


def result(call_id: str, content: Any = "out", **extra: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **extra}


def declared(name: str, **extra: Any) -> dict[str, Any]:
    return {"name": name, "description": "d", "input_schema": {"type": "object"}, **extra}


def offered(name: str) -> dict[str, Any]:
    function = {"name": name, "description": "d", "parameters": {"type": "object"}}
    return {"type": "function", "function": function}


def test_a_turn_of_claude_code() -> None:
    """System blocks, a system message among the messages, results in another order than the calls."""
    header = "x-anthropic-billing-header: cc_version=2.1.332.abc; cc_entrypoint=sdk-cli;"
    asked = parse(
        {"role": "user", "content": [text("<reminder/>"), text("do it", **CACHED)]},
        {"role": "system", "content": "env"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": mark("mc_7")},
                text("I will."),
                use("c1"),
                use("c2"),
            ],
        },
        {
            "role": "user",
            "content": [
                result("c2", [text("two"), text("!")], is_error=True),
                result("c1", **CACHED),
                text("and?"),
            ],
            "output_config": {"effort": "high"},
        },
        system=[text(header), text("You are Claude Code.", **CACHED)],
        stream=True,
    )
    calls = tuple(ToolCall(id=call_id, name="Bash", arguments='{"command":"ls"}') for call_id in ("c1", "c2"))
    assert asked.request.messages == (
        Message(role="system", content=header + "You are Claude Code."),
        Message(role="user", content="<reminder/>do it"),
        Message(role="system", content="env"),
        Message(role="assistant", content="I will.", reasoning="hm", tool_calls=calls, call_id="mc_7"),
        Message(role="tool", content="two!", tool_call_id="c2"),
        Message(role="tool", content="out", tool_call_id="c1"),
        Message(role="user", content="and?"),
    )
    assert (asked.model, asked.stream, asked.n) == ("m", True, 1)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"role": "user", "content": "a"}, {"role": "user", "content": [text("a")]}),
        ({"role": "user", "content": [text("a")]}, {"role": "user", "content": [text("a", **CACHED)]}),
        ({"role": "system", "content": "a"}, {"role": "system", "content": [text("a", **CACHED)]}),
        (
            {"role": "user", "content": [result("c", "a")]},
            {"role": "user", "content": [result("c", [text("a", **CACHED)], **CACHED)]},
        ),
        (
            {"role": "assistant", "content": [text("a"), use("c")]},
            {"role": "assistant", "content": [text("a"), use("c", **CACHED)]},
        ),
    ],
)
def test_cache_marks_and_forms_change_nothing(one: Any, other: Any) -> None:
    assert parse(one, USER).request.messages == parse(other, USER).request.messages


def test_a_result_without_content() -> None:
    blocks = [{"type": "tool_result", "tool_use_id": "c"}, result("d", [])]
    assert parse({"role": "user", "content": blocks}).request.messages == (
        Message(role="tool", tool_call_id="c"),
        Message(role="tool", tool_call_id="d"),
    )


@pytest.mark.parametrize("signature", ["EqQBCkYI", "", "cm9sbHNlcnZlOg==", "é", "skip", None])
def test_signatures_of_others_say_nothing(signature: str | None) -> None:
    block = {"type": "thinking", "thinking": "hm", "signature": signature}
    (message, _) = parse({"role": "assistant", "content": [block]}, USER).request.messages
    assert message == Message(role="assistant", reasoning="hm")


def test_redacted_thoughts() -> None:
    ours, others = ({"type": "redacted_thinking", "data": data} for data in (mark("mc_1"), "abc"))
    (message, _) = parse({"role": "assistant", "content": [others, ours]}, USER).request.messages
    assert message == Message(role="assistant", call_id="mc_1")


def test_input_that_could_not_be_read_comes_back_as_it_was() -> None:
    raw = '{"command": "echo hi'
    block = use("c", input={"__unparsedToolInput": {"raw": raw}})
    (message, _) = parse({"role": "assistant", "content": [block]}, USER).request.messages
    assert message.tool_calls == (ToolCall(id="c", name="Bash", arguments=raw),)


def test_tools() -> None:
    tools = [
        declared("Bash", type="custom", eager_input_streaming=True, **CACHED),
        {"name": "Edit", "input_schema": {"$schema": "x"}},
    ]
    bare = {"type": "function", "function": {"name": "Edit", "parameters": {"$schema": "x"}}}
    assert parse(tools=tools).request.tools == (offered("Bash"), bare)


def test_deferred_tools_are_offered_once_they_are_named() -> None:
    tools = [declared("ToolSearch"), declared("A", defer_loading=True), declared("B", defer_loading=True)]
    before = parse(tools=tools).request
    assert before.tools == (offered("ToolSearch"),)
    assert before.asked["tools_deferred"] == ["A", "B"]
    reference = {"type": "tool_reference", "tool_name": "B", **CACHED}
    after = parse({"role": "user", "content": [result("c", [reference])]}, tools=tools).request
    assert after.tools == (offered("ToolSearch"), offered("B"))
    assert after.asked["tools_deferred"] == ["A"]
    assert after.messages[0].content == '{"type":"tool_reference","tool_name":"B"}'


def test_tools_of_anthropics_servers_are_left_out_and_said_so() -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    asked = parse(tools=[search, declared("Bash")])
    assert asked.request.tools == (offered("Bash"),)
    assert asked.request.asked["tools_left_out"] == ["web_search_20250305"]
    with pytest.raises(InvalidInput, match="web_search_20250305"):
        parse(tools=[search])


def test_without_a_search_that_could_find_them_deferred_tools_are_offered() -> None:
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    tools = [search, declared("A", defer_loading=True)]
    assert parse(tools=tools).request.tools == (offered("A"),)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "auto", "disable_parallel_tool_use": True}, ["Bash"]),
        ({"type": "any"}, ["Bash"]),
        ({"type": "tool", "name": "Bash"}, ["Bash"]),
        ({"type": "none"}, []),
    ],
)
def test_the_choice_of_a_tool_is_advice(choice: dict[str, Any], names: list[str]) -> None:
    request = parse(tools=[declared("Bash")], tool_choice=choice).request
    assert [tool["function"]["name"] for tool in request.tools] == names
    assert request.asked["tool_choice"] == choice


def test_what_is_asked_for_is_kept() -> None:
    body: dict[str, Any] = {
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": "u"},
        "temperature": 1,
    }
    request = parse(**body, stop_sequences=["END"], top_k=None).request
    assert request.asked == {**body, "max_tokens": 9}
    assert request.stop == ("END",)
    assert request.schema is None


def test_the_schema_of_the_answer() -> None:
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    request = parse(output_config={"format": wanted, "effort": "low"}).request
    assert request.schema == {"type": "object"}
    assert request.asked["output_config"] == {"effort": "low"}
    assert parse(output_format=wanted).request.schema == {"type": "object"}


def test_who_is_asking() -> None:
    headers = {
        "x-claude-code-session-id": "s1",
        "x-claude-code-agent-id": "a1",
        "x-stainless-retry-count": "2",
    }
    assert parse(headers=headers).request.hints == {"session": "s1", "subagent": "a1", "retry": "2"}
    assert parse(headers={"x-stainless-retry-count": "0"}).request.hints == {}
    user_id = json.dumps({"device_id": "d", "session_id": "s2"})
    assert parse(metadata={"user_id": user_id}).request.hints == {"session": "s2"}
    assert parse(metadata={"user_id": "{"}).request.hints == {}


def test_compaction() -> None:
    summary = text("CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.")
    last = {"role": "user", "content": [result("c"), summary]}
    assert parse(last, {"role": "system", "content": "env"}).request.hints == {"purpose": "compaction"}
    assert parse({"role": "user", "content": [summary, text("no")]}).request.hints == {}
    assert parse(last, {"role": "assistant", "content": "a summary"}, USER).request.hints == {}


def test_counting_needs_no_max_tokens() -> None:
    asked = parse(operation="count", max_tokens=None, stream=True)
    assert asked.request.messages == (Message(role="user", content="hi"),)
    assert not asked.stream
    parse(USER, {"role": "assistant", "content": "The"}, operation="count", max_tokens=None)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
DEEP: dict[str, Any] = {}
for _ in range(80):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"max_tokens": 2**70}, "max_tokens"),
        ({"stream": 1}, "stream"),
        ({"system": [IMAGE]}, "system.0.type"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"stop_sequences": ["a", ""]}, "stop_sequences"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"output_config": {"format": {"type": "regex"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_format": {"type": "json_schema", "schema": DEEP}}, "output_format.schema"),
        ({"metadata": DEEP}, "metadata"),
        ({"tools": [{"input_schema": {}}]}, "tools.0.name"),
        ({"tools": [{"name": "a"}]}, "tools.0.input_schema"),
        ({"tools": [declared("a", description=3)]}, "tools.0.description"),
        ({"tools": [declared("a"), {"type": "bash_20250124", "name": "bash"}]}, "tools.1.type"),
        ({"tools": [declared("a", input_schema=DEEP)]}, "tools.0.input_schema"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [USER, {"role": "assistant", "content": "The"}]}, "messages.1.role"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0.source"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.source"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]},
            "messages.0.content.0.source.type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "assistant", "content": [IMAGE]}, USER]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [use("c")]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        (
            {"messages": [{"role": "user", "content": [result("c", [text("a"), IMAGE])]}]},
            "messages.0.content.0.content.1.source",
        ),
        (
            {"messages": [{"role": "user", "content": [result("c", 3)]}]},
            "messages.0.content.0.content",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages.0.content.0.tool_use_id",
        ),
        (
            {"messages": [{"role": "assistant", "content": [use("c", input="{}")]}, USER]},
            "messages.0.content.0.input",
        ),
        (
            {"messages": [{"role": "assistant", "content": [use("c", input=DEEP)]}, USER]},
            "messages.0.content.0.input",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "document"}]}, USER]},
            "messages.0.content.0.type",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused_is_named(body: dict[str, Any], field: str) -> None:
    document = {"model": "m", "max_tokens": 9, "messages": [USER], **body}
    with pytest.raises(InvalidInput) as caught:
        DIALECT.parse(Target(operation="generate"), json.dumps(document).encode(), {}, {})
    assert caught.value.field == field


def test_a_context_that_is_too_long_is_said_in_the_words_that_start_compaction() -> None:
    error = ContextTooLong("too long", field="messages", prompt_tokens=12, context_tokens=10)
    message = json.loads(DIALECT.error(error, 400))["error"]["message"]
    assert message == "prompt is too long: 12 tokens > 10 maximum"
    unknown = json.loads(DIALECT.error(ContextTooLong("much too long"), 400))["error"]["message"]
    assert unknown == "prompt is too long: much too long"


def test_paths() -> None:
    assert DIALECT.target("POST", "/v1/messages") == Target(operation="generate")
    assert DIALECT.target("POST", "/v1/messages/count_tokens") == Target(operation="count")
    assert DIALECT.target("GET", "/v1/models") == Target(operation="models")
    assert DIALECT.target("GET", "/v1/models/a/b") == Target(operation="models", model="a/b")
    for path in ("/", "/v1/messages/batches", "/v1/modelsx", "/api/hello"):
        assert DIALECT.target("POST", path) is None
    for method, path in (("GET", "/v1/messages"), ("POST", "/v1/models")):
        with pytest.raises(MethodNotAllowed):
            DIALECT.target(method, path)


def test_whose_client_it_is() -> None:
    assert DIALECT.speaks({"anthropic-version": "2023-06-01"})
    assert not DIALECT.speaks({"authorization": "Bearer x"})


EVERYTHING: dict[str, Any] = {
    "model": "m",
    "max_tokens": 9,
    "stream": True,
    "system": [text("s", **CACHED)],
    "messages": [
        {"role": "user", "content": [text("a"), text("b")]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": mark("mc_1")},
                {"type": "redacted_thinking", "data": "x"},
                use("c", input={"__unparsedToolInput": {"raw": "x"}}),
            ],
        },
        {"role": "user", "content": [result("c", [text("x"), {"type": "tool_reference", "tool_name": "A"}])]},
        {"role": "system", "content": "env"},
    ],
    "tools": [declared("A", defer_loading=True), {"type": "web_search_20250305", "name": "web_search"}],
    "tool_choice": {"type": "tool", "name": "A"},
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}, "effort": "high"},
    "output_format": {"type": "json_schema", "schema": {}},
    "stop_sequences": ["END"],
    "metadata": {"user_id": '{"session_id": "s"}'},
    "mcp_servers": [],
    "thinking": {"type": "adaptive"},
}


@examples
@given(document=mutated(EVERYTHING), operation=st.sampled_from(["generate", "count"]))
def test_a_broken_request_is_refused_or_served(document: Any, operation: Any) -> None:
    try:
        asked = DIALECT.parse(Target(operation=operation), json.dumps(document).encode(), {}, {})
    except InvalidInput as error:
        outcome = error.field
    else:
        msgspec.msgpack.encode(asked.request)
        outcome = "served"
    assert outcome
