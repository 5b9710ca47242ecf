"""A chat completions request, in our words. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from rollserve.dialect.base import Asked
from rollserve.dialect.images import Content, Pictures
from rollserve.dialect.openai import at_least_one, hints, kept, offers_tools, schema_of
from rollserve.dialect.reading import convert, decode, storable
from rollserve.errors import InvalidInput
from rollserve.records.call import ChatRequest, Message, ToolCall
from rollserve.records.image import Image

_READ = frozenset(
    {"messages", "model", "tools", "stream", "stream_options", "logprobs", "n", "stop", "response_format"}
)
_ROLES: Mapping[str, Literal["system", "user", "assistant", "tool"]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_SEEING = frozenset({"user", "tool"})
"""Roles whose messages may hold images."""
_UNSUPPORTED = ("audio", "functions", "function_call", "return_token_ids", "prompt_logprobs", "top_logprobs")
"""Refused unless they are null, false or 0. A client that asks for token ids (vLLM's extension) asks again
without when the refusal names the parameter."""
_MOST_CHOICES = 128
_MOST_STOPS = 64


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _ToolCall(msgspec.Struct):
    function: _Function | None = None
    id: str | None = None
    type: str | None = None


class _ImageUrl(msgspec.Struct):
    url: str | None = None
    detail: str | None = None


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | _ImageUrl | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    function_call: dict[str, Any] | None = None
    audio: dict[str, Any] | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct):
    messages: list[_Message]
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None


class ChatForm(msgspec.Struct, frozen=True):
    """What the writers must know of a request."""

    include_usage: bool = False


def read(body: bytes, headers: Mapping[str, str]) -> Asked:
    """Raises ``InvalidInput`` that names the parameter at fault."""
    raw = decode(body)
    parsed = convert(raw, _Body)
    _refuse_unsupported(raw, parsed)
    if not parsed.messages:
        raise InvalidInput("at least one message is needed", field="messages")
    tools, pictures = _tools(parsed.tools), Pictures()
    request = ChatRequest(
        messages=tuple(
            _message(message, f"messages.{at}", pictures) for at, message in enumerate(parsed.messages)
        ),
        tools=tools if offers_tools(parsed.tool_choice) else (),
        asked=kept(raw, _READ),
        stop=_stop(parsed.stop),
        schema=_schema(parsed.response_format),
        hints=hints(headers, raw),
        pictures=pictures.found,
    )
    return Asked(
        request=request,
        model=parsed.model or "",
        stream=bool(parsed.stream),
        n=_choices(parsed.n),
        logprobs=bool(parsed.logprobs),
        form=ChatForm(bool(parsed.stream_options and parsed.stream_options.include_usage)),
    )


def _refuse_unsupported(raw: Mapping[str, Any], parsed: _Body) -> None:
    for name in _UNSUPPORTED:
        if raw.get(name) or raw.get(name) in ([], {}, ""):
            raise InvalidInput(f"{name!r} is not supported", field=name)
    if parsed.modalities not in (None, ["text"]):
        raise InvalidInput("only text is supported", field="modalities")
    at_least_one(parsed.max_tokens, "max_tokens")
    at_least_one(parsed.max_completion_tokens, "max_completion_tokens")


def _choices(n: int | None) -> int:
    if n is not None and not 1 <= n <= _MOST_CHOICES:
        raise InvalidInput(f"must be from 1 to {_MOST_CHOICES}", field="n")
    return n or 1


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(texts) > _MOST_STOPS:
        raise InvalidInput(f"more than {_MOST_STOPS} texts", field="stop")
    if not all(texts):
        raise InvalidInput("an empty text can't end an answer", field="stop")
    return texts


def _schema(given: dict[str, Any] | None) -> dict[str, Any] | None:
    if given is None:
        return None
    inner = given.get("json_schema")
    if given.get("type") == "json_schema" and not isinstance(inner, dict):
        raise InvalidInput("must be an object", field="response_format.json_schema")
    return schema_of(given, inner if isinstance(inner, dict) else {}, "response_format")


def _message(message: _Message, at: str, pictures: Pictures) -> Message:
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidInput(f"unknown role {message.role!r}", field=f"{at}.role")
    if message.tool_calls and role != "assistant":
        raise InvalidInput("only an assistant message has tool calls", field=f"{at}.tool_calls")
    for name in ("function_call", "audio"):
        if getattr(message, name) is not None:
            raise InvalidInput(f"{name!r} is not supported", field=f"{at}.{name}")
    text, images = _content(message.content, at, pictures if role in _SEEING else None)
    return Message(
        role=role,
        content=text or message.refusal or "",
        reasoning=message.reasoning_content or message.reasoning or None,
        tool_calls=tuple(
            _tool_call(call, f"{at}.tool_calls.{index}")
            for index, call in enumerate(message.tool_calls or ())
        ),
        tool_call_id=message.tool_call_id,
        name=message.name,
        images=images,
    )


def _content(
    content: str | list[_Part] | None, at: str, pictures: Pictures | None
) -> tuple[str, tuple[Image, ...]]:
    """``pictures`` None: no image can stand here."""
    if content is None or isinstance(content, str):
        return content or "", ()
    made = Content()
    for index, part in enumerate(content):
        where = f"{at}.content.{index}"
        if part.type == "image_url" and pictures is not None:
            made.add(_image(part, where, pictures))
        else:
            made.add(_text(part, f"{where}.type"))
    return made.take()


def _image(part: _Part, at: str, pictures: Pictures) -> Image:
    given = part.image_url
    url, detail = (given.url, given.detail) if isinstance(given, _ImageUrl) else (given, None)
    return pictures.of_address(url, at, f"{at}.image_url", detail=detail)


def _text(part: _Part, at: str) -> str:
    text = {"text": part.text, "refusal": part.refusal}.get(part.type)
    if text is None:
        raise InvalidInput(f"content of type {part.type!r} is not supported here", field=at)
    return text


def _tool_call(call: _ToolCall, at: str) -> ToolCall:
    if call.type not in (None, "function"):
        raise InvalidInput(f"a call of type {call.type!r} is not supported", field=f"{at}.type")
    if call.function is None:
        raise InvalidInput("a call needs a function", field=f"{at}.function")
    arguments = call.function.arguments
    if not isinstance(arguments, str):
        storable(arguments, f"{at}.function.arguments")
        arguments = msgspec.json.encode(arguments or {}).decode()
    return ToolCall(id=call.id or "", name=call.function.name, arguments=arguments)


def _tools(tools: list[dict[str, Any]] | None) -> tuple[dict[str, Any], ...]:
    for index, tool in enumerate(tools or ()):
        at = f"tools.{index}"
        kind = tool.get("type", "function")
        if kind != "function":
            raise InvalidInput(f"tools of type {kind!r} are not supported", field=f"{at}.type")
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidInput("a tool needs a name", field=f"{at}.function.name")
        storable(tool, at)
    return tuple(tools or ())
