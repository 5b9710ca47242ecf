"""Images in the messages that an engine renders: OpenAI's content parts, and those that a probe sends."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rollserve.errors import BackendError
from rollserve.records.call import Message
from rollserve.records.image import Image, split_at_images

_PROBE_PIXELS = 64
"""Of either side; some models take none below 28."""


def content_parts(message: Message, pictures: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """Text and images as they stand in the message. Raises ``BackendError`` where bytes are missing."""
    pieces = split_at_images(message.content, message.images)
    parts: list[dict[str, Any]] = []
    for text, image in zip(pieces, (*message.images, None), strict=True):
        if text:
            parts.append({"type": "text", "text": text})
        if image is not None:
            given = {"url": image.url or _data_url(image, pictures)}
            parts.append(
                {"type": "image_url", "image_url": given | ({"detail": image.detail} if image.detail else {})}
            )
    return parts


def _data_url(image: Image, pictures: Mapping[str, bytes]) -> str:
    data = pictures.get(image.digest)
    if data is None:
        raise BackendError(f"the bytes of image {image.digest} are missing", operation="backend.generate")
    return f"data:{image.media_type};base64,{base64.b64encode(data).decode()}"


def probe_picture() -> bytes:
    """A small PNG, all grey."""
    side = _PROBE_PIXELS
    rows = zlib.compress((b"\0" + b"\x80" * 3 * side) * side)
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", rows), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in chunks)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def image_token(without: Sequence[int], seen: Sequence[int]) -> int | None:
    """The id that stands for an image, from a prompt and the same with an image: the only one that is new and
    comes twice in a row. None where there is no such one, or more."""
    repeated = {one for one, other in pairwise(seen) if one == other} - set(without)
    return repeated.pop() if len(repeated) == 1 else None


def images_of(pictures: Mapping[str, bytes]) -> tuple[Image, ...]:
    """PNG images that stand before a text."""
    return tuple(
        Image(digest=digest, media_type="image/png", size_bytes=len(data))
        for digest, data in pictures.items()
    )
