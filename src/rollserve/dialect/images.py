"""Images of a request: read into records, their bytes put apart. Pure: an address is kept as it is, and
nothing is ever fetched from it (a gateway that did could be sent anywhere in its network).
"""

from __future__ import annotations

import base64
import binascii
import re

from msgspec.structs import replace

from rollserve.errors import InvalidInput
from rollserve.records.call import Message
from rollserve.records.image import Image, Picture, digest_of

_MEDIA_TYPE = re.compile(r"image/[a-z0-9][a-z0-9.+-]{0,62}")
_MOST_URL_CHARS = 8192
_URLSAFE = str.maketrans("-_", "+/")


class Pictures:
    """Those of one request, by ``Image.key``, each with the first place where it stands."""

    def __init__(self) -> None:
        self.found: dict[str, Picture] = {}

    def of_address(self, url: str | None, place: str, at: str, *, detail: str | None = None) -> Image:
        """A ``data:`` URL with its bytes, or ``http(s)://``. ``place`` is the part's, ``at`` the field's."""
        if not url:
            raise InvalidInput("an image needs its data, or an address", field=at)
        scheme, _, rest = url.partition(":")
        if scheme.lower() == "data":
            head, comma, data = rest.partition(",")
            media_type, *flags = head.split(";")
            if not comma or "base64" not in flags:
                raise InvalidInput("a data: URL must hold base64 (data:image/png;base64,…)", field=at)
            return self.of_base64(data, media_type, place, at, detail=detail)
        if scheme.lower() not in ("http", "https"):
            raise InvalidInput("an image's address is a data:, http: or https: URL", field=at)
        return self._address(url, place, at, detail)

    def of_uri(self, uri: str | None, media_type: str | None, place: str, at: str) -> Image:
        """As ``of_address``, with the type that was said beside it, if any."""
        image = self.of_address(uri, place, at)
        if image.media_type or not media_type:
            return image
        return replace(image, media_type=_checked(media_type, at))

    def of_base64(
        self, data: str | None, media_type: str | None, place: str, at: str, *, detail: str | None = None
    ) -> Image:
        """Both alphabets of base64 are read."""
        kind = _checked(media_type, at)
        try:
            read = base64.b64decode((data or "").translate(_URLSAFE), validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidInput("this is not base64", field=at) from error
        return self.of_bytes(read, kind, place, at, detail=detail)

    def of_bytes(
        self, data: bytes, media_type: str | None, place: str, at: str, *, detail: str | None = None
    ) -> Image:
        kind = _checked(media_type, at)
        if not data:
            raise InvalidInput("an image must hold something", field=at)
        digest = digest_of(data)
        self.found.setdefault(digest, Picture(place=place, data=data))
        return Image(digest=digest, media_type=kind, size_bytes=len(data), detail=_detail(detail))

    def _address(self, url: str, place: str, at: str, detail: str | None) -> Image:
        if len(url) > _MOST_URL_CHARS:
            raise InvalidInput(f"an address of more than {_MOST_URL_CHARS} characters", field=at)
        self.found.setdefault(url, Picture(place=place))
        return Image(digest=digest_of(url.encode()), url=url, detail=_detail(detail))


def _checked(media_type: str | None, at: str) -> str:
    kind = (media_type or "").strip().lower()
    if not _MEDIA_TYPE.fullmatch(kind):
        raise InvalidInput(f"media of type {media_type!r} is not supported: only images are", field=at)
    return kind


def _detail(given: str | None) -> str | None:
    """``auto`` is what saying nothing means."""
    return None if given in (None, "", "auto") else given


class Content:
    """A message's text as it is read, and where images stand in it."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._images: list[Image] = []
        self._length = 0

    def add(self, part: str | Image) -> None:
        if isinstance(part, Image):
            self._images.append(replace(part, at=self._length))
        else:
            self._texts.append(part)
            self._length += len(part)

    def take(self) -> tuple[str, tuple[Image, ...]]:
        """What has been added; begins anew."""
        taken = "".join(self._texts), tuple(self._images)
        self._texts, self._images, self._length = [], [], 0
        return taken

    def flush(self, made: list[Message]) -> None:
        """What has been added as one message of the user's."""
        text, images = self.take()
        if text or images:
            made.append(Message(role="user", content=text, images=images))
