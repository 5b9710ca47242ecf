"""Where what was sent, rendered or consumed is not what the tree holds, token for token. Pure; costs
something only where there is a difference.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollserve.gateway.node import Difference
from rollserve.gateway.tokens import TextTokenizer
from rollserve.gateway.turns import joined
from rollserve.records.call import Break, Drift, Message, unpack_ids

SHOWN_IDS = 16
_SHOWN_CHARS = 120
_ENCODED_CHARS = 256


def absorbed(difference: Difference, tokenizer: TextTokenizer) -> list[Drift]:
    """One for each cause of a difference whose meaning is the same: the ids stand as they are."""
    node, found = difference.node, []
    for cause in difference.form.causes:
        expected, back = _texts(difference, cause)
        common = _common(expected, back)
        at, ids = None, list[int]()
        if difference.of_reply:
            at, ids = _place(unpack_ids(node.sampled_ids).tolist(), expected, common, tokenizer)
        found.append(
            Drift(
                cause=cause,
                absorbed=True,
                at_message=difference.at,
                at_token=None if at is None else node.offset + at,
                from_call=node.call_id,
                expected=tuple(ids[:SHOWN_IDS]),
                found=tuple(_encoded(back[common : common + _ENCODED_CHARS], tokenizer)),
                expected_text=expected[common : common + _SHOWN_CHARS],
                found_text=back[common : common + _SHOWN_CHARS],
            )
        )
    return found


def _texts(difference: Difference, cause: str) -> tuple[str, str]:
    """The part of the message that differs by this cause, as it was and as it came back."""
    if not difference.of_reply:
        ours = difference.node.forms[0].messages
        theirs = difference.form.messages
        return "\n".join(m.content for m in ours), "\n".join(m.content for m in theirs)
    said, back = difference.node.reply, joined(difference.form.messages)
    if cause == "reasoning_dropped":
        return said.reasoning or "", back.reasoning or ""
    if cause.startswith(("arguments_", "ids_")) or cause == "tool_call_repaired":
        return _calls(said, back, cause)
    if back.reasoning and back.reasoning != said.reasoning:
        return said.reasoning or "", back.reasoning
    return said.content, back.content


def _calls(ours: Message, theirs: Message, cause: str) -> tuple[str, str]:
    for one, other in zip(ours.tool_calls, theirs.tool_calls, strict=False):
        pair = (one.id, other.id) if cause.startswith("ids_") else (one.arguments, other.arguments)
        if pair[0] != pair[1]:
            return pair
    return "", ""


def _place(ids: list[int], part: str, common: int, tokenizer: TextTokenizer) -> tuple[int | None, list[int]]:
    """The token of ``ids`` in which the character ``part[common]`` is."""
    start = tokenizer.decode(ids).find(part) if part else -1
    if start < 0:
        return None, []
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if len(tokenizer.decode(ids[: middle + 1])) > start + common:
            high = middle
        else:
            low = middle + 1
    return low, ids[low:]


def _common(one: str, other: str) -> int:
    """Characters that both begin with."""
    length = min(len(one), len(other))
    return next((at for at in range(length) if one[at] != other[at]), length)


def _encoded(text: str, tokenizer: TextTokenizer) -> list[int]:
    return tokenizer.encode_plain(text)[:SHOWN_IDS] if text else []


def broken(
    broke: Break,
    context: Sequence[int],
    prompt: Sequence[int],
    tokenizer: TextTokenizer,
    stops: Sequence[int],
) -> Drift:
    """A root that could not extend ``context`` (of ``broke.from_call``, its sampled ids included)."""
    drift = _differing(context, prompt, tokenizer)
    return Drift(
        cause=_template_cause(drift, tokenizer, stops) if broke.cause == "template" else broke.cause,
        at_message=broke.at_message,
        at_token=drift.at_token,
        from_call=broke.from_call,
        expected=drift.expected,
        found=drift.found,
        expected_text=drift.expected_text,
        found_text=drift.found_text,
    )


def _template_cause(drift: Drift, tokenizer: TextTokenizer, stops: Sequence[int]) -> str:
    """What of a template is not append-only, as far as the first id that differs tells."""
    if drift.expected and drift.expected[0] in stops:
        return "end_token_trimmed"
    sides = [tokenizer.decode(ids[:1]) for ids in (drift.expected, drift.found) if ids]
    if any(text and not text.strip() for text in sides):
        return "newline"
    return "template"


def inexact(
    cause: str, sent: Sequence[int], consumed: Sequence[int] | None, sampled: int, tokenizer: TextTokenizer
) -> Drift:
    """A generation that can't be trained on."""
    if cause != "backend_ids" or consumed is None:
        return Drift(cause=cause, at_token=len(sent), untrainable=sampled)
    drift = _differing(sent, consumed, tokenizer)
    return Drift(
        cause=cause,
        at_token=drift.at_token,
        expected=drift.expected,
        found=drift.found,
        expected_text=drift.expected_text,
        found_text=drift.found_text,
        untrainable=sampled,
    )


def _differing(expected: Sequence[int], found: Sequence[int], tokenizer: TextTokenizer) -> Drift:
    """The first place where ids differ (the end of the shorter where none does)."""
    length = min(len(expected), len(found))
    other = np.flatnonzero(np.asarray(expected[:length]) != np.asarray(found[:length]))
    at = int(other[0]) if len(other) else length
    one, two = (list(ids[at : at + SHOWN_IDS]) for ids in (expected, found))
    return Drift(
        cause="",
        at_token=at,
        expected=tuple(one),
        found=tuple(two),
        expected_text=tokenizer.decode(one)[:_SHOWN_CHARS],
        found_text=tokenizer.decode(two)[:_SHOWN_CHARS],
    )
