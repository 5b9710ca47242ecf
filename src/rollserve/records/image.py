"""An image of a message. What is in it stays apart from the message, under its digest: a conversation is
compared, stored and sent about by digests, and the bytes are kept once.
"""

from __future__ import annotations

import hashlib

import msgspec


class Image(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Stands in a message's text, ``at`` characters from its beginning. ``digest`` is the SHA-256 (hex) of
    its bytes; with ``url`` it is that of the address, since what lies there is fetched by the model's server
    alone and is not known here. ``detail`` is what a client asked of it (``low``, ``high``), where it did."""

    digest: str
    at: int = 0
    media_type: str = ""
    size_bytes: int = 0
    url: str | None = None
    detail: str | None = None

    @property
    def key(self) -> str:
        """Never the same for bytes and an address."""
        return self.url or self.digest

    @property
    def artifact(self) -> str:
        """The path its bytes have among the artifacts of the attempt that sent it."""
        return f"images/{self.digest}"


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """What a request brought of an image: its bytes (None where it is an address), and the place of the part
    that held it, as errors name it."""

    place: str
    data: bytes | None = None


class PlacedImage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An image among tokens. ``[start, end)`` are the tokens that stand for it where ``exact``, else the
    stretch in which they are: all that the call's prompt gained. They count from the beginning of what holds
    it: a call's ``prompt_ids``, or a sample. ``call_id`` is set in samples."""

    image: Image
    start: int
    end: int
    exact: bool = False
    call_id: str = ""


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def split_at_images(content: str, images: tuple[Image, ...]) -> list[str]:
    """The text before each image, and what follows the last one: one piece more than there are images."""
    pieces, start = list[str](), 0
    for image in images:
        pieces.append(content[start : image.at])
        start = max(start, image.at)
    return [*pieces, content[start:]]
