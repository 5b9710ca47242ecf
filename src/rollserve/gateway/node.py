"""What a trajectory tree is made of. References lead up only, from a call to its parent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from rollserve.gateway.turns import Messages, Tools
from rollserve.records.call import Break, Label, Message


class Form(NamedTuple):
    """How messages of one meaning were sent, and what differs from the first time."""

    messages: Messages
    causes: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class Node:
    """A recorded call, as much of it as later calls need. ``depth`` is the number of messages on its path,
    its reply included, ``offset`` that of the tokens before its sampled ones. ``forms`` are its messages as
    they were sent, ``returned`` its reply as it came back (one message, or several in a row). ``ending`` is
    the text that ended the reply and is not in it, though it was sampled: some agents put it back."""

    call_id: str
    parent: Node | None
    messages: Messages
    reply: Message
    tools: Tools
    prompt_ids: bytes
    sampled_ids: bytes
    label: Label = "continuation"
    ending: str | None = None
    depth: int = 0
    offset: int = 0
    order: int = 0
    forms: list[Form] = field(default_factory=list)
    returned: list[Form] = field(default_factory=list)

    def sent(self, messages: Messages) -> Form | None:
        """The form in which these messages were the call's."""
        return next((form for form in self.forms if form.messages == messages), None)

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


class Difference(NamedTuple):
    """The request's messages from ``at`` on mean what ``node`` holds, and are not the same bytes.
    ``of_reply`` says whether it is the node's reply or its messages."""

    node: Node
    at: int
    form: Form
    of_reply: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """``parent`` None: a new root. ``new`` are the messages the call adds; for a root all of them, with
    recognised replies as the model gave them. ``form`` is what was sent of them. ``broke`` says that the
    request goes on from a call that it can't extend. ``differences`` lie on the way to the parent (or to the
    call that it can't extend); ``edited`` says that a model turn came back with another meaning."""

    parent: Node | None
    new: Messages
    given: Messages
    form: Messages
    broke: Break | None = None
    differences: tuple[Difference, ...] = ()
    edited: bool = False
