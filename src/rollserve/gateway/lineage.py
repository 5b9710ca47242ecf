"""What a call is to the calls before it: its label, and the call it stems from. Pure.

``of_request`` decides when a request comes, by the first of these rules that holds; ``settled`` is what is
known once all calls of an attempt are there.

1. What the client says: ``purpose`` ``title`` makes a *side* call, ``compaction`` a *compaction*, whoever's;
   ``subagent`` makes a *subagent*'s, and so all that goes on from it, or comes again: whose branch it is
   goes before what happens in it.
2. A call with a parent: what goes on from a side call or a sub-agent's is of their kind. The same messages
   again after the earlier call was answered are a *retry*; other messages than those of a sibling, or the
   same at the same time (``n`` above 1, parallel requests), a *fork* (side calls, sub-agents and compactions
   are no siblings here), unless what is new holds the summary (by 3) that a side call or a compaction said:
   then it is the *compaction* that kept the beginning. All else is a *continuation*.
3. A new root. (A call without tools, of at most two messages under its instructions, from which nothing
   goes on is not yet the main line.) The same request again is a *retry* (or of its twin's kind, by 2). A
   history that holds the text of a summary is the *compaction* that follows it: the whole reply of a call
   that is known as a compaction, or the longest line (of 40 characters or more) of a reply without tool
   calls, found in a message of the user's, or of the model's where that reply is not at home. A history that
   goes on from a call (it has a break) is of that call's kind, or a *fork* where the history was edited, else
   a *continuation*. Under instructions (system messages) that the session's main line had before, it is a
   *fork*. Under others: without tools, while the main line has some, and in at most two messages under them a
   *side* call; with tools a *subagent*'s. All else is a *continuation*, the first root among it.

``settled``: a call whose reply a compaction stems from is a compaction itself; and a single call without
tools, of at most two messages under its instructions, that came before a main line with tools under other
instructions was a side call (some agents ask for a title first).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from rollserve.gateway.node import Match, Node
from rollserve.gateway.tree import Tree
from rollserve.gateway.turns import EDITED, Messages, Tools, instructions
from rollserve.records.call import Call, ChatRequest, Label, Message

_OWN: tuple[Label, ...] = ("side", "subagent")
"""Kinds of branches."""
_SIDE_MESSAGES = 2
_TELLING_CHARS = 40
_SUMMARY_CHARS = 8
_LOOKED_AT = 16
"""Newest calls among which a summary, or who asked for a sub-agent, is looked for."""


class Lineage(NamedTuple):
    """``origin`` is set where the call stems from another than its parent."""

    label: Label
    origin: str | None = None


def of_request(tree: Tree, match: Match, request: ChatRequest) -> Lineage:
    """When it comes; ``at_record`` has the last word."""
    if request.hints.get("purpose") == "title":
        return Lineage("side")
    compacts = request.hints.get("purpose") == "compaction"
    if request.hints.get("subagent") and not compacts:
        return Lineage("subagent", None if match.parent else _asked_by(tree, match.given))
    twins = tree.twins(match)
    if match.parent is not None:
        if compacts:
            return Lineage("compaction")
        if match.parent.label in _OWN:
            return Lineage(match.parent.label)
        return Lineage("retry") if twins else _of_child(tree, match)
    return _of_root(tree, match, request, twins, compacts)


def _of_child(tree: Tree, match: Match) -> Lineage:
    if not _forks(tree, match):
        return Lineage("continuation")
    summary = _summary(tree, match.new)
    if summary is not None and summary.label in ("side", "compaction"):
        return Lineage("compaction", summary.call_id)
    return Lineage("fork")


def at_record(tree: Tree, match: Match, lineage: Lineage) -> Lineage:
    """What others that were asked at the same time make of it."""
    if lineage.label != "continuation" or match.broke is not None:
        return lineage
    met = tree.twins(match) or (match.parent is not None and _forks(tree, match))
    return lineage._replace(label="fork") if met else lineage


def _forks(tree: Tree, match: Match) -> bool:
    """Whether the line goes on in another way already; what is done aside does not count."""
    return any(node.label not in (*_OWN, "compaction") for node in tree.siblings(match))


def without_break(tree: Tree, match: Match, lineage: Lineage) -> Match:
    """A compaction, or a sub-agent that is given the main line's history, is a branch and no break."""
    if match.broke is None or match.broke.cause not in (EDITED, "system_changed"):
        return match
    kin = tree.get(match.broke.from_call or "")
    moved = lineage.label == "subagent" and kin is not None and kin.label != "subagent"
    return replace(match, broke=None) if moved or lineage.label == "compaction" else match


def _of_root(
    tree: Tree, match: Match, request: ChatRequest, twins: Sequence[Node], compacts: bool
) -> Lineage:
    broke = match.broke
    kin = tree.get(broke.from_call) if broke is not None and broke.from_call else None
    if compacts:
        return Lineage("compaction", kin.call_id if kin else None)
    if twins:
        own = twins[-1].label if twins[-1].label in _OWN else "retry"
        return Lineage(own, twins[-1].call_id)
    if summary := _summary(tree, match.given):
        return Lineage("compaction", summary.call_id)
    if kin is not None and broke is not None:
        if kin.label in _OWN:
            return Lineage(kin.label, kin.call_id)
        return Lineage("fork" if broke.cause == EDITED else "continuation", kin.call_id)
    return _of_stranger(tree, match.given, request)


def _of_stranger(tree: Tree, given: Messages, request: ChatRequest) -> Lineage:
    """A conversation of its own."""
    roots = (node for node in tree.nodes() if node.parent is None and node.label not in _OWN)
    main = [node for node in roots if not _may_be_side(node.messages, node.tools) or tree.goes_on(node)]
    if not main:
        return Lineage("continuation")
    system = _instructed(given)
    if any(_instructed(node.messages) == system for node in main):
        return Lineage("fork")
    if request.tools:
        return Lineage("subagent", _asked_by(tree, given))
    side = _may_be_side(given, request.tools) and any(node.tools for node in main)
    return Lineage("side" if side else "continuation")


def _may_be_side(messages: Messages, tools: Tools | None) -> bool:
    return not tools and len(messages) - len(instructions(messages)) <= _SIDE_MESSAGES


def _instructed(messages: Messages) -> tuple[str, ...]:
    return tuple(message.content for message in instructions(messages))


def _newest(tree: Tree) -> list[Node]:
    return list(tree.nodes())[: -_LOOKED_AT - 1 : -1]


def _asked_by(tree: Tree, given: Messages) -> str | None:
    """The call among whose tool calls' arguments the sub-agent's first message is, else the newest."""
    newest = _newest(tree)
    first = next((message.content.strip() for message in given if message.role == "user"), "")
    spelled = msgspec.json.encode(first).decode()[1:-1]
    for node in newest:
        if spelled and any(spelled in call.arguments for call in node.reply.tool_calls):
            return node.call_id
    return newest[0].call_id if newest else None


def _summary(tree: Tree, given: Messages) -> Node | None:
    for node in _newest(tree):
        probes = _probes(node)
        if probes and any(
            any(probe in message.content for probe in probes) and _is_quoted(message, at, given, node)
            for at, message in enumerate(given)
            if message.role in ("user", "assistant")
        ):
            return node
    return None


def _probes(said: Node | Call) -> list[str]:
    """What of a reply tells that a history holds it; agents take a summary out of its frame."""
    if said.reply.tool_calls:
        return []
    text = said.reply.content.strip()
    longest = max((line.strip() for line in text.splitlines()), key=len, default="")
    found = [text] if said.label == "compaction" and len(text) >= _SUMMARY_CHARS else []
    return [*found, longest] if len(longest) >= _TELLING_CHARS else found


def _is_quoted(message: Message, at: int, given: Messages, node: Node) -> bool:
    """Whether the text stands there as a summary, and not as the reply it was."""
    if message.role == "user":
        return True
    asked = node.forms[0].messages[-1:]
    return at > 0 and node.label != "continuation" and asked != given[at - 1 : at]


# -- once all is there


def settled(calls: Sequence[Call]) -> dict[str, Label]:
    """The label of each call by its id."""
    labels: dict[str, Label] = {call.id: call.label for call in calls}
    by_id = {call.id: call for call in calls}
    for call in calls:
        origin = by_id.get(call.origin or "") if call.label == "compaction" else None
        if origin is not None and labels[origin.id] != "subagent" and _holds(call, origin):
            labels[origin.id] = "compaction"
    for call_id in _early_side_calls(calls, labels):
        labels[call_id] = "side"
    return labels


def _holds(call: Call, origin: Call) -> bool:
    """Whether its messages hold what ``origin`` said: else it is a summary of that, and not its outcome."""
    probes = _probes(origin)
    return any(probe in message.content for message in call.messages for probe in probes)


def _early_side_calls(calls: Iterable[Call], labels: Mapping[str, Label]) -> list[str]:
    """Of the run's own policy: a route's calls say what they are."""
    goes_on = {call.parent for call in calls} | {call.origin for call in calls}
    roots = [call for call in calls if call.parent is None and not call.route]
    main = [call for call in roots if call.tools and labels[call.id] in ("continuation", "subagent")]
    found = []
    for at, call in enumerate(roots):
        plain = _may_be_side(call.messages, call.tools) and call.broke is None
        if plain and labels[call.id] == "continuation" and call.id not in goes_on:
            system = _instructed(call.messages)
            later = [root for root in roots[at + 1 :] if root in main]
            if any(_instructed(root.messages) != system for root in later):
                found.append(call.id)
    return found
