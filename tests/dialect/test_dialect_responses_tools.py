from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseCustomToolCall, ResponseFunctionToolCall

from rollserve.dialect.base import Answered, Asked, Target
from rollserve.dialect.responses import ResponsesDialect
from rollserve.errors import InvalidInput
from rollserve.records.call import Message, ToolCall

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": False}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "edits",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: WORD"},
}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [
        {"type": "function", "name": "spawn", "description": "Starts one.", "parameters": SCHEMA},
        {"type": "custom", "name": "tell"},
    ],
}


def parse(**body: Any) -> Asked:
    raw = json.dumps({"model": "m", "input": "hi", **body}).encode()
    return ResponsesDialect().parse(Target(operation="generate"), raw, {}, {})


def answer(asked: Asked, *calls: ToolCall) -> list[Any]:
    message = Message(role="assistant", tool_calls=calls)
    given = Answered(
        call_id="mc_1", message=message, finish_reason="tool_calls", prompt_tokens=1, sampled_tokens=1
    )
    whole = ResponsesDialect().whole(asked, [given], created_s=1)
    return Response.model_validate_json(whole).output


def test_function_tools() -> None:
    asked = parse(tools=[FUNCTION, {"type": "function", "name": "g", "parameters": None, "strict": None}])
    flat = {key: value for key, value in FUNCTION.items() if key != "type"}
    assert asked.request.tools == (
        {"type": "function", "function": flat},
        {"type": "function", "function": {"name": "g"}},
    )


def test_a_custom_tool_is_a_function_of_one_text() -> None:
    (tool,) = parse(tools=[PATCH]).request.tools
    function = tool["function"]
    assert (function["name"], function["description"]) == ("apply_patch", "edits")
    assert function["parameters"]["required"] == ["input"]
    described = function["parameters"]["properties"]["input"]["description"]
    assert "lark" in described
    assert "start: WORD" in described


def test_a_call_of_a_custom_tool_carries_its_text() -> None:
    asked = parse(tools=[PATCH])
    call = ToolCall(id="c1", name="apply_patch", arguments='{"input": "*** Begin\\n\\"x\\""}')
    (item,) = answer(asked, call)
    assert isinstance(item, ResponseCustomToolCall)
    assert (item.name, item.call_id, item.input, item.namespace) == (
        "apply_patch",
        "c1",
        '*** Begin\n"x"',
        None,
    )


@pytest.mark.parametrize(
    "arguments", ["{bad", '{"input": 3}', '{"input": "a", "b": 1}', "[]", '"x"', '{"input": "\\ud800"}', ""]
)
def test_what_is_no_text_for_a_custom_tool_goes_out_and_comes_back_as_written(arguments: str) -> None:
    (item,) = answer(parse(tools=[PATCH]), ToolCall(id="c1", name="apply_patch", arguments=arguments))
    assert item.input == arguments
    (turn,) = parse(input=[item.model_dump(exclude_unset=True)]).request.messages
    assert turn.tool_calls == (ToolCall(id="c1", name="apply_patch", arguments=arguments),)


def test_tools_of_a_namespace_are_offered_flat_and_called_under_both_names() -> None:
    asked = parse(tools=[FUNCTION, AGENTS])
    functions = [tool["function"] for tool in asked.request.tools]
    assert [function["name"] for function in functions] == ["f", "agents__spawn", "agents__tell"]
    assert functions[1]["description"] == "Other agents.\n\nStarts one."
    spawn, tell, unknown = answer(
        asked,
        ToolCall(id="c1", name="agents__spawn", arguments="{}"),
        ToolCall(id="c2", name="agents__tell", arguments='{"input":"x"}'),
        ToolCall(id="c3", name="other__tool", arguments="{}"),
    )
    assert isinstance(spawn, ResponseFunctionToolCall)
    assert (spawn.namespace, spawn.name) == ("agents", "spawn")
    assert isinstance(tell, ResponseCustomToolCall)
    assert (tell.namespace, tell.name, tell.input) == ("agents", "tell", "x")
    assert (unknown.namespace, unknown.name) == (None, "other__tool")
    back = [item.model_dump(exclude_unset=True) for item in (spawn, tell, unknown)]
    (turn,) = parse(input=back, tools=[]).request.messages
    assert [call.name for call in turn.tool_calls] == ["agents__spawn", "agents__tell", "other__tool"]


def test_tools_that_nobody_would_run_are_dropped_and_recorded() -> None:
    hosted = [{"type": "web_search", "external_web_access": True}, {"type": "tool_search"}]
    asked = parse(tools=[FUNCTION, *hosted])
    assert len(asked.request.tools) == 1
    assert asked.request.asked == {"dropped_tools": hosted}


def test_tools_that_an_item_adds_are_offered_too() -> None:
    more = {"type": "additional_tools", "role": "developer", "tools": [PATCH]}
    asked = parse(input=[more, {"role": "user", "content": "hi"}], tools=[FUNCTION])
    assert [tool["function"]["name"] for tool in asked.request.tools] == ["f", "apply_patch"]
    assert asked.request.messages == (Message(role="user", content="hi"),)


def test_none_means_that_none_is_offered() -> None:
    asked = parse(tools=[FUNCTION], tool_choice="none")
    assert (asked.request.tools, asked.request.asked) == ((), {"tool_choice": "none"})
    named = {"type": "custom", "name": "apply_patch"}
    asked = parse(tools=[PATCH], tool_choice=named)
    assert (len(asked.request.tools), asked.request.asked) == (1, {"tool_choice": named})


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ([FUNCTION, {"type": "file_search"}], "tools.1.type"),
        ([{"type": "local_shell"}], "tools.0.type"),
        ([{"type": "code_interpreter"}], "tools.0.type"),
        ([{"type": 3}], "tools.0.type"),
        ([{"type": "function"}], "tools.0.name"),
        ([{"type": "function", "name": ""}], "tools.0.name"),
        ([{"type": "custom", "name": "x", "format": "lark"}], "tools.0.format"),
        ([{"type": "namespace", "name": "n", "tools": [3]}], "tools.0.tools"),
        ([{"type": "namespace", "name": "n"}], "tools.0.tools"),
        ([{**AGENTS, "name": None}], "tools.0.name"),
        ([{**AGENTS, "tools": [AGENTS]}], "tools.0.tools.0.type"),
        ([{**FUNCTION, "name": "agents__spawn"}, AGENTS], "tools.1.tools.0.name"),
        ([FUNCTION, {"type": "custom", "name": "f"}], "tools.1.name"),
        ([{**FUNCTION, "parameters": {"maximum": 2**64}}], "tools.0"),
    ],
)
def test_tools_that_are_refused(tools: list[Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse(tools=tools)
    assert caught.value.field == field
