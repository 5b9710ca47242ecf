"""Requests of Anthropic Messages, in our words. Pure.

* Text blocks of one message are joined as they are. ``cache_control`` and the difference between a string
  and one text block mean nothing, so that a history whose cache marks move stays the same history.
* A user message becomes tool messages and user messages in the order of its blocks; an assistant message
  stays one message. ``is_error`` has no place in a chat template: a result's text has to say it.
* What was asked of tools and left out or deferred (``messages_tools``) is named in ``asked``.
* The block by which Claude Code says its version (``x-anthropic-billing-header``) is text as any other. It
  changes with the first user text; CLAUDE_CODE_ATTRIBUTION_HEADER=0 turns it off at the client.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rollserve.dialect.base import Asked
from rollserve.dialect.images import Content, Pictures
from rollserve.dialect.marks import marked
from rollserve.dialect.messages_tools import Choice, Tools, chosen, read_tools
from rollserve.dialect.openai import hints
from rollserve.dialect.reading import convert, decode, storable
from rollserve.dialect.tool_input import as_arguments
from rollserve.errors import InvalidInput
from rollserve.records.base import MAX_DEPTH, deeper_than
from rollserve.records.call import ChatRequest, Message, ToolCall
from rollserve.records.image import Image

_READ = frozenset(
    {"messages", "system", "model", "tools", "stream", "stop_sequences", "output_config", "output_format"}
)
_COMPACTION = "CRITICAL: Respond with TEXT ONLY"
"""How Claude Code's request for a summary begins."""


class _Block(msgspec.Struct):
    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: Any = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: Any = None
    tool_name: str | None = None
    source: Any = None


class _Source(msgspec.Struct):
    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class _Result(msgspec.Struct):
    content: str | list[_Block] | None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Block]


class _Format(msgspec.Struct):
    type: str
    schema: dict[str, Any] | None = None


class _OutputConfig(msgspec.Struct):
    format: _Format | None = None


class _Body(msgspec.Struct):
    messages: list[_Message]
    model: str = ""
    max_tokens: int | None = None
    system: str | list[_Block] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Choice | None = None
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    output_config: _OutputConfig | None = None
    output_format: _Format | None = None
    mcp_servers: list[Any] | None = None
    container: Any = None


class _Met:
    """What messages hold beside text: images, and the ``tools`` that a ``tool_reference`` names."""

    def __init__(self) -> None:
        self.pictures = Pictures()
        self.tools: set[str] = set()


def read(body: bytes, headers: Mapping[str, str], *, counting: bool) -> Asked:
    """A request to answer, or to count (``counting``). Raises ``InvalidInput``."""
    raw = decode(body)
    parsed = convert(raw, _Body)
    _check(parsed, counting)
    met = _Met()
    messages = _system(parsed.system)
    for index, message in enumerate(parsed.messages):
        messages.extend(_messages(message, f"messages.{index}", met))
    tools = read_tools(parsed.tools or (), met.tools)
    request = ChatRequest(
        messages=tuple(messages),
        tools=chosen(parsed.tool_choice, tools.offered),
        asked=_asked(raw, tools),
        stop=tuple(parsed.stop_sequences or ()),
        schema=_schema(parsed),
        hints=_hints(raw, parsed.messages, headers),
        pictures=met.pictures.found,
    )
    return Asked(request=request, model=parsed.model, stream=bool(parsed.stream) and not counting)


def _check(body: _Body, counting: bool) -> None:
    if not body.messages:
        raise InvalidInput("at least one message is needed", field="messages")
    for name, value in (("mcp_servers", body.mcp_servers), ("container", body.container)):
        if value:
            raise InvalidInput(f"{name!r} is not supported", field=name)
    if "" in (body.stop_sequences or ()):
        raise InvalidInput("a stop sequence must not be empty", field="stop_sequences")
    if counting:
        return
    if body.max_tokens is None:
        raise InvalidInput("field required", field="max_tokens")
    if body.max_tokens < 1:
        raise InvalidInput("must be at least 1", field="max_tokens")
    if body.messages[-1].role == "assistant":
        raise InvalidInput(
            "the beginning of the answer can't be given: the last message must not be the assistant's",
            field=f"messages.{len(body.messages) - 1}.role",
        )


def _system(system: str | list[_Block] | None) -> list[Message]:
    if not system:
        return []
    return [Message(role="system", content=_text(system, "system", "the system prompt"))]


def _messages(message: _Message, at: str, met: _Met) -> list[Message]:
    if message.role == "user":
        return _user(message.content, f"{at}.content", met)
    if message.role == "assistant":
        return [_assistant(message.content, f"{at}.content")]
    if message.role == "system":
        return [Message(role="system", content=_text(message.content, f"{at}.content", "a system message"))]
    raise InvalidInput(f"unknown role {message.role!r}", field=f"{at}.role")


def _text(content: str | list[_Block], at: str, where: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(_block_text(block, f"{at}.{index}", where) for index, block in enumerate(content))


def _block_text(block: _Block, at: str, where: str) -> str:
    if block.type != "text":
        raise InvalidInput(f"content of type {block.type!r} is not supported in {where}", field=f"{at}.type")
    return _needed(block.text, f"{at}.text")


def _needed(value: str | None, at: str) -> str:
    if value is None:
        raise InvalidInput("field required", field=at)
    return value


def _user(content: str | list[_Block], at: str, met: _Met) -> list[Message]:
    if isinstance(content, str):
        return [Message(role="user", content=content)]
    made: list[Message] = []
    said = Content()
    for index, block in enumerate(content):
        where = f"{at}.{index}"
        if block.type == "tool_result":
            said.flush(made)
            made.append(_tool_result(block, where, met))
        elif block.type == "image":
            said.add(_image(block, where, met.pictures))
        else:
            said.add(_block_text(block, where, "a user message"))
    said.flush(made)
    return made or [Message(role="user")]


def _image(block: _Block, at: str, pictures: Pictures) -> Image:
    source = convert(block.source, _Source, at=f"{at}.source")
    if source.type == "base64":
        return pictures.of_base64(source.data, source.media_type, at, f"{at}.source")
    if source.type == "url":
        return pictures.of_address(source.url, at, f"{at}.source.url")
    raise InvalidInput(f"a source of type {source.type!r} is not supported", field=f"{at}.source.type")


def _tool_result(block: _Block, at: str, met: _Met) -> Message:
    answered = _needed(block.tool_use_id, f"{at}.tool_use_id")
    content = convert({"content": block.content}, _Result, at=at).content
    images: tuple[Image, ...] = ()
    if isinstance(content, list):
        made = Content()
        for index, each in enumerate(content):
            made.add(_result_part(each, f"{at}.content.{index}", met))
        content, images = made.take()
    return Message(role="tool", content=content or "", tool_call_id=answered, images=images)


def _result_part(block: _Block, at: str, met: _Met) -> str | Image:
    """A reference to a tool is shown to the model as it was sent."""
    if block.type == "image":
        return _image(block, at, met.pictures)
    if block.type == "tool_reference":
        name = _needed(block.tool_name, f"{at}.tool_name")
        met.tools.add(name)
        return msgspec.json.encode({"type": "tool_reference", "tool_name": name}).decode()
    return _block_text(block, at, "a tool result")


def _assistant(content: str | list[_Block], at: str) -> Message:
    if isinstance(content, str):
        return Message(role="assistant", content=content)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    call_id: str | None = None
    for index, block in enumerate(content):
        where = f"{at}.{index}"
        if block.type == "tool_use":
            calls.append(_tool_use(block, where))
        elif block.type == "thinking":
            thoughts.append(_needed(block.thinking, f"{where}.thinking"))
            call_id = call_id or marked(block.signature)
        elif block.type == "redacted_thinking":
            call_id = call_id or (marked(block.data) if isinstance(block.data, str) else None)
        else:
            texts.append(_block_text(block, where, "an assistant message"))
    return Message(
        role="assistant",
        content="".join(texts),
        reasoning="".join(thoughts) or None,
        tool_calls=tuple(calls),
        call_id=call_id,
    )


def _tool_use(block: _Block, at: str) -> ToolCall:
    given = {} if block.input is None else block.input
    if not isinstance(given, dict):
        raise InvalidInput("must be an object", field=f"{at}.input")
    if deeper_than(given):
        raise InvalidInput(f"nested deeper than {MAX_DEPTH}", field=f"{at}.input")
    return ToolCall(
        id=_needed(block.id, f"{at}.id"),
        name=_needed(block.name, f"{at}.name"),
        arguments=as_arguments(given),
    )


def _asked(raw: dict[str, Any], tools: Tools) -> dict[str, Any]:
    asked = {key: value for key, value in raw.items() if key not in _READ and value is not None}
    output = raw.get("output_config") or {}
    if wanted := {key: value for key, value in output.items() if key != "format"}:
        asked["output_config"] = wanted
    for name, value in asked.items():
        storable(value, name)
    if tools.left_out:
        asked["tools_left_out"] = list(tools.left_out)
    if tools.deferred:
        asked["tools_deferred"] = list(tools.deferred)
    return asked


def _schema(body: _Body) -> dict[str, Any] | None:
    found = body.output_format, "output_format"
    if body.output_config is not None and body.output_config.format is not None:
        found = body.output_config.format, "output_config.format"
    wanted, at = found
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        raise InvalidInput(f"a format of type {wanted.type!r} is not supported", field=f"{at}.type")
    if wanted.schema is None:
        raise InvalidInput("field required", field=f"{at}.schema")
    storable(wanted.schema, f"{at}.schema")
    return wanted.schema


def _hints(raw: dict[str, Any], messages: list[_Message], headers: Mapping[str, str]) -> dict[str, str]:
    claude_code = {
        "session": headers.get("x-claude-code-session-id") or _user_session(raw),
        "subagent": headers.get("x-claude-code-agent-id", ""),
        "purpose": "compaction" if _is_compaction(messages) else "",
    }
    return {**hints(headers, {}), **{name: value for name, value in claude_code.items() if value}}


def _user_session(raw: dict[str, Any]) -> str:
    """``metadata.user_id`` is JSON text with a session id, where Claude Code made it."""
    metadata = raw.get("metadata")
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    if not isinstance(user, str) or not user.startswith("{"):
        return ""
    try:
        session = decode(user.encode()).get("session_id")
    except InvalidInput:
        return ""
    return session if isinstance(session, str) else ""


def _is_compaction(messages: list[_Message]) -> bool:
    last = [message.content for message in messages if message.role == "user"][-1:]
    texts = [text for content in last for text in _last_text(content)]
    return any(text.startswith(_COMPACTION) for text in texts)


def _last_text(content: str | list[_Block]) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [block.text or "" for block in content if block.type == "text"][-1:]
