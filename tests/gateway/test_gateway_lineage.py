"""What calls are taken for, from shapes of requests that real agents send."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from rollserve.gateway.lineage import Lineage, at_record, of_request, settled, without_break
from rollserve.gateway.node import Match, Node
from rollserve.gateway.tree import Tree
from rollserve.records.call import Call, ChatRequest, Label, Message, SamplingParams, ToolCall
from rollserve.testing.agent_behaviours import Session

from .conftest import SHELL

SUMMARY = "The bug is in parse.py, line 12; the fix is written and the tests are still to be run."


Hints = Mapping[str, str]
NONE: Hints = {}


def system(text: str = "You are an agent.") -> Message:
    return Message(role="system", content=text)


def user(text: str) -> Message:
    return Message(role="user", content=text)


def reply(text: str = "ok", *calls: str, arguments: str = "{}") -> Message:
    tool_calls = tuple(ToolCall(id=call, name="task", arguments=arguments) for call in calls)
    return Message(role="assistant", content=text, tool_calls=tool_calls)


class Agents:
    """Requests in, labels out; ``calls`` as they would be recorded."""

    def __init__(self) -> None:
        self.tree = Tree()
        self.calls: list[Call] = []

    def plan(
        self, *messages: Message, tools: bool = True, hints: Hints = NONE
    ) -> tuple[Match, ChatRequest, Lineage]:
        request = ChatRequest(messages=messages, tools=(SHELL,) if tools else (), hints=dict(hints))
        match = self.tree.match(request.messages, request.tools)
        lineage = of_request(self.tree, match, request)
        return without_break(self.tree, match, lineage), request, lineage

    def record(self, planned: tuple[Match, ChatRequest, Lineage], said: Message) -> Node:
        match, request, lineage = planned
        lineage = at_record(self.tree, match, lineage)
        name = f"c{self.tree.size}"
        call = Call(
            id=name,
            parent=match.parent.call_id if match.parent else None,
            messages=match.new,
            tools=request.tools or None,
            prompt_ids=b"",
            sampled_ids=b"",
            logprobs=b"",
            versions=(),
            reply=said,
            finish_reason="stop",
            sampling=SamplingParams(),
            label=lineage.label,
            origin=lineage.origin,
            broke=match.broke,
        )
        self.calls.append(call)
        return self.tree.add(
            match,
            call_id=name,
            reply=said,
            tools=request.tools,
            prompt_ids=b"",
            sampled_ids=b"",
            label=lineage.label,
        )

    def ask(
        self, *messages: Message, said: Message | None = None, tools: bool = True, hints: Hints = NONE
    ) -> Label:
        self.record(self.plan(*messages, tools=tools, hints=hints), said or reply())
        return self.calls[-1].label

    def settled(self) -> list[Label]:
        return list(settled(self.calls).values())


BEGUN = (system(), user("Fix the bug."))


def test_a_conversation_goes_on() -> None:
    agents = Agents()
    assert agents.ask(*BEGUN, said=reply("", "t1")) == "continuation"
    out = Message(role="tool", content="x", tool_call_id="t1")
    assert agents.ask(*BEGUN, reply("", "t1"), out) == "continuation"
    assert agents.settled() == ["continuation"] * 2


def test_the_same_request_again_is_a_retry_and_another_a_fork() -> None:
    agents = Agents()
    agents.ask(*BEGUN, said=reply("hm"))
    assert agents.ask(*BEGUN, reply("hm"), user("a")) == "continuation"
    assert agents.ask(*BEGUN, reply("hm"), user("a")) == "retry"
    assert agents.ask(*BEGUN, reply("hm"), user("b")) == "fork"
    assert agents.ask(*BEGUN) == "retry"
    assert agents.ask(system(), user("Something else.")) == "fork"


def test_several_at_once_are_forks() -> None:
    agents = Agents()
    planned = [agents.plan(*BEGUN) for _ in range(3)]
    for each in planned:
        agents.record(each, reply())
    assert [call.label for call in agents.calls] == ["continuation", "fork", "fork"]


@pytest.mark.parametrize("marked", [True, False])
def test_a_subagent_and_what_goes_on_from_it(marked: bool) -> None:
    """Some clients mark their sub-agents, others only give them other instructions."""
    hints = {"subagent": "s1"} if marked else {}
    agents = Agents()
    asks = reply("", "t1", arguments='{"prompt": "Look at\\nthe tests."}')
    agents.ask(*BEGUN, said=asks)
    helper = (system("You are a helper."), user("Look at\nthe tests."))
    assert agents.ask(*helper, said=reply("", "t2"), hints=hints) == "subagent"
    assert agents.calls[-1].origin == "c0"
    out = Message(role="tool", content="x", tool_call_id="t2")
    assert agents.ask(*helper, reply("", "t2"), out, hints=hints) == "subagent"
    # the main line and the sub-agent's interleave
    done = Message(role="tool", content="fine", tool_call_id="t1")
    assert agents.ask(*BEGUN, asks, done) == "continuation"
    assert agents.ask(*helper, reply("", "t2"), out, hints=hints) == "subagent"


def test_a_subagent_with_the_main_lines_history_is_no_break() -> None:
    agents = Agents()
    agents.ask(*BEGUN, said=reply("", "t1"))
    out = Message(role="tool", content="x", tool_call_id="t1")
    assert (
        agents.ask(system("helper"), BEGUN[1], reply("", "t1"), out, hints={"subagent": "s1"}) == "subagent"
    )
    assert agents.calls[-1].broke is None


def test_a_title_during_the_main_line_is_a_side_call() -> None:
    agents = Agents()
    agents.ask(*BEGUN)
    assert agents.ask(system("Write a title."), user('"Fix the bug."'), tools=False) == "side"
    assert agents.ask(system("Write a title."), user('"Fix the bug."'), tools=False) == "side"


def test_a_title_before_the_main_line_is_known_in_the_end() -> None:
    agents = Agents()
    assert agents.ask(system("Write a title."), user('"Fix the bug."'), tools=False) == "continuation"
    assert agents.ask(*BEGUN) == "continuation"
    assert agents.ask(*BEGUN, reply(), user("go on")) == "continuation"
    assert agents.ask(system("helper"), user("x")) == "subagent"
    assert agents.settled() == ["side", "continuation", "continuation", "subagent"]


def test_a_title_that_the_client_names() -> None:
    assert Agents().ask(system("T"), user("x"), tools=False, hints={"purpose": "title"}) == "side"


def test_what_is_done_aside_makes_no_fork() -> None:
    agents = Agents()
    agents.ask(*BEGUN, said=reply("hm"))
    asked = (*BEGUN, reply("hm"))
    assert agents.ask(*asked, user("title?"), hints={"purpose": "title"}) == "side"
    assert (
        agents.ask(*asked, user("sum up"), hints={"purpose": "compaction", "subagent": "x"}) == "compaction"
    )
    assert agents.ask(*asked, user("go on")) == "continuation"
    assert agents.ask(*asked, user("no, go there")) == "fork"


def test_an_agent_without_tools_is_no_side_call() -> None:
    agents = Agents()
    agents.ask(*BEGUN, tools=False)
    assert agents.ask(system("Write a commit message."), user("diff"), tools=False) == "continuation"
    assert agents.settled() == ["continuation"] * 2


def test_a_compaction_that_the_client_names() -> None:
    """The same history without tools and a prompt; then all user texts and the summary."""
    agents = Agents()
    agents.ask(*BEGUN, said=reply("", "t1"))
    out = Message(role="tool", content="x", tool_call_id="t1")
    asked = (*BEGUN, reply("", "t1"), out, user("CHECKPOINT"))
    said = reply("short one")
    assert agents.ask(*asked, said=said, tools=False, hints={"purpose": "compaction"}) == "compaction"
    assert agents.ask(*BEGUN, user("Another wrote: short one")) == "compaction"
    assert agents.calls[-1].origin == "c1"
    assert agents.ask(*BEGUN, user("Another wrote: short one"), reply(), user("go")) == "continuation"


def test_a_compaction_that_nobody_names() -> None:
    """The last message gets another text; the summary is taken out of its tags."""
    agents = Agents()
    agents.ask(*BEGUN, said=reply("", "t1"))
    asked = Message(role="tool", content="x", tool_call_id="t1")
    said = reply(f"<analysis>hm</analysis>\n<summary>\n{SUMMARY}\n</summary>")
    agents.ask(*BEGUN, reply("", "t1"), asked, user("TEXT ONLY: summarize"), said=said)
    new = (system(), user(f"This goes on from another session. {SUMMARY} Go on."))
    assert agents.ask(*new) == "compaction"
    assert agents.settled() == ["continuation", "compaction", "compaction"]


def test_a_summary_that_was_asked_for_as_such_is_known_without_its_frame() -> None:
    """Claude Code says what it asks for; the history that follows holds what stood in the tags."""
    agents = Agents()
    agents.ask(*BEGUN, said=reply("", "t1"))
    asked = Message(role="tool", content="x", tool_call_id="t1")
    said = reply(f"<summary>\n{SUMMARY}\n</summary>")
    hints = {"purpose": "compaction"}
    agents.ask(*BEGUN, reply("", "t1"), asked, user("summarize"), said=said, hints=hints)
    assert agents.ask(system(), user(f"It goes on. {SUMMARY} Go on."), *BEGUN[1:]) == "compaction"
    assert agents.calls[-1].broke is None


def test_what_is_summarised_is_no_compaction_for_that() -> None:
    """Codex asks for its summary without tools: a new root, which stems from the newest call."""
    agents = Agents()
    agents.ask(*BEGUN, said=reply("", "t1"))
    history = (*BEGUN, reply("", "t1"), Message(role="tool", content="x", tool_call_id="t1"))
    agents.ask(*history, said=reply("working"))
    asked = (*history, reply("working"), user("summarize"))
    agents.ask(*asked, said=reply(SUMMARY), tools=False, hints={"purpose": "compaction"})
    assert agents.calls[-1].origin == agents.calls[1].id
    assert agents.ask(system(), user("Fix the bug."), user(f"So far: {SUMMARY}")) == "compaction"
    assert agents.settled() == ["continuation", "continuation", "compaction", "compaction"]


@pytest.mark.parametrize("instructions", [1, 2])
def test_a_title_asked_for_first_in_two_messages(instructions: int) -> None:
    """opencode: its main line is no sub-agent's for that."""
    agents = Agents()
    title = [*[system("Write a title.")] * instructions, user("A title for this:"), user('"Fix the bug."')]
    agents.ask(*title, tools=False, said=reply("Bug fix"))
    assert agents.ask(*BEGUN) == "continuation"
    assert agents.settled() == ["side", "continuation"]


def test_a_compaction_by_a_call_of_two_messages_with_a_kept_tail() -> None:
    agents = Agents()
    agents.ask(*BEGUN, said=reply("", "t1"))
    assert (
        agents.ask(system("You summarize."), user("<transcript>"), said=reply(SUMMARY), tools=False) == "side"
    )
    out = Message(role="tool", content="x", tool_call_id="t1")
    assert agents.ask(system(), user(f"Summary: {SUMMARY}"), reply("", "t1"), out) == "compaction"
    assert agents.calls[-1].broke is None
    assert agents.settled() == ["continuation", "compaction", "compaction"]


def test_a_compaction_that_keeps_the_beginning() -> None:
    """OpenHands: the first events stay, and with them the first call; who asked for the summary is known
    once it is used."""
    agents = Agents()
    agents.ask(*BEGUN, said=reply("", "t1"))
    kept = (*BEGUN, reply("", "t1"), Message(role="tool", content="x", tool_call_id="t1"))
    agents.ask(*kept, said=reply("", "t2"))
    agents.ask(system("You summarize."), user("<events>"), said=reply(SUMMARY), tools=False)
    out = Message(role="tool", content="y", tool_call_id="t2")
    assert agents.ask(*kept, user(SUMMARY), reply("", "t2"), out) == "compaction"
    assert agents.calls[-1].origin == "c2"
    assert agents.ask(*kept, user("Another way.")) == "fork"
    assert agents.settled() == ["continuation", "continuation", "compaction", "compaction", "fork"]


def test_a_summary_as_the_models_own_message() -> None:
    agents = Agents()
    agents.ask(*BEGUN)
    agents.ask(system("You summarize."), user("<transcript>"), said=reply(SUMMARY), tools=False)
    new = (system(), user("What did we do so far?"), reply(SUMMARY), user("Continue."))
    assert agents.ask(*new) == "compaction"


def test_edits_and_breaks_have_their_kin() -> None:
    agents = Agents()
    agents.ask(*BEGUN, said=reply("", "t1"))
    edited = agents.ask(*BEGUN, reply("edited", "t1"), user("go on"))
    assert (edited, agents.calls[-1].origin) == ("fork", "c0")
    other = agents.ask(*BEGUN, reply("", "t1"), user("go on"), tools=False)
    assert (other, agents.calls[-1].origin) == ("continuation", "c0")
    moved = agents.ask(system("New day."), BEGUN[1], reply("", "t1"), user("x"))
    assert moved == "continuation"
    assert agents.calls[-1].broke is not None
    assert agents.calls[-1].broke.cause == "system_changed"


def test_every_kind_of_label_comes_up_in_random_sessions() -> None:
    labels: set[str] = set()
    for seed in range(10):
        session = Session(random.Random(seed))
        session.run(calls=40)
        labels |= {name for name in session.happened if name.startswith("label ")}
    assert labels == {
        f"label {name}" for name in ("continuation", "fork", "retry", "side", "subagent", "compaction")
    }
