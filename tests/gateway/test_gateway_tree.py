from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollserve.gateway.tree import Match, Node, Tree, same_turn
from rollserve.records.call import Break, Message, ToolCall

SYSTEM = Message(role="system", content="s")
USER = Message(role="user", content="u")
TOOLS: tuple[dict[str, Any], ...] = ({"type": "function", "function": {"name": "shell"}},)


def turn(text: str = "", *, call: str | None = None, reasoning: str | None = None) -> Message:
    calls = () if call is None else (ToolCall(id=call, name="shell", arguments='{"a": 1, "b": 2}'),)
    return Message(role="assistant", content=text, reasoning=reasoning, tool_calls=calls)


def add(tree: Tree, match: Match, reply: Message, tools: tuple[dict[str, Any], ...] = ()) -> Node:
    return tree.add(match, call_id=f"c{tree.size}", reply=reply, tools=tools, prompt_ids=b"", sampled_ids=b"")


def started(reply: Message) -> tuple[Tree, Node]:
    tree = Tree()
    match = tree.match([SYSTEM, USER], ())
    assert match.parent is None
    assert match.broke is None
    return tree, add(tree, match, reply)


def test_the_next_turn_adds_only_its_own_messages() -> None:
    tree, first = started(turn("hi", call="call_1", reasoning="hm"))
    out = Message(role="tool", content="out", tool_call_id="call_1")
    match = tree.match([SYSTEM, USER, first.reply, out], ())
    assert (match.parent, match.new, match.broke) == (first, (out,), None)


@pytest.mark.parametrize(
    "back",
    [
        turn("hi", call="call_1", reasoning="hm"),
        turn(" hi\n", call="call_1"),
        turn("hi", call="other", reasoning="hm"),
        turn("edited", call="call_1"),
        msgspec.structs.replace(
            turn("hi"), tool_calls=(ToolCall(id="", name="shell", arguments='{"b":2,"a":1}'),)
        ),
    ],
)
def test_a_reply_is_recognised(back: Message) -> None:
    tree, first = started(turn("hi", call="call_1", reasoning="hm"))
    assert tree.match([SYSTEM, USER, back, USER], ()).parent is first


@pytest.mark.parametrize(
    "back",
    [
        turn("ho", call="other"),
        turn("hi"),
        turn("hi", call="other", reasoning="else"),
        msgspec.structs.replace(turn("hi"), tool_calls=(ToolCall(id="", name="shell", arguments="{}"),)),
        msgspec.structs.replace(
            turn("hi"), tool_calls=(ToolCall(id="", name="sh", arguments='{"a": 1, "b": 2}'),)
        ),
    ],
)
def test_another_reply_is_an_edit(back: Message) -> None:
    tree, first = started(turn("hi", call="call_1", reasoning="hm"))
    match = tree.match([SYSTEM, USER, back, USER], ())
    assert match.parent is None
    assert match.new == (SYSTEM, USER, back, USER)
    assert match.broke == Break(cause="history_edited", at_message=2, from_call=first.call_id)


def test_an_edited_question_names_the_first_message_that_differs() -> None:
    tree, first = started(turn("hi"))
    match = tree.match([SYSTEM, Message(role="user", content="v"), first.reply, USER], ())
    assert match.broke == Break(cause="history_edited", at_message=1, from_call="c0")


def test_a_new_conversation_is_no_break() -> None:
    tree, _ = started(turn("hi"))
    assert tree.match([SYSTEM, Message(role="user", content="sub-agent")], ()).broke is None
    other = [Message(role="user", content="x"), turn("few-shot"), USER]
    assert tree.match(other, ()).broke is None


def test_the_same_request_again_is_a_sibling() -> None:
    tree, first = started(turn("hi"))
    add(tree, tree.match([SYSTEM, USER, first.reply, USER], ()), turn("a"))
    again = tree.match([SYSTEM, USER, first.reply, USER], ())
    assert again.parent is first
    assert tree.match([SYSTEM, USER], ()).parent is None


def test_identical_siblings_are_told_apart_by_what_follows() -> None:
    tree, one = started(turn("same"))
    two = add(tree, tree.match([SYSTEM, USER], ()), turn("same"))
    assert tree.match([SYSTEM, USER, turn("same"), USER], ()).parent is two
    deeper = add(tree, Match(parent=one, new=(USER,), given=(), step=(USER,)), turn("deep"))
    assert tree.match([SYSTEM, USER, turn("same"), USER, turn("deep"), USER], ()).parent is deeper


def test_changed_tools_begin_a_new_root_that_is_found_again() -> None:
    tree, first = started(turn("hi", call="call_1", reasoning="hm"))
    # the agent has lost the reasoning and edited the text; the id still says which turn it is
    back = turn("hey", call="call_1")
    match = tree.match([SYSTEM, USER, back, USER], TOOLS)
    assert match.broke == Break(cause="tools_changed", at_message=3, from_call=first.call_id)
    assert match.new == (SYSTEM, USER, first.reply, USER)
    second = add(tree, match, turn("ho"), TOOLS)
    assert tree.match([SYSTEM, USER, back, USER, turn("ho"), USER], TOOLS).parent is second
    assert tree.match([SYSTEM, USER, back, USER], ()).parent is first


def test_a_turn_of_someone_else_after_ours_is_an_edit() -> None:
    tree, first = started(turn("hi"))
    match = tree.match([SYSTEM, USER, first.reply, USER, turn("not ours"), USER], ())
    assert match.parent is None
    assert match.broke == Break(cause="history_edited", at_message=3, from_call=first.call_id)
    second = add(tree, match, turn("new"))
    again = tree.match([SYSTEM, USER, first.reply, USER, turn("not ours"), USER, turn("new"), USER], ())
    assert (again.parent, again.new) == (second, (USER,))


def test_arguments_that_are_no_json_are_compared_as_text() -> None:
    deep = ToolCall(id="a", name="shell", arguments="[" * 100_000)
    ours = Message(role="assistant", tool_calls=(deep,))
    theirs = Message(role="assistant", tool_calls=(msgspec.structs.replace(deep, id="b"),))
    assert same_turn(ours, theirs)
    other = msgspec.structs.replace(deep, id="b", arguments="[" * 99_999)
    assert not same_turn(ours, Message(role="assistant", tool_calls=(other,)))


# -- against a reference that compares every path with the request, message by message


@dataclass
class Recorded:
    """``path`` are the messages up to the reply, each with whether it is a reply of ours."""

    node: Node
    sent: list[Message]
    path: list[tuple[Message, bool]]


@dataclass
class Reference:
    calls: list[Recorded] = field(default_factory=list)

    def parents(self, messages: list[Message], tools: object) -> list[Recorded]:
        """All acceptable parents, by the rule of the module's docstring."""
        fits = [
            recorded
            for recorded in self.calls
            if len(recorded.path) <= len(messages)
            and all(_equal(*one, other) for one, other in zip(recorded.path, messages, strict=False))
            and recorded.node.tools == tools
            and all(message.role != "assistant" for message in messages[len(recorded.path) :])
        ]
        deepest = max((len(recorded.path) for recorded in fits), default=0)
        return [recorded for recorded in fits if len(recorded.path) == deepest]


def _equal(known: Message, ours: bool, theirs: Message) -> bool:
    if known.role != "assistant":
        return known == theirs
    if theirs.role != "assistant":
        return False
    if ours and known.tool_calls and [c.id for c in known.tool_calls] == [c.id for c in theirs.tool_calls]:
        return True
    said = [(c.name, json.loads(c.arguments)) for c in known.tool_calls]
    return (
        said == [(c.name, json.loads(c.arguments)) for c in theirs.tool_calls]
        and known.content.strip() == theirs.content.strip()
        and (not ours or theirs.reasoning in (None, known.reasoning))
    )


OPERATIONS = ["go on", "fork", "retry", "edit", "drop reasoning", "respell", "tools", "foreign", "fresh"]


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_random_conversations_against_the_reference(data: st.DataObject) -> None:
    tree, reference = Tree(), Reference()
    for drawn in range(data.draw(st.integers(1, 12))):
        operation = data.draw(st.sampled_from(OPERATIONS))
        tools = TOOLS if operation == "tools" else ()
        base = data.draw(st.sampled_from(reference.calls)) if reference.calls else None
        word = data.draw(st.sampled_from("ab"))
        message = Message(role=data.draw(st.sampled_from(["user", "tool"])), content=word)
        if base is None or operation == "fresh":
            request = [SYSTEM, message]
        elif operation == "retry":
            request = list(base.sent)
        else:
            request = [*_returned([*base.sent, base.node.reply], operation), message]
            if operation == "foreign":
                request += [turn("someone else"), message]
        match = tree.match(request, tools)
        expected = reference.parents(request, tools)
        before = [recorded.path for recorded in expected if recorded.node is match.parent]
        assert (match.parent is not None) == bool(expected)
        assert bool(before) == bool(expected)
        if before:
            assert match.broke is None
            assert match.new == tuple(request[len(before[0]) :])
            path = [*before[0], *((message, False) for message in match.new)]
        else:
            path = [(message, False) for message in request]
        reply = turn(word, call=data.draw(st.sampled_from([None, f"call_{drawn}"])), reasoning="hm")
        node = add(tree, match, reply, tools)
        reference.calls.append(Recorded(node, request, [*path, (reply, True)]))
        assert node.depth == len(request) + 1
        assert len(node.conversation()) == node.depth


def _returned(whole: list[Message], operation: str) -> list[Message]:
    """The conversation as an agent sends it back."""
    replace = msgspec.structs.replace
    back = []
    for message in whole:
        if message.role != "assistant":
            back.append(message)
        elif operation == "drop reasoning":
            back.append(replace(message, reasoning=None, content=f"\n{message.content} "))
        elif operation == "respell":
            calls = tuple(replace(c, id="x", arguments='{"b":2, "a":1}') for c in message.tool_calls)
            back.append(replace(message, tool_calls=calls))
        elif operation == "edit":
            back.append(replace(message, content=f"{message.content}!", tool_calls=()))
        else:
            back.append(message)
    return back


def test_a_long_conversation_adds_one_message_a_turn() -> None:
    tree = Tree()
    request: list[Message] = [SYSTEM]
    for index in range(200):
        request.append(Message(role="user", content=str(index)))
        match = tree.match(request, ())
        assert len(match.new) == (2 if index == 0 else 1)
        request.append(turn(f"reply {index}"))
        add(tree, match, request[-1])
    assert tree.match(request, ()).parent is tree.newest
