"""Sampled ids to a message: what the model said, its reasoning, its tool calls.

A tool call that is broken (no JSON, no object, not closed, too deep) becomes a ``ToolCall`` with
``error``, so that the agent can answer it; nothing the model writes raises. A tool call inside thinking
is not a tool call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from rollserve.gateway.tokens import TextTokenizer
from rollserve.records.base import MAX_DEPTH, deeper_than, new_id
from rollserve.records.call import Message, ToolCall

_TOO_DEEP = f"the arguments are nested deeper than {MAX_DEPTH}"

_NAME = re.compile(r'"?name"?\s*[=:]\s*"?([A-Za-z0-9_.-]{1,64})')
_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Parsed:
    """``finish`` is what the model's ending means when no limit cut it off."""

    message: Message
    finish: Literal["stop", "tool_calls"]


class _JsonCall(msgspec.Struct):
    name: str
    arguments: msgspec.Raw


_json_call = msgspec.json.Decoder(_JsonCall)


class ReplyParser:
    """``parse`` is a renderer's ``parse_response``."""

    def __init__(
        self, parse: Callable[..., Any], tokenizer: TextTokenizer, stop_token_ids: frozenset[int]
    ) -> None:
        self._parse = parse
        self._tokenizer = tokenizer
        self._stops = stop_token_ids

    def parse(
        self, sampled_ids: list[int], tools: Sequence[dict[str, Any]], prompt_tail: list[int], *, cut: bool
    ) -> Parsed:
        try:
            found = self._parse(sampled_ids, tools=list(tools) or None, prompt_ids=prompt_tail)
        except (RecursionError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            return self._unreadable(sampled_ids, error)
        if found.tool_calls and found.reasoning_content is not None:
            open_thought = self._open_thought(sampled_ids, prompt_tail)
            if open_thought is not None:
                return Parsed(Message(role="assistant", reasoning=open_thought), "stop")
        names = _names(tools)
        calls = tuple(_tool_call(call, names, cut) for call in found.tool_calls)
        message = Message(
            role="assistant",
            content=found.content or "",
            reasoning=(found.reasoning_content or "").strip() or None,
            tool_calls=calls,
        )
        return Parsed(message, "tool_calls" if calls else "stop")

    def _open_thought(self, sampled_ids: list[int], prompt_tail: list[int]) -> str | None:
        """The thinking, when it was never closed (a renderer may let a tool call end it); else None."""
        from renderers.reasoning import scan_reasoning

        think = self._tokenizer.token_id("<think>")
        if think is None or think == self._tokenizer.unk_token_id:
            return None
        boundary = scan_reasoning(self._tokenizer, sampled_ids, prompt_ids=prompt_tail, stop_ids=self._stops)
        return (boundary.text or "").strip() if boundary.is_open else None

    def _unreadable(self, sampled_ids: list[int], error: Exception) -> Parsed:
        """The renderer's parser gave up: hand over what can be told from the text."""
        ids = sampled_ids
        while ids and ids[-1] in self._stops:
            ids = ids[:-1]
        text = self._tokenizer.decode(ids)
        thought, closed, said = text.partition("</think>")
        if not closed:
            thought, said = "", text
        content, _, _ = said.partition("<tool_call>")
        why = "nested too deeply" if isinstance(error, RecursionError) else f"could not be read ({error})"
        blocks = _BLOCK.findall(said) or [said]
        message = Message(
            role="assistant",
            content=content.strip() if "<tool_call>" in said else "",
            reasoning=thought.replace("<think>", "").strip() or None,
            tool_calls=tuple(_broken(block.strip(), None, f"the tool call {why}") for block in blocks),
        )
        return Parsed(message, "tool_calls")


def adopted(reply: Message, tools: Sequence[dict[str, Any]]) -> Parsed:
    """What an engine has read itself, with our ids of its tool calls before its own."""
    names = _names(tools)
    calls = tuple(_adopted_call(call, names) for call in reply.tool_calls)
    content, reasoning = _storable(reply.content).strip(), _storable(reply.reasoning or "").strip()
    message = replace(reply, content=content, reasoning=reasoning or None, tool_calls=calls)
    return Parsed(message, "tool_calls" if calls else "stop")


def _adopted_call(call: ToolCall, names: frozenset[str]) -> ToolCall:
    name, arguments = _storable(call.name), _storable(call.arguments) or "{}"
    error = check_arguments(arguments)
    if error is None and names and name not in names:
        error = _unknown(name, names)
    return ToolCall(id=_id(call.id or None), name=name or "unknown", arguments=arguments, error=error)


def offered(call: ToolCall) -> ToolCall:
    """A call that was broken, as engines take it back: they insist on arguments that are an object."""
    if check_arguments(call.arguments) is None:
        return call
    return replace(call, arguments=json.dumps({"arguments": call.arguments}))


def _names(tools: Sequence[dict[str, Any]]) -> frozenset[str]:
    """Names of the tools that were offered (OpenAI form, or flat)."""
    found = set()
    for tool in tools:
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else tool.get("name")
        if isinstance(name, str):
            found.add(name)
    return frozenset(found)


def _broken(raw: str, name: str | None, error: str, native: str | None = None) -> ToolCall:
    guess = _NAME.search(raw)
    return ToolCall(
        id=_id(native),
        name=name or (guess[1] if guess else "unknown"),
        arguments=raw,
        error=error,
    )


def _id(native: str | None) -> str:
    return new_id("call") if native is None else f"{new_id('call')}|{native}"


_WHY = {
    "invalid_json": "the tool call is not valid JSON",
    "missing_name": "the tool call has no name",
    "malformed_structure": "the tool call is malformed",
}


def _tool_call(found: Any, names: frozenset[str], cut: bool) -> ToolCall:
    """A renderer's ``ParsedToolCall`` in our words."""
    status, raw = str(found.status), _storable(found.raw or "")
    if status == "unclosed_block":
        why = "the tool call was cut off by the token limit" if cut else "the tool call was not closed"
        return _broken(raw, found.name, why, found.id)
    if status in _WHY:
        return _broken(raw, found.name if isinstance(found.name, str) else None, _WHY[status], found.id)
    if not isinstance(found.name, str) or not found.name.strip():
        return _broken(raw, None, "the tool call's name must be a string", found.id)
    arguments, error = _arguments(raw, found.arguments)
    name = _storable(found.name)
    if error is None and names and name not in names:
        error = _unknown(name, names)
    return ToolCall(id=_id(found.id), name=name, arguments=arguments, error=error)


def _unknown(name: str, names: frozenset[str]) -> str:
    return f"unknown tool {name!r}; there are: {', '.join(sorted(names))}"


def _arguments(raw: str, parsed: Any) -> tuple[str, str | None]:
    """The JSON text of the arguments, as the model wrote it where the format is JSON, and what is
    wrong with it."""
    text = raw
    try:
        text = bytes(_json_call.decode(raw).arguments).decode()
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        try:
            text = parsed if isinstance(parsed, str) else json.dumps(parsed, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            return raw, "the arguments could not be read"
        if _storable(text) != text:
            return _storable(text), "the arguments hold half of a surrogate pair"
    return text, check_arguments(text)


def check_arguments(text: str) -> str | None:
    """What is wrong with the JSON text of a tool call's arguments; None when nothing is."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError) as error:
        return f"the arguments are not valid JSON: {error}"
    except RecursionError:
        return _TOO_DEEP
    if deeper_than(value):
        return _TOO_DEEP
    return None if isinstance(value, dict) else "the arguments must be a JSON object"


def _storable(text: str) -> str:
    """JSON escapes can make lone surrogates, which no UTF-8 encoder takes."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
