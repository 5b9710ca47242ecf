"""How agents remember a conversation, and how they tell it again: by habits that change how it is spelled and
not what it says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from rollserve.records.call import ChatRequest, Message

SHELL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "shell", "parameters": {"properties": {"all": {"default": False}}}},
}
SPELLINGS = ('{"a": 1, "b": [2]}', '{"b":[2],"a":1}', '{ "a":1, "b":[ 2 ] }')


@dataclass(frozen=True)
class Habit:
    """How an agent sends back what there was. ``ids`` of calls and marks: kept, dropped, or marks sent."""

    drops_reasoning: bool = False
    respells: bool = False
    fills_defaults: bool = False
    trims: bool = False
    merges: bool = False
    splits: bool = False
    ids: str = "kept"


@dataclass(frozen=True)
class Said:
    """A reply in an agent's memory."""

    message: Message
    call_id: str


@dataclass
class Line:
    """One conversation of an agent: what it remembers, and how it tells it."""

    memory: list[Message | Said]
    habit: Habit
    tools: tuple[dict[str, Any], ...] = (SHELL,)
    hints: dict[str, str] = field(default_factory=dict)

    def request(self) -> ChatRequest:
        messages: list[Message] = []
        for each in self.memory:
            for message in _sent(each, self.habit):
                merged = self.habit.merges and messages and message.role == messages[-1].role == "user"
                if merged:
                    messages[-1] = _joined(messages[-1], message)
                else:
                    messages.append(message)
        return ChatRequest(messages=tuple(messages), tools=self.tools, hints=self.hints)


def _joined(first: Message, second: Message) -> Message:
    begun = f"{first.content}\n\n"
    moved = [msgspec.structs.replace(image, at=image.at + len(begun)) for image in second.images]
    content, images = begun + second.content, (*first.images, *moved)
    return msgspec.structs.replace(first, content=content, images=images)


def _sent(each: Message | Said, habit: Habit) -> list[Message]:
    """As the agent sends it: new objects, as after a way over the wire."""
    if isinstance(each, Message):
        if each.role == "tool" and habit.ids == "dropped":
            return [msgspec.structs.replace(each, tool_call_id="#0")]
        return [msgspec.structs.replace(each)]
    message = each.message
    changes: dict[str, Any] = {}
    if habit.drops_reasoning:
        changes["reasoning"] = None
    if habit.trims:
        changes["content"] = message.content.strip()
    if habit.ids == "marks":
        changes["call_id"] = each.call_id
    calls = message.tool_calls
    if habit.respells:
        calls = tuple(msgspec.structs.replace(call, arguments=_respelled(call.arguments)) for call in calls)
    if habit.fills_defaults:
        calls = tuple(msgspec.structs.replace(call, arguments=_filled(call.arguments)) for call in calls)
    if habit.ids == "dropped":
        calls = tuple(msgspec.structs.replace(call, id="") for call in calls)
    calls = tuple(msgspec.structs.replace(call, error=None) for call in calls)
    whole = msgspec.structs.replace(message, tool_calls=calls, **changes)
    if not habit.splits or not (whole.content.strip() and calls):
        return [whole]
    return [
        msgspec.structs.replace(whole, tool_calls=()),
        Message(role="assistant", tool_calls=calls, call_id=whole.call_id),
    ]


def _respelled(arguments: str) -> str:
    return SPELLINGS[1] if arguments in SPELLINGS else arguments


def _filled(arguments: str) -> str:
    """With the default that the tool declares."""
    return f'{arguments[:-1]}, "all": false}}' if arguments in SPELLINGS else arguments
