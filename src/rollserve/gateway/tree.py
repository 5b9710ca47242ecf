"""The trajectory tree of one session, and where a request belongs in it. Pure.

A node is a call: the messages its request added to its parent, and the model's reply. A request
extends the deepest node whose path (messages and replies, root to node) is a prefix of the request's
messages. A reply comes back from the agent and may have been touched on the way: it is recognised by
its tool-call ids first, then by its meaning (text but for outer blanks, arguments as JSON; reasoning
may be left out). Cost is linear in the request's messages: at each node the next step is a look-up by
the tuple of messages that came next.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollserve.records.call import Break, Message, ToolCall

Messages = tuple[Message, ...]
Tools = tuple[dict[str, Any], ...]


@dataclass(slots=True, eq=False)
class Node:
    """A recorded call, as much of it as later calls need. ``depth`` is the number of messages on its
    path, its reply included."""

    call_id: str
    parent: Node | None
    messages: Messages
    reply: Message
    tools: Tools
    prompt_ids: bytes
    sampled_ids: bytes
    depth: int = 0
    order: int = 0
    steps: dict[Messages, list[Node]] = field(default_factory=dict)
    lengths: dict[int, None] = field(default_factory=dict)

    def path(self) -> list[Node]:
        """Root to this node."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def conversation(self) -> list[Message]:
        """Messages root to this node, replies as the model gave them."""
        return [message for node in self.path() for message in (*node.messages, node.reply)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """``parent`` None: a new root. ``new`` are the messages the call adds; for a root all of them, with
    recognised replies as the model gave them. ``broke`` says that the request goes on from a call that
    it can't extend. ``given`` is the request's conversation, ``step`` what the place is found by."""

    parent: Node | None
    new: Messages
    given: Messages
    step: Messages
    broke: Break | None = None


class Tree:
    """Grows by ``add``; nothing is removed."""

    def __init__(self) -> None:
        self._top = Node("", None, (), Message(role="assistant"), (), b"", b"")
        self.newest: Node | None = None
        self.size = 0

    def match(self, messages: Sequence[Message], tools: Tools) -> Match:
        """Where a request belongs. The same request again, once answered, is a sibling."""
        given = tuple(messages)
        found = self._prefixes(given)
        last_turn = _last_turn(given)
        for node in found:
            if node.depth > last_turn and node.tools == tools:
                new = given[node.depth :]
                return Match(parent=node, new=new, given=given, step=new)
        if not found:
            return _root(given, given, self._edited(given, None, last_turn))
        best = found[0]
        if best.depth > last_turn:
            return reroot(given, best, "tools_changed")
        return _root(given, _recognised(given, best), self._edited(given, best, last_turn))

    def add(
        self,
        match: Match,
        *,
        call_id: str,
        reply: Message,
        tools: Tools,
        prompt_ids: bytes,
        sampled_ids: bytes,
    ) -> Node:
        """Record a call where ``match`` put it."""
        above = match.parent or self._top
        node = Node(
            call_id=call_id,
            parent=match.parent,
            messages=match.new,
            reply=reply,
            tools=tools,
            prompt_ids=prompt_ids,
            sampled_ids=sampled_ids,
            depth=above.depth + len(match.new) + 1,
            order=self.size,
        )
        above.steps.setdefault(match.step, []).append(node)
        above.lengths[len(match.step)] = None
        self.newest = node
        self.size += 1
        return node

    def _prefixes(self, given: Messages) -> list[Node]:
        """Nodes whose path is a prefix of the request; deepest first, newest first among equals."""
        found: list[Node] = []
        open_nodes = [self._top]
        while open_nodes:
            node = open_nodes.pop()
            for length in node.lengths:
                end = node.depth + length
                if end >= len(given) or given[end].role != "assistant":
                    continue
                for child in node.steps.get(_step(given[node.depth : end]), ()):
                    if same_turn(child.reply, given[end]):
                        found.append(child)
                        open_nodes.append(child)
        found.sort(key=lambda node: (node.depth, node.order), reverse=True)
        return found

    def _edited(self, given: Messages, best: Node | None, last_turn: int) -> Break | None:
        """The break of a request whose model turns are not (all) ours; None when nothing of it was
        seen before: a conversation of its own."""
        above = best or self._top
        if last_turn < above.depth or not self.size:
            return None
        rest = _step(given[above.depth :])
        shared, nearest = 0, best.call_id if best else None
        for step, children in above.steps.items():
            common = _common(step, rest)
            if common > shared:
                shared, nearest = common, children[-1].call_id
        if best is None and shared == 0:
            return None
        return Break(cause="history_edited", at_message=above.depth + shared, from_call=nearest)


def reroot(given: Messages, parent: Node, cause: str, detail: str = "") -> Match:
    """A new root for a request that goes on from ``parent`` and can't extend it."""
    broke = Break(cause=cause, at_message=parent.depth, from_call=parent.call_id, detail=detail)
    return _root(given, _recognised(given, parent), broke)


def _root(given: Messages, whole: Messages, broke: Break | None) -> Match:
    return Match(parent=None, new=whole, given=given, step=_step(given), broke=broke)


def _recognised(given: Messages, node: Node) -> Messages:
    """The request's conversation with the replies on ``node``'s path as the model gave them."""
    return (*node.conversation(), *given[node.depth :])


def _step(messages: Messages) -> Messages:
    """What messages are found by: model turns by their meaning, others as they are."""
    if all(message.role != "assistant" for message in messages):
        return messages
    return tuple(map(_key, messages))


def _last_turn(messages: Messages) -> int:
    """Index of the last assistant message; -1 when there is none."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index].role == "assistant":
            return index
    return -1


def _common(step: Messages, keys: Messages) -> int:
    count = 0
    for one, other in zip(step, keys, strict=False):
        if one != other:
            break
        count += 1
    return count


def _key(message: Message) -> Message:
    if message.role != "assistant":
        return message
    calls = tuple(ToolCall(id="", name=c.name, arguments=_meaning(c.arguments)) for c in message.tool_calls)
    return Message(role="assistant", content=message.content.strip(), tool_calls=calls)


def _meaning(arguments: str) -> str:
    """Arguments in one spelling; as they are when they are no JSON."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments.strip()


def same_turn(ours: Message, theirs: Message) -> bool:
    """Whether ``theirs`` is the reply ``ours``, come back from the agent."""
    if ours is theirs:
        return True
    if theirs.role != "assistant" or len(ours.tool_calls) != len(theirs.tool_calls):
        return False
    if ours.tool_calls and all(
        one.id == other.id for one, other in zip(ours.tool_calls, theirs.tool_calls, strict=True)
    ):
        return True
    if theirs.reasoning and theirs.reasoning.strip() != (ours.reasoning or "").strip():
        return False
    return ours.content.strip() == theirs.content.strip() and all(
        one.name == other.name and _same_arguments(one.arguments, other.arguments)
        for one, other in zip(ours.tool_calls, theirs.tool_calls, strict=True)
    )


def _same_arguments(one: str, other: str) -> bool:
    return one == other or _meaning(one) == _meaning(other)
