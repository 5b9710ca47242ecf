"""Conversations, answers and broken requests for ``dialect_conformance``."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st
from msgspec.structs import replace

from rollserve.dialect.base import Answered, Piece
from rollserve.records.call import Message, ToolCall
from rollserve.records.image import Image, digest_of, split_at_images

BROKEN_BODIES: tuple[bytes, ...] = (
    b"",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"{}",
    b'{"a": NaN}',
    b'{"a": 1e999}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": "\xff"}]}',
    b"\xef\xbb\xbf{}",
    b"[" * 200_000,
    b'{"a":' * 100_000,
    b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
)
HARD_ARGUMENTS: tuple[str, ...] = (
    "",
    '{"command": "echo hi',
    "null",
    "[1, 2]",
    '"text"',
    '{"input": "a", "more": 1}',
    '{"input": 3}',
    '{"input": "\\ud800"}',
    '{"a": NaN}',
    "[" * 5000,
    "\x00",
)
HARD_TEXTS: tuple[str, ...] = (
    "\x00\x01\x1f",
    "a\r\nb\n\n\ndata: c\n\nevent: d\n\n",
    "\u2028\u2029\x85\ufeff",
    "👩‍👩‍👧‍👦🏳️‍🌈é",
    " \n\t ",
    "[DONE]",
    'he said "</think>" & <tool_call>',
)

PICTURES: dict[str, bytes] = {
    digest_of(data): data for data in (b"\x89PNG\r\n\x1a\n\xfb\xff\xfe", b"\xff\xd8\xff\xe0", b"\x00")
}
"""Bytes of images; their base64 has every odd character."""
_URLS = ("https://pictures.invalid/a%20b.png?c=d&e=%C3%A9", "http://pictures.invalid/")
_IMAGES: tuple[Image, ...] = (
    *(
        Image(digest=digest, media_type=media_type, size_bytes=len(PICTURES[digest]))
        for digest, media_type in zip(PICTURES, ("image/png", "image/jpeg", "image/webp"), strict=True)
    ),
    *(Image(digest=digest_of(url.encode()), url=url) for url in _URLS),
)
_TEXT = st.text(max_size=40)
_NAMES = st.sampled_from(["shell", "edit"])
_ARGUMENTS = st.dictionaries(
    st.text(max_size=6),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=5,
    ),
    max_size=3,
)


def tool(name: str, *, description: str = "Does it.", parameters: dict[str, Any] | None = None) -> Any:
    """An OpenAI tool object."""
    plain = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    function = {"name": name, "description": description, "parameters": parameters or plain}
    return {"type": "function", "function": function}


def _calls(most: int) -> st.SearchStrategy[tuple[ToolCall, ...]]:
    drawn = st.lists(st.tuples(_NAMES, _ARGUMENTS, st.sampled_from([None, 1])), max_size=most)
    return drawn.map(
        lambda each: tuple(
            ToolCall(id=f"call_{index}", name=name, arguments=json.dumps(arguments, indent=indent))
            for index, (name, arguments, indent) in enumerate(each)
        )
    )


@st.composite
def model_turns(draw: st.DrawFn) -> Message:
    """What a model may say: text, reasoning, calls, in any combination."""
    return Message(
        role="assistant",
        content=draw(_TEXT),
        reasoning=draw(st.none() | st.text(min_size=1, max_size=40)),
        tool_calls=draw(_calls(3)),
    )


@st.composite
def seen(draw: st.DrawFn, message: Message, *, at_end: bool = False) -> Message:
    """A message with up to three images, among its text or after it."""
    images = draw(st.lists(st.sampled_from(_IMAGES), max_size=3))
    length = len(message.content)
    places = sorted(draw(st.integers(length if at_end else 0, length)) for _ in images)
    placed = tuple(replace(image, at=at) for image, at in zip(images, places, strict=True))
    return replace(message, images=placed)


def parts_of(message: Message) -> list[str | Image]:
    """Texts and images in their order, as a client sends them."""
    parts: list[str | Image] = []
    texts = split_at_images(message.content, message.images)
    for text, image in zip(texts, (*message.images, None), strict=True):
        parts += [each for each in (text or None, image) if each is not None]
    return parts


def encoded(image: Image) -> str:
    """Base64 of an image of ``PICTURES``."""
    return base64.b64encode(PICTURES[image.digest]).decode()


def address(image: Image) -> str:
    return image.url or f"data:{image.media_type};base64,{encoded(image)}"


@st.composite
def turns(draw: st.DrawFn) -> tuple[Message, ...]:
    """What a user says and shows, and perhaps a model turn with the results of its calls."""
    messages = [draw(seen(Message(role="user", content=draw(st.text(min_size=1, max_size=40)))))]
    if draw(st.booleans()):
        said = draw(model_turns())
        messages.append(said)
        for call in said.tool_calls:
            result = Message(role="tool", content=draw(_TEXT), tool_call_id=call.id)
            messages.append(draw(seen(result, at_end=True)))
    return tuple(messages)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Message, ...]:
    """From the system prompt on to the message that wants an answer; ids of calls are unique."""
    messages: list[Message] = []
    if draw(st.booleans()):
        messages.append(Message(role="system", content=draw(st.text(min_size=1, max_size=40))))
    for number, turn in enumerate(draw(st.lists(turns(), max_size=3))):
        messages += [_renamed(message, number) for message in turn]
    messages.append(Message(role="user", content=draw(st.text(min_size=1, max_size=40))))
    return tuple(messages)


def _renamed(message: Message, turn: int) -> Message:
    calls = tuple(
        ToolCall(id=f"{call.id}_{turn}", name=call.name, arguments=call.arguments)
        for call in message.tool_calls
    )
    of = None if message.tool_call_id is None else f"{message.tool_call_id}_{turn}"
    return Message(
        role=message.role,
        content=message.content,
        reasoning=message.reasoning,
        tool_calls=calls,
        tool_call_id=of,
        images=message.images,
    )


@st.composite
def answers(draw: st.DrawFn) -> Answered:
    message = draw(model_turns())
    reasons = ["tool_calls"] if message.tool_calls else ["stop", "length", "abort"]
    prompt_tokens = draw(st.integers(1, 2**31))
    return Answered(
        call_id=draw(st.text("abcdef0123456789_", min_size=1, max_size=30).map("mc_".__add__)),
        message=message,
        finish_reason=draw(st.sampled_from(reasons)),
        prompt_tokens=prompt_tokens,
        sampled_tokens=draw(st.integers(1, 2**31)),
        cached_tokens=draw(st.integers(0, prompt_tokens)),
    )


def pieces_of(message: Message, cuts: Sequence[int]) -> list[Piece]:
    """An answer's text in the order it is let out, cut at ``cuts``."""
    pieces: list[Piece] = []
    for text in _cut(message.reasoning or "", cuts):
        pieces.append(Piece("reasoning", text))
    for text in _cut(message.content, cuts):
        pieces.append(Piece("content", text))
    return pieces


def _cut(text: str, cuts: Sequence[int]) -> list[str]:
    edges = [0, *sorted(set(cuts)), len(text)]
    parts = [text[start:end] for start, end in pairwise(edges) if start < len(text)]
    return [part for part in parts if part]


_KEYS = st.sampled_from(
    (
        "messages",
        "input",
        "contents",
        "tools",
        "content",
        "role",
        "type",
        "text",
        "name",
        "id",
        "arguments",
        "function",
        "tool_calls",
        "n",
        "stop",
        "model",
        "parts",
        "system",
        "stream",
        "max_tokens",
        "max_output_tokens",
        "response_format",
        "tool_choice",
        "instructions",
        "image_url",
        "source",
        "url",
        "data",
        "media_type",
        "inlineData",
        "fileData",
        "mimeType",
    )
)
_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**63, -(2**64), 10**40, 1e300, -0.0])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["\ud800", "\x00", "user", "assistant", "tool", "function", "text", "auto", "none"])
    | st.sampled_from(["image", "image_url", "input_image", "base64", "image/png", "https://a.invalid/b"])
    | st.sampled_from(
        ["data:image/png;base64,AAAA", "data:image/png;base64,A", "data:,", "AAAA", "file:///a"]
    )
)


def values() -> st.SearchStrategy[Any]:
    """Any JSON, keys that mean something among them."""
    return st.recursive(
        _LEAVES,
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(_KEYS | st.text(max_size=6), inner, max_size=5)
        ),
        max_leaves=25,
    )


def documents() -> st.SearchStrategy[Any]:
    return st.dictionaries(_KEYS, values(), max_size=6) | values()


@st.composite
def mutated(draw: st.DrawFn, document: Any) -> Any:
    """A copy with one to three places of it replaced, left out, doubled or added to."""
    changed = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        holders = [node for node in _nodes(changed) if node]
        if not holders:
            break
        _change(draw, draw(st.sampled_from(holders)))
    return changed


def _nodes(document: Any) -> list[Any]:
    found, queue = [], [document]
    while queue:
        node = queue.pop()
        if isinstance(node, (dict, list)):
            found.append(node)
            queue += node.values() if isinstance(node, dict) else node
    return found


def _change(draw: st.DrawFn, holder: Any) -> None:
    how = draw(st.sampled_from(["replace", "remove", "add", "deepen"]))
    keys: list[Any] = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
    key = draw(st.sampled_from(keys))
    if how == "remove":
        del holder[key]
    elif how == "replace":
        holder[key] = draw(values())
    elif how == "deepen":
        for _ in range(draw(st.sampled_from([1, 70, 300]))):
            holder[key] = [holder[key]]
    elif isinstance(holder, dict):
        holder[draw(_KEYS)] = draw(values())
    else:
        holder.append(copy.deepcopy(holder[key]))
