"""Images before the scripted policy: read from content parts, and among the ids of a prompt a run of one
token each, as long as its bytes say.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

import msgspec

from rollserve.dialect.images import Content
from rollserve.errors import InvalidInput
from rollserve.gateway.tokens import TextTokenizer
from rollserve.records.image import Image, digest_of

IMAGE_TOKEN = "<|endoftext|>"
MARK = "\uf8f3"
"""Stands for an image in text that is rendered."""


class ImageUrl(msgspec.Struct, frozen=True):
    url: str
    detail: str | None = None


class Part(msgspec.Struct, frozen=True):
    type: str
    text: str = ""
    image_url: ImageUrl | None = None


def read_parts(parts: Sequence[Part]) -> tuple[str, tuple[Image, ...]]:
    """Raises ``InvalidInput`` for what is neither text nor an image."""
    made = Content()
    for part in parts:
        if part.type == "text":
            made.add(part.text)
        elif part.type == "image_url" and part.image_url is not None:
            made.add(_image(part.image_url.url))
        else:
            raise InvalidInput(f"no {part.type} here", field="messages")
    return made.take()


def _image(url: str) -> Image:
    if not url.startswith("data:"):
        return Image(digest=digest_of(url.encode()), url=url)
    head, _, data = url.removeprefix("data:").partition(";base64,")
    read = base64.b64decode(data, validate=True)
    return Image(digest=digest_of(read), media_type=head, size_bytes=len(read))


def expanded(ids: list[int], images: Sequence[Image], tokenizer: TextTokenizer) -> list[int]:
    """``ids`` of a text with a ``MARK`` for each image, with its tokens in the place of the mark."""
    mark, token = tokenizer.encode_plain(MARK), tokenizer.token_id(IMAGE_TOKEN)
    made, at, left = list[int](), 0, iter(images)
    while at < len(ids):
        if ids[at : at + len(mark)] == mark and token is not None:
            made += [token] * (2 + next(left).size_bytes % 5)
            at += len(mark)
        else:
            made.append(ids[at])
            at += 1
    return made
