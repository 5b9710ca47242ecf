"""What an engine that renders says it has read in an answer: text, reasoning, tool calls, in parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rollserve.backend.base import Delta
from rollserve.records.call import Message, ToolCall


@dataclass(frozen=True, slots=True)
class CallPart:
    """Of the tool call ``index``: its id and name come once, its arguments in pieces."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Said:
    """Of one body, or of one event of a stream."""

    deltas: tuple[Delta, ...] = ()
    calls: tuple[CallPart, ...] = ()


@dataclass(slots=True)
class _Call:
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


class Saying:
    """Adds up; ``fresh`` gives each piece of text once."""

    def __init__(self) -> None:
        self._text: dict[Literal["content", "reasoning"], list[str]] = {"content": [], "reasoning": []}
        self._calls: dict[int, _Call] = {}
        self._fresh: list[Delta] = []

    def add(self, said: Said) -> None:
        for delta in said.deltas:
            self._text[delta.kind].append(delta.text)
            self._fresh.append(delta)
        for part in said.calls:
            call = self._calls.setdefault(part.index, _Call())
            call.id = call.id or part.id
            call.name = call.name or part.name
            call.arguments.append(part.arguments)

    def fresh(self) -> Sequence[Delta]:
        fresh, self._fresh = self._fresh, []
        return fresh

    def message(self) -> Message:
        return Message(
            role="assistant",
            content="".join(self._text["content"]),
            reasoning="".join(self._text["reasoning"]) or None,
            tool_calls=tuple(
                ToolCall(id=call.id, name=call.name, arguments="".join(call.arguments))
                for _, call in sorted(self._calls.items())
            ),
        )
