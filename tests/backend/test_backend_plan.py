"""The scripted policy that follows a plan with the tools it is offered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollserve.gateway.rendering import Rendering
from rollserve.gateway.tokens import load_tokenizer
from rollserve.records.call import Message, ToolCall
from rollserve.records.policy import RendererSpec
from rollserve.testing.harness_trial import COLUMNS, Trial, branches_of, table
from rollserve.testing.scripted_plan import WATCHWORD, Step, arguments_for, editing_plan, follow, offered
from rollserve.tiny_tokenizer import TinyTokenizer


def tool(name: str, *required: str, **properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": "…", "parameters": schema}}


TEXT: dict[str, Any] = {"type": "string"}
BASH = tool("Bash", "command", command=TEXT)
WRITE = tool("Write", "file_path", "content", file_path=TEXT, content=TEXT)


@pytest.fixture(scope="module")
def rendering() -> Rendering:
    return Rendering(RendererSpec(name="qwen3"), load_tokenizer("tiny"))


def said(rendering: Rendering, messages: list[Message], tools: list[dict[str, Any]]) -> Message:
    """What the plan says to a conversation, read as the gateway reads it."""
    prompt = rendering.render(messages, tools)
    reply = follow(editing_plan("/f"))(prompt)
    return rendering.parse(list(reply.token_ids), tools, prompt[-8:]).message


def conversation(results: int, system: str = "You have <tools>\n- bash\n</tools>.") -> list[Message]:
    messages = [Message(role="system", content=system), Message(role="user", content="go")]
    for index in range(results):
        call = ToolCall(id=f"c{index}", name="Bash", arguments='{"command": "true"}')
        messages.append(Message(role="assistant", tool_calls=(call,)))
        messages.append(Message(role="tool", content="ok", tool_call_id=f"c{index}"))
    return messages


def test_a_step_is_done_with_the_tool_there_is_for_it(rendering: Rendering) -> None:
    (call,) = said(rendering, conversation(0), [BASH, WRITE]).tool_calls
    assert call.name == "Write"
    assert json.loads(call.arguments) == {"file_path": "/f", "content": "alpha\nbeta\n"}


def test_or_with_a_command(rendering: Rendering) -> None:
    (call,) = said(rendering, conversation(1), [BASH, WRITE]).tool_calls
    assert call.name == "Bash"
    assert json.loads(call.arguments) == {"command": "sed -i s/beta/gamma/ /f"}


def test_the_plan_ends_in_words(rendering: Rendering) -> None:
    last = said(rendering, conversation(3), [BASH])
    assert last.tool_calls == ()
    assert "alpha and gamma" in last.content
    assert said(rendering, conversation(9), [BASH]) == last


def test_or_in_the_watchword_where_one_is_asked_for(rendering: Rendering) -> None:
    asks = conversation(3, system=f"End with echo {WATCHWORD}")
    (call,) = said(rendering, asks, [BASH]).tool_calls
    assert WATCHWORD in call.arguments


def test_a_prompt_without_tools_gets_a_title(rendering: Rendering) -> None:
    assert said(rendering, conversation(0), []).content == "Edit a file"


def test_tools_that_can_do_nothing_are_an_error() -> None:
    tokenizer = TinyTokenizer()
    rendering = Rendering(RendererSpec(name="qwen3"), load_tokenizer("tiny"))
    prompt = rendering.render([Message(role="user", content="go")], [tool("dance")])
    assert list(offered(tokenizer.decode(prompt))) == ["dance"]
    with pytest.raises(ValueError, match="dance"):
        follow([Step(do="run", command="true")])(prompt)


@pytest.mark.parametrize(
    ("properties", "required", "expected"),
    [
        ({"cmd": TEXT}, ["cmd"], {"cmd": "ls"}),
        ({"command": {"type": "array"}}, [], {"command": ["bash", "-lc", "ls"]}),
        ({"command": {"type": "STRING"}, "why": TEXT, "n": {"type": "INTEGER"}}, ["why", "n"], None),
        ({"path": TEXT}, [], "no place"),
    ],
)
def test_arguments_fit_the_schema(properties: dict[str, Any], required: list[str], expected: Any) -> None:
    made = arguments_for({"properties": properties, "required": required}, {"command": "ls"})
    if expected == "no place":
        assert made is None
    else:
        assert made == (expected or {"command": "ls", "why": "scripted", "n": 1})


def test_edits_may_be_a_list() -> None:
    edits = {"type": "array", "items": {"properties": {"oldText": TEXT, "newText": TEXT}}}
    schema = {"properties": {"path": TEXT, "edits": edits}}
    given = {"path": "/f", "old": "a", "new": "b"}
    assert arguments_for(schema, given) == {"path": "/f", "edits": [{"oldText": "a", "newText": "b"}]}


def test_a_trial_says_why_a_line_began() -> None:
    calls: list[dict[str, Any]] = [
        {"id": "1", "parent": None},
        {"id": "2", "parent": "1"},
        {"id": "3", "parent": None},
        {"id": "4", "parent": "1"},
        {"id": "5", "parent": None, "broke": {"cause": "template"}},
    ]
    assert branches_of(calls) == ["a beginning", "a fork", "template"]
    assert branches_of(calls[:2]) == branches_of([]) == []


def test_a_table_has_a_row_a_trial() -> None:
    good = Trial(harness="pi", dialect="chat", completed=True, calls=2, sampled=10, trained=9, lost={"x": 1})
    bad = Trial(harness="mini", dialect="chat", completed=False, why="no")
    head, line, first, second = table([good, bad]).splitlines()
    assert [cell.strip() for cell in head.strip("|").split("|")] == list(COLUMNS)
    assert set(line) <= set("|- ")
    cells = dict(zip(COLUMNS, (cell.strip() for cell in first.strip("|").split("|")), strict=True))
    assert (cells["completed"], cells["calls"], cells["branches"]) == ("yes", "2", "0")
    assert (cells["exact"], cells["sequences"], cells["untrainable"]) == ("90.0%", "0", "1 x")
    assert "no: no" in second
