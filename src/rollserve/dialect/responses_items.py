"""The items of a request's ``input`` as messages. Pure.

A model turn is several items in a row (reasoning, a message, calls): they become one message. Items that
lead back to the same call are one turn; others by their order, in which reasoning comes first and calls
last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from rollserve.dialect.images import Content, Pictures
from rollserve.dialect.marks import marked
from rollserve.dialect.reading import convert, storable
from rollserve.dialect.responses_ids import call_of_item, holds_raw_input
from rollserve.dialect.responses_tools import custom_arguments, flat_name
from rollserve.errors import InvalidInput
from rollserve.records.call import Message, ToolCall
from rollserve.records.image import Image

_TEXTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
_REASONING, _MESSAGE, _CALL = 0, 1, 2
_RANKS = {"reasoning": _REASONING, "function_call": _CALL, "custom_tool_call": _CALL}
_RESULTS = ("function_call_output", "custom_tool_call_output")
_TAKEN = ("message", "additional_tools", *_RESULTS, *_RANKS)
_ROLES: dict[str | None, Literal["system", "user"]] = {
    "user": "user",
    "system": "system",
    "developer": "system",
}


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    file_id: str | None = None
    detail: str | None = None


class _Item(msgspec.Struct):
    role: str | None = None
    id: str | None = None
    content: str | list[_Part] | None = None
    summary: list[_Part] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    output: str | list[_Part] | None = None
    tools: list[dict[str, Any]] | None = None


class _Turn:
    """What the model said in one go, as far as it has been read."""

    def __init__(self) -> None:
        self.call_id: str | None = None
        self.rank = _REASONING
        self.answered = False
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[ToolCall] = []

    def takes(self, rank: int, call_id: str | None) -> bool:
        if call_id is not None and self.call_id is not None:
            return call_id == self.call_id
        again = rank > self.rank if rank == _MESSAGE else rank >= self.rank
        return again and not self.answered

    def add(self, rank: int, item: _Item, kind: str, at: str) -> None:
        self.rank = max(self.rank, rank)
        self.call_id = marked(item.encrypted_content) or self.call_id or call_of_item(item.id)
        if rank == _REASONING:
            self._reasoning.append(_thought(item, at))
        elif rank == _MESSAGE:
            self._content.append(_text(item.content, f"{at}.content"))
        else:
            self._calls.append(_call(item, kind, at))

    def message(self) -> Message | None:
        """None for a thought of another's, of which nothing can be read."""
        reasoning = "".join(self._reasoning) or None
        if not (reasoning or self._content or self._calls or self.call_id):
            return None
        return Message(
            role="assistant",
            content="".join(self._content),
            reasoning=reasoning,
            tool_calls=tuple(self._calls),
            call_id=self.call_id,
        )


class Items:
    """Takes items in order. ``tools`` are those offered by items, each list with its path, ``pictures`` the
    images they brought."""

    def __init__(self) -> None:
        self.pictures = Pictures()
        self.tools: list[tuple[str, list[dict[str, Any]]]] = []
        self._said: list[Message | _Turn] = []
        self._turn: _Turn | None = None

    def take(self, raw: dict[str, Any], at: str) -> None:
        kind = raw.get("type") or ("message" if "role" in raw else None)
        if kind in _TAKEN:
            self._take(convert(raw, _Item, at=at), str(kind), at)
        else:
            hint = "send the item itself, with 'store' false" if kind == "item_reference" else None
            raise InvalidInput(f"items of type {kind!r} are not supported", field=f"{at}.type", hint=hint)

    def _take(self, item: _Item, kind: str, at: str) -> None:
        if kind == "additional_tools":
            self.tools.append((f"{at}.tools", item.tools or []))
        elif kind in _RESULTS:
            self._answer(item, at)
        elif kind != "message" or item.role == "assistant":
            self._say(_RANKS.get(kind, _MESSAGE), item, kind, at)
        elif (role := _ROLES.get(item.role)) is None:
            raise InvalidInput(f"unknown role {item.role!r}", field=f"{at}.role")
        else:
            self._turn = None
            pictures = self.pictures if role == "user" else None
            text, images = _content(item.content, f"{at}.content", pictures)
            self._said.append(Message(role=role, content=text, images=images))

    def _answer(self, item: _Item, at: str) -> None:
        """A result. A call of the same turn may still follow, where the client pairs each with its own."""
        if self._turn is not None:
            self._turn.answered = True
        output, images = _content(item.output, f"{at}.output", self.pictures)
        call_id = _call_id(item, at)
        self._said.append(Message(role="tool", content=output, tool_call_id=call_id, images=images))

    def _say(self, rank: int, item: _Item, kind: str, at: str) -> None:
        call_id = marked(item.encrypted_content) or call_of_item(item.id)
        if self._turn is None or not self._turn.takes(rank, call_id):
            self._turn = _Turn()
            self._said.append(self._turn)
        self._turn.add(rank, item, kind, at)

    def messages(self) -> list[Message]:
        read = (said.message() if isinstance(said, _Turn) else said for said in self._said)
        return [message for message in read if message is not None]


def _text(content: str | Sequence[_Part] | None, at: str) -> str:
    return _content(content, at, None)[0]


def _content(
    content: str | Sequence[_Part] | None, at: str, pictures: Pictures | None
) -> tuple[str, tuple[Image, ...]]:
    """``pictures`` None: no image can stand here."""
    if content is None or isinstance(content, str):
        return content or "", ()
    made = Content()
    for index, part in enumerate(content):
        where = f"{at}.{index}"
        if part.type == "input_image" and pictures is not None:
            made.add(_image(part, where, pictures))
        else:
            made.add(_part(part, where))
    return made.take()


def _image(part: _Part, at: str, pictures: Pictures) -> Image:
    if part.file_id:
        raise InvalidInput("there are no files here: send the image's data", field=f"{at}.file_id")
    return pictures.of_address(part.image_url, at, f"{at}.image_url", detail=part.detail)


def _part(part: _Part, at: str) -> str:
    text = part.refusal if part.type == "refusal" else part.text if part.type in _TEXTS else None
    if text is None:
        raise InvalidInput(f"content of type {part.type!r} is not supported here", field=f"{at}.type")
    return text


def _thought(item: _Item, at: str) -> str:
    """The thinking itself where the client has it, else its summary: where we are the provider, the
    summary is all of it."""
    if item.content:
        return _text(item.content, f"{at}.content")
    return "\n\n".join(_part(part, f"{at}.summary.{index}") for index, part in enumerate(item.summary or ()))


def _call_id(item: _Item, at: str) -> str:
    if item.call_id is None:
        raise InvalidInput("must say which call it is of", field=f"{at}.call_id")
    return item.call_id


def _call(item: _Item, kind: str, at: str) -> ToolCall:
    if not item.name:
        raise InvalidInput("a call needs a name", field=f"{at}.name")
    if kind == "custom_tool_call":
        text = item.input or ""
        arguments = text if holds_raw_input(item.id) else custom_arguments(text)
    elif isinstance(item.arguments, dict):
        storable(item.arguments, f"{at}.arguments")
        arguments = msgspec.json.encode(item.arguments).decode()
    else:
        arguments = item.arguments or ""
    name = flat_name(item.name, item.namespace)
    return ToolCall(id=_call_id(item, at), name=name, arguments=arguments)
