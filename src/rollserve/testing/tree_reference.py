"""Where a request belongs in a trajectory tree, told the simple way: every recorded call's whole path is
laid against the request, message by message. Quadratic, and without a line of ``gateway.tree``.

Texts are compared without any blanks, where the tree takes only those at the joints of messages to be
nothing: it is for sessions whose words have none inside.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rollserve.records.call import Message

Tools = tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Recorded:
    """``step`` are the messages that its request had behind its parent's reply, as they were sent, ``new``
    as they were recorded."""

    call_id: str
    parent: str | None
    step: tuple[Message, ...]
    new: tuple[Message, ...]
    reply: Message
    tools: Tools
    order: int


@dataclass(frozen=True)
class Fit:
    """A path that the request begins with; it ends before the request's message ``end``."""

    call: Recorded
    end: int
    sure: int
    differences: int


@dataclass
class ReferenceTree:
    calls: dict[str, Recorded] = field(default_factory=dict)

    def add(
        self,
        call_id: str,
        parent: str | None,
        step: Sequence[Message],
        new: Sequence[Message],
        reply: Message,
        tools: Tools,
    ) -> None:
        order = len(self.calls)
        self.calls[call_id] = Recorded(call_id, parent, tuple(step), tuple(new), reply, tools, order)

    def parent(self, messages: Sequence[Message], tools: Tools, *, faithful: bool = False) -> str | None:
        """The call that the request extends; None for a new root."""
        fits = [
            fit
            for call in self.calls.values()
            if call.tools == tools
            for fit in self._fits(call, list(messages))
            if all(message.role != "assistant" for message in messages[fit.end :])
            and not (faithful and fit.differences)
        ]
        best = max(fits, key=lambda fit: (fit.sure, -fit.differences, fit.call.order), default=None)
        return best.call.call_id if best else None

    def named(self, messages: Sequence[Message]) -> bool:
        """Whether any model turn of the request names a recorded call."""
        ids = {call.id for each in self.calls.values() for call in each.reply.tool_calls}
        return any(
            message.call_id in self.calls or any(call.id in ids for call in message.tool_calls)
            for message in messages
            if message.role == "assistant"
        )

    def _path(self, call: Recorded) -> list[Recorded]:
        path = [call]
        while path[0].parent is not None:
            path.insert(0, self.calls[path[0].parent])
        return path

    def _fits(self, call: Recorded, messages: list[Message]) -> list[Fit]:
        places = [(0, 0, 0)]
        for each in self._path(call):
            places = [after for place in places for after in self._after(each, messages, place)]
        return [Fit(call, *place) for place in places]

    def _after(
        self, call: Recorded, messages: list[Message], place: tuple[int, int, int]
    ) -> Iterator[tuple[int, int, int]]:
        """Where the call's reply may end, when its step begins at the place."""
        start, sure, differences = place
        for at in range(start, len(messages)):
            step = messages[start:at]
            recorded = tuple(step) == call.new
            if messages[at].role != "assistant" or not (recorded or _same_step(call.step, step)):
                continue
            respelled = differences + (not recorded and _unmarked(step) != _unmarked(call.step))
            for back, end in _turns(messages, at):
                if _same_turn(call, back, messages[at]):
                    same = end == at + 1 and _same_bytes(call, back)
                    yield end, sure + self._sure(call, messages[at]), respelled + (not same)
                    break

    def _sure(self, call: Recorded, back: Message) -> int:
        ids = [each.id for each in back.tool_calls]
        if back.call_id == call.call_id:
            return 1
        if back.call_id is not None and back.call_id in self.calls:
            return -1
        return int(bool(ids) and ids == [each.id for each in call.reply.tool_calls])


def _turns(messages: list[Message], at: int) -> Iterator[tuple[Message, int]]:
    """The model turn at ``at``, alone or with the model messages behind it."""
    yield messages[at], at + 1
    end = at
    while end < len(messages) and messages[end].role == "assistant":
        end += 1
    if end > at + 1:
        run = messages[at:end]
        yield (
            Message(
                role="assistant",
                content="".join(each.content for each in run),
                reasoning="".join(each.reasoning or "" for each in run) or None,
                tool_calls=tuple(call for each in run for call in each.tool_calls),
            ),
            end,
        )


def _unmarked(messages: Sequence[Message]) -> list[Message]:
    return [msgspec.structs.replace(message, call_id=None) for message in messages]


def _squeezed(text: str | None) -> str:
    return "".join((text or "").split())


def _shown(message: Message) -> str:
    """Its text with its images in it, each told by what it is and how it is to be looked at."""
    told, at = "", 0
    for image in message.images:
        told += f"{_squeezed(message.content[at : image.at])}\0{image.url or image.digest}\0{image.detail}\0"
        at = max(at, image.at)
    return told + _squeezed(message.content[at:])


def _said(message: Message) -> tuple[Any, ...]:
    calls = [(call.name, _value(call.arguments)) for call in message.tool_calls]
    return ("assistant", _squeezed(message.content), calls)


def _value(arguments: str, defaults: dict[str, Any] | None = None) -> Any:
    try:
        return json.dumps({**(defaults or {}), **json.loads(arguments)}, sort_keys=True)
    except (ValueError, TypeError):
        return arguments


def _defaults(tools: Tools, name: str) -> dict[str, Any]:
    """Of the arguments of a tool, as it declares them."""
    for tool in tools:
        if tool["function"]["name"] == name:
            properties = tool["function"].get("parameters", {}).get("properties", {})
            return {each: schema["default"] for each, schema in properties.items() if "default" in schema}
    return {}


def _atoms(messages: Sequence[Message]) -> list[Any]:
    """What messages say and show; those of one role (and call) in a row are one."""
    atoms: list[Any] = []
    for message in messages:
        if message.role == "assistant":
            atoms.append(_said(message))
            continue
        kind = (message.role, message.tool_call_id, message.name)
        if atoms and atoms[-1][0] == kind:
            atoms[-1] = (kind, atoms[-1][1] + _shown(message))
        else:
            atoms.append((kind, _shown(message)))
    return atoms


def _same_step(ours: Sequence[Message], back: Sequence[Message]) -> bool:
    """Model turns in it, which are others', may lose their reasoning too, and gain none."""
    if _atoms(ours) != _atoms(back):
        return False
    thoughts = [[m.reasoning for m in each if m.role == "assistant"] for each in (ours, back)]
    return all(not shown or shown == thought for thought, shown in zip(*thoughts, strict=True))


def _same_turn(call: Recorded, back: Message, first: Message) -> bool:
    ours = call.reply
    if _squeezed(ours.content) != _squeezed(back.content) or len(ours.tool_calls) != len(back.tool_calls):
        return False
    if back.reasoning and _squeezed(back.reasoning) != _squeezed(ours.reasoning):
        return False
    known = first.call_id == call.call_id
    return all(
        (one.name, _value(one.arguments, _defaults(call.tools, one.name)))
        == (other.name, _value(other.arguments, _defaults(call.tools, other.name)))
        or (one.error is not None and (known or one.id == other.id))
        for one, other in zip(ours.tool_calls, back.tool_calls, strict=True)
    )


def _same_bytes(call: Recorded, back: Message) -> bool:
    hidden = back.call_id == call.call_id and not back.reasoning
    return (
        call.reply.content == back.content
        and (hidden or (call.reply.reasoning or "") == (back.reasoning or ""))
        and [(c.id, c.name, c.arguments) for c in call.reply.tool_calls]
        == [(c.id, c.name, c.arguments) for c in back.tool_calls]
    )
