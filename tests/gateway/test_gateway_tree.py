from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollserve.gateway.node import Match, Node
from rollserve.gateway.tree import Rule, Tree
from rollserve.gateway.turns import Verdict, judge, same_step
from rollserve.records.call import Break, Message, ToolCall
from rollserve.records.image import Image
from rollserve.testing.agent_behaviours import Session

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
        turn("edited", call="call_1"),
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
    deeper = add(tree, Match(parent=one, new=(USER,), given=(), form=(USER,)), turn("deep"))
    assert tree.match([SYSTEM, USER, turn("same"), USER, turn("deep"), USER], ()).parent is deeper


def test_changed_tools_begin_a_new_root_that_is_found_again() -> None:
    tree, first = started(turn("hi", call="call_1", reasoning="hm"))
    back = turn("hi ", call="call_1")
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
    assert match.broke == Break(cause="history_edited", at_message=4, from_call=first.call_id)
    second = add(tree, match, turn("new"))
    again = tree.match([SYSTEM, USER, first.reply, USER, turn("not ours"), USER, turn("new"), USER], ())
    assert (again.parent, again.new) == (second, (USER,))


# -- what comes back, and what differs in it


@pytest.mark.parametrize(
    ("back", "causes"),
    [
        (turn("hi", call="call_1", reasoning="hm"), ()),
        (turn("hi", call="call_1"), ("reasoning_dropped",)),
        (turn("hi\n", call="call_1", reasoning="hm"), ("newline",)),
        (turn(" hi", call="call_1", reasoning="hm"), ("blanks_trimmed",)),
        (turn("hi", call="x", reasoning="hm"), ("ids_changed",)),
        (turn("hi", call="", reasoning="hm"), ("ids_dropped",)),
    ],
)
def test_the_causes_are_named(back: Message, causes: tuple[str, ...]) -> None:
    tree, first = started(turn("hi", call="call_1", reasoning="hm"))
    match = tree.match([SYSTEM, USER, back, USER], ())
    assert match.parent is first
    assert [each.form.causes for each in match.differences] == ([causes] if causes else [])
    assert [each.at for each in match.differences] == ([2] if causes else [])


def arguments(text: str, **changes: Any) -> Message:
    call = {"id": "call_1", "name": "shell", "arguments": text, **changes}
    return Message(role="assistant", tool_calls=(ToolCall(**call),))


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        ('{"a": 1.0, "b": "x"}', '{"b":"x","a":1}', Verdict(("arguments_reserialized",))),
        ('{"a": true}', '{"a": 1}', Verdict(edited=True)),
        ('{"a": "1"}', '{"a": 1}', Verdict(edited=True)),
        ('{"a": 1}', '{"a": 2}', Verdict(edited=True)),
        ("[" * 100_000, "[" * 100_000, Verdict()),
        ("[" * 100_000, "[" * 99_999, Verdict(edited=True)),
        ('{"a": 1e999}', '{"a": 1e999 }', Verdict(("arguments_reserialized",))),
    ],
)
def test_arguments_are_compared_by_their_value(ours: str, theirs: str, verdict: Verdict) -> None:
    assert judge(arguments(ours), arguments(theirs), known=False) == verdict


EDIT: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "shell",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "all": {"type": "boolean", "default": False},
                "count": {"type": "number", "default": 1.0},
                "edits": {"type": "array", "items": {"properties": {"once": {"default": True}}}},
            },
        },
    },
}
DEFAULTED, EDITED = Verdict(("arguments_defaulted",)), Verdict(edited=True)


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        ('{"path": "a"}', '{"path": "a", "all": false}', DEFAULTED),
        ('{"path": "a", "all": false}', '{"path":"a"}', DEFAULTED),
        ('{"path": "a"}', '{"count":1,"path":"a"}', DEFAULTED),
        ('{"edits": [{"a": 1}, {}]}', '{"edits": [{"a": 1, "once": true}, {"once": true}]}', DEFAULTED),
        ('{"path": "a"}', '{"path": "a", "all": true}', EDITED),
        ('{"path": "a"}', '{"path": "a", "all": 0}', EDITED),
        ('{"path": "a"}', '{"path": "a", "all": null}', EDITED),
        ('{"path": "a", "all": true}', '{"path": "a"}', EDITED),
        ('{"path": "a"}', '{"path": "b", "all": false}', EDITED),
        ('{"path": "a"}', '{"path": "a", "other": false}', EDITED),
        ('["a"]', '{"all": false}', EDITED),
        ('{"path', '{"path": "a", "all": false}', EDITED),
    ],
)
def test_an_argument_with_its_tools_default_may_come_or_go(ours: str, theirs: str, verdict: Verdict) -> None:
    assert judge(arguments(ours), arguments(theirs), known=False, tools=(EDIT,)) == verdict
    assert judge(arguments(ours), arguments(theirs), known=False).edited


@pytest.mark.parametrize("parameters", [None, [], {"properties": []}, {"properties": {"all": True}}])
def test_a_schema_that_declares_nothing_makes_no_default(parameters: Any) -> None:
    tool = {"type": "function", "function": {"name": "shell", "parameters": parameters}}
    ours, theirs = arguments('{"a": 1}'), arguments('{"a": 1, "all": false}')
    assert judge(ours, theirs, known=False, tools=(tool,)).edited
    other = {"type": "function", "function": {**EDIT["function"], "name": "other"}}
    assert judge(ours, theirs, known=False, tools=(other,)).edited


@pytest.mark.parametrize("rule", ["exact", "faithful"])
def test_a_reply_with_a_default_filled_in_is_extended_or_not_by_the_rule(rule: Rule) -> None:
    tree = Tree()
    said = arguments('{"path": "a"}')
    first = add(tree, tree.match([SYSTEM, USER], (EDIT,)), said, (EDIT,))
    back = arguments('{"path": "a", "all": false}')
    match = tree.match([SYSTEM, USER, back, USER], (EDIT,), rule)
    assert [each.form.causes for each in match.differences] == [("arguments_defaulted",)]
    assert match.parent is (first if rule == "exact" else None)
    cause = match.broke.cause if match.broke else None
    assert cause == (None if rule == "exact" else "arguments_defaulted")


def test_a_call_that_could_not_be_read_comes_back_as_the_agent_likes() -> None:
    ours = arguments('{"command": "echo', error="not JSON")
    for theirs in (arguments("{}"), arguments('{"raw":"x"}', name="invalid")):
        assert judge(ours, theirs, known=False).causes == ("tool_call_repaired",)
    assert judge(ours, arguments("{}", id="other"), known=False).edited


def test_a_mark_of_ours_stands_for_thinking_that_was_not_shown() -> None:
    tree, first = started(turn("hi", reasoning="hm"))
    back = msgspec.structs.replace(turn("hi"), call_id=first.call_id)
    assert tree.match([SYSTEM, USER, back, USER], ()).differences == ()


def test_a_mark_tells_identical_siblings_apart() -> None:
    tree, one = started(turn("same"))
    add(tree, tree.match([SYSTEM, USER], ()), turn("same"))
    back = msgspec.structs.replace(turn("same"), call_id=one.call_id)
    assert tree.match([SYSTEM, USER, back, USER], ()).parent is one


def user(text: str) -> Message:
    return Message(role="user", content=text)


def seen(text: str, at: int, *digests: str) -> Message:
    return Message(role="user", content=text, images=tuple(Image(digest=digest, at=at) for digest in digests))


def result(text: str, call: str) -> Message:
    return Message(role="tool", content=text, tool_call_id=call)


@pytest.mark.parametrize(
    ("ours", "theirs", "causes"),
    [
        ((user("a"), user("b")), (user("a\n\nb"),), ("messages_merged",)),
        ((user("ab"),), (user("a"), user("b")), ("messages_split",)),
        ((user("a"), user(" b")), (user("ab"), user("")), ("messages_merged",)),
        ((user("a b"),), (user("ab"),), None),
        ((user("a"), user("b")), (user("b"), user("a")), None),
        ((result("a", "1"), result("b", "2")), (result("ab", "1"),), None),
        ((result("a", "1"), result("b", "1")), (result("a\nb", "1"),), ("messages_merged",)),
        ((user("a"), turn("t"), user("b")), (user("a"), turn("t "), user("b")), ("blanks_trimmed",)),
        ((user("a"), turn("t"), user("b")), (user("a"), turn("u"), user("b")), None),
        ((user("  x = 1"),), (user("x = 1"),), ("blanks_trimmed",)),
        ((user("if:\n  x"),), (user("if:\nx"),), None),
        ((user("a"), seen("b", 0, "i")), (seen("a\nb", 1, "i"),), ("messages_merged",)),
        ((seen("ab", 1, "i"),), (user("a"), seen("b", 0, "i")), ("messages_split",)),
        ((seen("a b", 1, "i"),), (seen("a b", 2, "i"),), ("blanks_trimmed",)),
        ((seen("ab", 1, "i"),), (seen("ab", 2, "i"),), None),
        ((seen("ab", 1, "i"),), (seen("ab", 1, "j"),), None),
        ((seen("ab", 1, "i", "j"),), (seen("ab", 1, "j", "i"),), None),
        ((seen("ab", 1, "i"),), (user("ab"),), None),
        ((user("ab"),), (seen("ab", 2, "i"),), None),
    ],
)
def test_messages_may_be_merged_or_split(
    ours: tuple[Message, ...], theirs: tuple[Message, ...], causes: tuple[str, ...] | None
) -> None:
    assert same_step(ours, theirs) == causes
    tree = Tree()
    node = add(tree, tree.match([SYSTEM, *ours], ()), turn("reply"))
    match = tree.match([SYSTEM, *theirs, node.reply, USER], ())
    assert match.parent is (None if causes is None else node)


def test_a_merged_form_is_known_the_next_time() -> None:
    tree = Tree()
    node = add(tree, tree.match([SYSTEM, user("a"), user("b")], ()), turn("r"))
    merged = [SYSTEM, user("a\nb"), turn("r")]
    first = tree.match([*merged, USER], ())
    assert len(tree.unseen(first)) == 1
    deeper = add(tree, first, turn("s"))
    again = tree.match([*merged, USER, turn("s"), USER], ())
    assert (again.parent, node.depth, deeper.depth) == (deeper, 4, 6)
    assert tree.unseen(again) == []
    assert deeper.conversation()[:3] == [SYSTEM, user("a"), user("b")]


def test_so_many_forms_are_remembered() -> None:
    """More are recognised all the same."""
    tree, first = started(turn("hi"))
    for blanks in range(9):
        match = tree.match([SYSTEM, USER, turn("hi" + " " * blanks), user(str(blanks))], ())
        assert match.parent is first
        add(tree, match, turn("r"))
        changed = (Message(role="system", content="s" + " " * blanks), USER)
        other = tree.match([*changed, turn("hi"), USER], ())
        assert other.parent is first
        add(tree, other, turn("q"))
    assert (len(first.returned), len(first.forms)) == (4, 4)
    assert first.forms[0].messages == (SYSTEM, USER)


def test_a_turn_split_into_text_and_calls_is_recognised() -> None:
    tree, first = started(turn("hi", call="call_1"))
    match = tree.match([SYSTEM, USER, turn("hi"), turn(call="call_1"), result("x", "call_1")], ())
    assert match.parent is first
    assert match.differences[0].form.causes == ("turn_split",)
    assert match.new == (result("x", "call_1"),)


def test_foreign_turns_at_the_beginning_are_found_again() -> None:
    tree = Tree()
    begun = [SYSTEM, user("context"), turn("Got it. Thanks for the context!"), user("task")]
    node = add(tree, tree.match(begun, ()), turn("r"))
    assert tree.match([*begun, turn("r"), USER], ()).parent is node
    other = tree.match([*begun[:3], user("another task")], ())
    assert (other.parent, other.broke) == (None, None)


def test_results_by_position_get_the_calls_ids() -> None:
    tree, first = started(turn("hi", call="call_1"))
    back = turn("hi", call="")
    match = tree.match([SYSTEM, USER, back, result("x", "#0")], ())
    assert match.new == (result("x", "call_1"),)
    second = add(tree, match, turn("done"))
    deeper = tree.match([SYSTEM, USER, back, result("x", "#0"), turn("done"), USER], ())
    assert deeper.parent is second
    assert first.returned[0].messages == (back,)


# -- edits


def test_other_instructions_are_named() -> None:
    tree, first = started(turn("hi"))
    second = add(tree, tree.match([SYSTEM, USER, first.reply, USER], ()), turn("ho"))
    moved = [Message(role="system", content="new"), USER, turn("hi"), USER, turn("ho"), USER]
    match = tree.match(moved, ())
    assert match.parent is None
    assert match.broke == Break(cause="system_changed", at_message=0, from_call=second.call_id)


def test_a_window_on_the_history_names_the_call_it_goes_on_from() -> None:
    tree, first = started(turn("first of all", call="call_1"))
    out = result("x", "call_1")
    second = add(tree, tree.match([SYSTEM, USER, first.reply, out], ()), turn("go on", call="call_2"))
    match = tree.match([SYSTEM, turn("go on", call="call_2"), result("y", "call_2")], ())
    assert match.broke == Break(cause="history_edited", at_message=1, from_call=second.call_id)


def test_kept_turns_of_a_new_history_are_as_the_model_gave_them() -> None:
    tree, first = started(turn("hi", call="call_1", reasoning="hm"))
    match = tree.match([user("summary"), turn("hi", call="call_1"), result("x", "call_1")], ())
    assert match.parent is None
    assert match.new == (user("summary"), first.reply, result("x", "call_1"))


# -- the run's rule


def test_faithful_renders_what_was_sent() -> None:
    tree, first = started(turn("hi", call="call_1", reasoning="hm"))
    whole: Rule = "faithful"
    same = tree.match([SYSTEM, USER, first.reply, USER], (), whole)
    assert same.parent is first
    back = turn("hi", call="call_1")
    match = tree.match([SYSTEM, USER, back, USER], (), whole)
    assert match.parent is None
    assert match.new == (SYSTEM, USER, back, USER)
    assert match.broke == Break(cause="reasoning_dropped", at_message=2, from_call=first.call_id)
    second = add(tree, match, turn("ho"))
    assert tree.match([SYSTEM, USER, back, USER, turn("ho"), USER], (), whole).parent is second


def test_an_edit_is_told_from_a_break() -> None:
    tree, first = started(turn("hi", call="call_1"))
    assert tree.match([SYSTEM, USER, turn("ho", call="call_1"), USER], ()).edited
    assert not tree.match([SYSTEM, user("v"), first.reply, USER], ()).edited


# -- against an independent reference


@settings(deadline=None, max_examples=300)
@given(seed=st.integers(0, 2**40))
def test_random_sessions_against_the_reference(seed: int) -> None:
    session = Session(random.Random(seed))
    session.run(calls=random.Random(seed + 1).randrange(4, 24))
    assert session.tree.size == len(session.reference.calls)


# -- what it costs


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


class Judging:
    """Counts the judgements of model turns."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(
        self, ours: Message, theirs: Message, *, known: bool, tools: tuple[dict[str, Any], ...] = ()
    ) -> Verdict:
        self.count += 1
        return judge(ours, theirs, known=known, tools=tools)


class Counted(Message, frozen=True):
    """Counts how often it is hashed."""

    hashed = 0

    def __hash__(self) -> int:
        Counted.hashed += 1
        return super().__hash__()


@pytest.mark.parametrize("rewrites", [False, True])
def test_the_cost_of_a_turn_does_not_follow_the_length_of_the_session(rewrites: bool) -> None:
    """200 turns: what is judged are the new turns alone, each once, and what is hashed what comes after the
    turns that are known."""
    judging = Judging()
    tree = Tree(judging)
    request: list[Message] = [SYSTEM]
    for index in range(200):
        request.append(Counted(role="user", content=str(index)))
        before = judging.count
        Counted.hashed = 0
        match = tree.match([msgspec.structs.replace(each) for each in request], ())
        assert judging.count - before <= (1 if rewrites else 0)
        assert index == 0 or Counted.hashed <= 1
        reply = turn(f"reply {index}", call=f"call_{index}", reasoning="hm")
        add(tree, match, reply)
        assert len(match.new) == (2 if index == 0 else 1)
        back = arguments('{"b":2,"a":1}', id=f"call_{index}").tool_calls
        request.append(msgspec.structs.replace(reply, tool_calls=back, reasoning=None) if rewrites else reply)
    assert judging.count == (199 if rewrites else 0)


def test_what_is_stored_follows_the_new_messages() -> None:
    """200 turns of an agent that rewrites each: every message is held once, every reply in two forms."""
    tree, request = Tree(), [SYSTEM]
    for index in range(200):
        request.append(user(str(index)))
        reply = turn(f"reply {index}", call=f"call_{index}", reasoning="hm")
        add(tree, tree.match([msgspec.structs.replace(each) for each in request], TOOLS), reply, TOOLS)
        request.append(msgspec.structs.replace(reply, reasoning=None))
    held = [
        message
        for node in tree.nodes()
        for each in ((node.reply,), *(f.messages for f in (*node.forms, *node.returned)))
        for message in each
    ]
    assert len({id(message) for message in held}) == 201 + 200 + 199
    assert len({id(node.tools) for node in tree.nodes()}) == 1
