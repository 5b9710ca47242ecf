"""Prompts that are too long for the event loop: rendered in a thread, and not at all where they can't fit.

A megabyte of text takes a tokenizer a second. Short text is rendered at once: a thread costs more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from rollserve.errors import ContextTooLong
from rollserve.gateway.rendering import Prior, Rendering, Tools
from rollserve.records.call import Message
from rollserve.records.ids import Ids

T = TypeVar("T")

LONG_CHARS = 16 << 10
"""Some 10 ms of a tokenizer's."""


async def render(
    rendering: Rendering, messages: Sequence[Message], tools: Tools, context_tokens: int | None
) -> Ids:
    """``Rendering.prompt``. Raises ``ContextTooLong`` besides, without a number of tokens, for text that is
    more than ``context_tokens`` of the longest tokens."""
    chars = _chars(messages)
    _refuse_hopeless(rendering, chars, context_tokens)
    long = chars > LONG_CHARS or _tool_bytes(tools) > LONG_CHARS
    return await _run(rendering, long, lambda: rendering.prompt(messages, tools).made())


async def extend(
    rendering: Rendering, prior: Prior, new: Sequence[Message], tools: Tools, context_tokens: int | None
) -> Ids | None:
    """``Rendering.extend``, as ``render``."""
    chars = _chars(new)
    _refuse_hopeless(rendering, chars, context_tokens)
    long = chars > LONG_CHARS or (rendering.reads_history and _chars(prior.conversation) > LONG_CHARS)

    def work() -> Ids | None:
        ids = rendering.extend(prior, new, tools)
        return None if ids is None else Ids(ids).made()

    return await _run(rendering, long, work)


async def _run(rendering: Rendering, long: bool, work: Callable[[], T]) -> T:
    """One long prompt of a rendering at a time: each may take gigabytes. A cancel leaves one that has begun
    to its end, and drops one that hasn't."""
    if not long:
        return work()
    return await asyncio.get_running_loop().run_in_executor(rendering.apart, work)


def _refuse_hopeless(rendering: Rendering, chars: int, context_tokens: int | None) -> None:
    longest = rendering.tokenizer.longest_token
    if context_tokens is None or longest is None or chars < context_tokens * longest:
        return
    raise ContextTooLong(
        f"maximum context length is {context_tokens} tokens, the prompt's {chars} characters are more",
        field="messages",
        context_tokens=context_tokens,
    )


def _chars(messages: Sequence[Message]) -> int:
    return sum(
        len(message.content)
        + len(message.reasoning or "")
        + sum(len(call.arguments) for call in message.tool_calls)
        for message in messages
    )


def _tool_bytes(tools: Tools) -> int:
    return len(msgspec.msgpack.encode(tools)) if tools else 0
