"""Where the engine renders: what is sent to it, and what its own account of the prompt proves. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from rollserve.backend.base import Chat
from rollserve.gateway.parsing import offered
from rollserve.gateway.rendering import native_id
from rollserve.records.call import Message
from rollserve.records.ids import Ids


def chat_of(
    conversation: Sequence[Message], tools: tuple[dict[str, Any], ...], pictures: Mapping[str, bytes]
) -> Chat:
    """With ids of tool calls as the model wrote them: a template may render them."""
    messages = tuple(_native(message) for message in conversation)
    return Chat(messages=messages, tools=tools, pictures=pictures)


def _native(message: Message) -> Message:
    calls = tuple(replace(offered(call), id=native_id(call.id)) for call in message.tool_calls)
    result_of = message.tool_call_id
    return replace(
        message, tool_calls=calls, tool_call_id=None if result_of is None else native_id(result_of)
    )


def gained(known: Ids, consumed: list[int]) -> list[int] | None:
    """What the prompt that an engine consumed has after ``known``; None when it does not begin with it."""
    return consumed[len(known) :] if consumed[: len(known)] == known.list else None
