"""Is what an agent sends back what was said? Pure.

Agents rewrite the conversation on its way: they spell arguments anew, leave out reasoning, trim blanks, drop
ids, merge or split messages. Each such change has a cause, a stable word; where it is one of these the
meaning is the same. Anything else is an edit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from rollserve.records.call import Message, ToolCall
from rollserve.records.image import split_at_images

Messages = tuple[Message, ...]
Tools = tuple[dict[str, Any], ...]

EDITED = "history_edited"


class Verdict(NamedTuple):
    """``causes`` empty: the same bytes. ``edited``: another meaning."""

    causes: tuple[str, ...] = ()
    edited: bool = False


def judge(ours: Message, theirs: Message, *, known: bool, tools: Tools = ()) -> Verdict:
    """A model turn against what came back for it. ``known``: an opaque mark of ours says which turn it is,
    and stands for reasoning that was never shown. ``tools`` were offered to the model: an argument that
    has the default which its tool declares may come or go."""
    if theirs.role != "assistant" or len(ours.tool_calls) != len(theirs.tool_calls):
        return Verdict(edited=True)
    if ours.content.strip() != theirs.content.strip():
        return Verdict(edited=True)
    causes = _blanks(ours.content, theirs.content)
    thought, shown = ours.reasoning or "", theirs.reasoning or ""
    if shown.strip():
        if shown.strip() != thought.strip():
            return Verdict(edited=True)
        causes += _blanks(thought, shown)
    elif thought.strip() and not known:
        causes.append("reasoning_dropped")
    for call, back in zip(ours.tool_calls, theirs.tool_calls, strict=True):
        found = _judge_call(call, back, known=known or call.id == back.id, tools=tools)
        if found is None:
            return Verdict(edited=True)
        causes += found
    return Verdict(tuple(dict.fromkeys(causes)))


def _blanks(one: str, other: str) -> list[str]:
    if one == other:
        return []
    return ["newline" if one.strip("\n") == other.strip("\n") else "blanks_trimmed"]


def _judge_call(ours: ToolCall, theirs: ToolCall, *, known: bool, tools: Tools) -> list[str] | None:
    """None: another call. One that could not be read comes back as whatever the agent made of it."""
    causes = [] if ours.id == theirs.id else ["ids_changed" if theirs.id else "ids_dropped"]
    if ours.name == theirs.name and ours.arguments == theirs.arguments:
        return causes
    if ours.name == theirs.name and _value(ours.arguments) == _value(theirs.arguments):
        return [*causes, "arguments_reserialized"]
    if ours.name == theirs.name and _same_but_defaults(ours, theirs, tools):
        return [*causes, "arguments_defaulted"]
    if ours.error is not None and known:
        return [*causes, "tool_call_repaired"]
    return None


def _value(arguments: str) -> str:
    """Arguments in one spelling of their JSON value; as they are when they are no JSON."""
    try:
        return json.dumps(json.loads(arguments, parse_float=_number), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments.strip()


def _same_but_defaults(ours: ToolCall, theirs: ToolCall, tools: Tools) -> bool:
    schema = next((found for tool in tools if (found := _parameters(tool, ours.name))), None)
    if schema is None:
        return False
    try:
        one, other = (_spare(json.loads(call.arguments), schema) for call in (ours, theirs))
        return _value(json.dumps(one)) == _value(json.dumps(other))
    except (ValueError, RecursionError):
        return False


def _parameters(tool: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The schema of the arguments, where it is that tool's."""
    function = tool.get("function")
    function = function if isinstance(function, dict) else tool
    schema = function.get("parameters")
    return schema if function.get("name") == name and isinstance(schema, dict) else None


def _spare(value: Any, schema: Any) -> Any:
    """``value`` without the properties that have their declared default, at any depth."""
    if not isinstance(schema, dict):
        return value
    if isinstance(value, list):
        return [_spare(each, schema.get("items")) for each in value]
    properties = schema.get("properties")
    if not isinstance(value, dict) or not isinstance(properties, dict):
        return value
    inner = {name: _spare(each, properties.get(name)) for name, each in value.items()}
    return {name: each for name, each in inner.items() if not _is_default(each, properties.get(name))}


def _is_default(value: Any, schema: Any) -> bool:
    if not isinstance(schema, dict) or "default" not in schema:
        return False
    default = _spare(schema["default"], schema)
    return _value(json.dumps(value)) == _value(json.dumps(default))


def _number(text: str) -> float | int:
    """1.0 is 1 to clients that know one kind of number."""
    value = float(text)
    return int(value) if value.is_integer() else value


def joined(turns: Messages) -> Message:
    """One turn of several model messages in a row: some agents split text from calls."""
    return Message(
        role="assistant",
        content="".join(turn.content for turn in turns),
        reasoning="".join(turn.reasoning or "" for turn in turns) or None,
        tool_calls=tuple(call for turn in turns for call in turn.tool_calls),
        call_id=next((turn.call_id for turn in turns if turn.call_id), None),
    )


def same_step(ours: Messages, theirs: Messages) -> tuple[str, ...] | None:
    """What differs between messages of the same meaning (causes; none: the same bytes); None where the
    meaning is another. Messages of one role in a row (results: of one call) may be merged or split, with
    blanks at the joints."""
    if ours == theirs:
        return ()
    causes: list[str] = []
    one, other = list(_runs(ours)), list(_runs(theirs))
    if len(one) != len(other):
        return None
    for mine, back in zip(one, other, strict=True):
        if _kind(mine[0]) != _kind(back[0]):
            return None
        found = _same_run(mine, back)
        if found is None:
            return None
        causes += found
    return tuple(dict.fromkeys(causes))


def _kind(message: Message) -> tuple[str, str | None, str | None]:
    return message.role, message.tool_call_id, message.name


def _runs(messages: Messages) -> Iterator[list[Message]]:
    """Messages that may stand for each other, merged; model turns each for itself."""
    for (role, *_), run in groupby(messages, key=_kind):
        if role == "assistant":
            yield from ([message] for message in run)
        else:
            yield list(run)


def _same_run(ours: list[Message], theirs: list[Message]) -> Sequence[str] | None:
    if ours[0].role == "assistant":
        verdict = judge(ours[0], theirs[0], known=False)
        return None if verdict.edited else verdict.causes
    if not _same_content(ours, theirs):
        return None
    one, other = ([message.content for message in run] for run in (ours, theirs))
    if len(one) < len(other):
        return ["messages_split"]
    pairs = list(zip(one, other, strict=False))
    if len(one) > len(other) or any(mine.strip() != back.strip() for mine, back in pairs):
        return ["messages_merged"]
    causes = [cause for pair in pairs for cause in _blanks(*pair)]
    return causes or ([] if ours == theirs else ["blanks_trimmed"])


def _same_content(ours: list[Message], theirs: list[Message]) -> bool:
    """Whether the same images stand between the same texts."""
    (texts, images), (other_texts, other_images) = _by_images(ours), _by_images(theirs)
    return images == other_images and all(map(_same_text, texts, other_texts))


def _by_images(run: list[Message]) -> tuple[list[list[str]], list[tuple[str, str | None]]]:
    """The pieces of text between images, and which these are."""
    texts: list[list[str]] = [[]]
    images = [(image.key, image.detail) for message in run for image in message.images]
    for message in run:
        first, *others = split_at_images(message.content, message.images)
        texts[-1].append(first)
        texts += [[piece] for piece in others]
    return texts, images


def _same_text(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    """Whether the pieces join to the same text, blanks at any joint left out."""
    one = [piece for text in ours if (piece := text.strip())]
    other = [piece for text in theirs if (piece := text.strip())]
    while one and other:
        short, long = (one, other) if len(one[0]) <= len(other[0]) else (other, one)
        if not long[0].startswith(short[0]):
            return False
        rest = long[0][len(short[0]) :].strip()
        del short[0]
        if rest:
            long[0] = rest
        else:
            del long[0]
    return not one and not other


def last_turn(messages: Messages) -> int:
    """Index of the last model turn; -1 when there is none."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index].role == "assistant":
            return index
    return -1


def instructions(messages: Messages) -> Messages:
    """The system messages it begins with."""
    count = next((at for at, message in enumerate(messages) if message.role != "system"), len(messages))
    return messages[:count]
