"""A Responses request, in our words. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rollserve.dialect.base import Asked
from rollserve.dialect.openai import at_least_one, hints, kept, offers_tools, schema_of
from rollserve.dialect.reading import convert, decode, storable
from rollserve.dialect.responses_ids import call_of_response
from rollserve.dialect.responses_items import Items
from rollserve.dialect.responses_tools import Offered, Origin, read_tools
from rollserve.errors import InvalidInput
from rollserve.records.call import ChatRequest, Message

_READ = frozenset(
    {
        "input",
        "instructions",
        "max_output_tokens",
        "model",
        "previous_response_id",
        "stream",
        "stream_options",
        "text",
        "tools",
    }
)
_UNSUPPORTED = ("background", "prompt", "conversation", "top_logprobs")
"""Refused unless they are null, false or 0."""
_LOGPROBS = "message.output_text.logprobs"


class _Body(msgspec.Struct):
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    stream: bool | None = None
    text: dict[str, Any] | None = None
    include: list[str] | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None


class ResponsesForm(msgspec.Struct, frozen=True):
    """What the writers must know of a request: what its tools are called there, and what a response
    repeats of it."""

    origins: dict[str, Origin] = {}
    repeated: dict[str, Any] = {}


def read(body: bytes, headers: Mapping[str, str]) -> Asked:
    """Raises ``InvalidInput`` that names the parameter at fault."""
    raw = decode(body)
    parsed = convert(raw, _Body)
    for name in _UNSUPPORTED:
        if raw.get(name) or raw.get(name) in ([], {}, ""):
            raise InvalidInput(f"{name!r} is not supported", field=name)
    items = _items(parsed)
    offered = read_tools([("tools", parsed.tools or []), *items.tools])
    request = ChatRequest(
        messages=_messages(parsed, items),
        tools=tuple(offered.tools) if offers_tools(parsed.tool_choice) else (),
        asked=_asked(raw, parsed, offered),
        schema=_schema(parsed.text),
        hints=hints(headers, raw),
        pictures=items.pictures.found,
    )
    return Asked(
        request=request,
        model=parsed.model or "",
        stream=bool(parsed.stream),
        logprobs=_LOGPROBS in (parsed.include or ()),
        continuable=parsed.store is not False,
        continues=call_of_response(parsed.previous_response_id) if parsed.previous_response_id else None,
        form=ResponsesForm(offered.origins, _repeated(parsed)),
    )


def _items(parsed: _Body) -> Items:
    items = Items()
    given = parsed.input
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    for index, item in enumerate(given or ()):
        items.take(item, f"input.{index}")
    return items


def _messages(parsed: _Body, items: Items) -> tuple[Message, ...]:
    """``instructions`` come before all; they are of this request alone, and stand in the place of those of
    an earlier response that it goes on from."""
    messages = items.messages()
    if parsed.instructions:
        messages.insert(0, Message(role="system", content=parsed.instructions))
    if not messages and not parsed.previous_response_id:
        raise InvalidInput("at least one item is needed", field="input")
    return tuple(messages)


def _asked(raw: Mapping[str, Any], parsed: _Body, offered: Offered) -> dict[str, Any]:
    asked = kept(raw, _READ)
    if text := {key: value for key, value in (parsed.text or {}).items() if key != "format"}:
        storable(text, "text")
        asked["text"] = text
    at_least_one(parsed.max_output_tokens, "max_output_tokens")
    if parsed.max_output_tokens is not None:
        asked["max_tokens"] = parsed.max_output_tokens
    if offered.dropped:
        asked["dropped_tools"] = offered.dropped
    return asked


def _schema(text: dict[str, Any] | None) -> dict[str, Any] | None:
    given = (text or {}).get("format")
    if given is None:
        return None
    if not isinstance(given, dict):
        raise InvalidInput("must be an object", field="text.format")
    return schema_of(given, given, "text.format")


def _repeated(parsed: _Body) -> dict[str, Any]:
    """Of the request's settings those that the form of a response demands, its tools left out: they are
    most of a request, and no client reads them there."""
    return {
        "instructions": None,
        "metadata": parsed.metadata or {},
        "parallel_tool_calls": parsed.parallel_tool_calls is not False,
        "previous_response_id": parsed.previous_response_id,
        "temperature": None,
        "tool_choice": parsed.tool_choice or "auto",
        "tools": [],
        "top_p": None,
    }
