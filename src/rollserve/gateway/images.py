"""Images of a session: whether they can be sent, what is kept of them, and where they stand among tokens.

Their bytes go to the attempt's payload once per digest, when the first call that holds them is recorded; they
are held in memory only for as long as the request that brought them, or, where a later request may go on from
it by name (``previous_response_id``), as long as the session.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollserve.errors import InvalidInput
from rollserve.gateway.policies import PolicyState
from rollserve.records.call import ChatRequest, Message
from rollserve.records.image import Image, Picture, PlacedImage
from rollserve.records.policy import PolicySpec
from rollserve.store.payload import Segment


@dataclass(frozen=True, kw_only=True)
class ImageBounds:
    """``image_bytes`` of one image, ``request_images`` in one request, ``session_bytes`` of all that a
    session has sent, each counted once."""

    image_bytes: int = 20 << 20
    request_images: int = 200
    session_bytes: int = 256 << 20


def refuse_images(request: ChatRequest, policy: PolicyState) -> None:
    """Raises ``InvalidInput`` that names the first image's place where the policy takes none."""
    images = () if policy.sees else images_of(request.messages)
    if not images:
        return
    raise takes_none(policy.policy.spec, _place(request, images[0]))


def takes_none(policy: PolicySpec, field: str) -> InvalidInput:
    """Of a policy that takes no images: why, and what does."""
    tokens = policy.interface == "tokens"
    why = "is sent token ids" if tokens else "has a backend that does not accept them"
    return InvalidInput(
        f"policy {policy.name!r} takes no images: it {why}",
        field=field,
        hint="a policy of interface 'chat' or 'text' does, whose backends accept 'image'",
    )


def images_of(messages: Sequence[Message]) -> list[Image]:
    return [image for message in messages for image in message.images]


def _place(request: ChatRequest, image: Image) -> str:
    picture = request.pictures.get(image.key)
    return picture.place if picture is not None else "messages"


@dataclass(slots=True)
class SessionImages:
    """``written`` are the digests whose bytes are in the payload, with the sum of their sizes; ``kept`` bytes
    that a request may go on from by name."""

    bounds: ImageBounds = field(default_factory=ImageBounds)
    written: set[str] = field(default_factory=set)
    written_bytes: int = 0
    kept: dict[str, bytes] = field(default_factory=dict)

    def check(self, request: ChatRequest, policy: PolicyState) -> None:
        """Raises ``InvalidInput`` for images that the policy does not take, and for what is over a bound."""
        if not policy.sees:
            refuse_images(request, policy)
            return
        images = images_of(request.messages)
        if len(images) > self.bounds.request_images:
            message = f"more than {self.bounds.request_images} images in one request"
            raise InvalidInput(message, field=_place(request, images[self.bounds.request_images]))
        size = self.written_bytes
        for key, picture in request.pictures.items():
            size += 0 if key in self.written else self._size(picture)
            self._check_sum(size, picture)

    def _size(self, picture: Picture) -> int:
        length = len(picture.data or b"")
        if length > self.bounds.image_bytes:
            message = f"an image of {length} bytes: the most is {self.bounds.image_bytes}"
            raise InvalidInput(message, field=picture.place)
        return length

    def _check_sum(self, size: int, picture: Picture) -> None:
        if size > self.bounds.session_bytes:
            message = f"the images of this session have more than {self.bounds.session_bytes} bytes"
            raise InvalidInput(message, field=picture.place)

    def show(self, pictures: Mapping[str, Picture]) -> None:
        """For requests of an agent in this process, which bring no bytes. Raises ``InvalidInput`` for what is
        over a bound."""
        size = sum(map(len, self.kept.values()))
        for key, picture in pictures.items():
            size += 0 if key in self.kept else self._size(picture)
            self._check_sum(size, picture)
        self.keep(pictures)

    def shown(self, messages: Sequence[Message]) -> dict[str, Picture]:
        """The pictures of a request of messages alone. Raises ``InvalidInput`` for an image that was never
        shown."""
        found: dict[str, Picture] = {}
        for index, message in enumerate(messages):
            for at, image in enumerate(message.images):
                place = f"messages.{index}.images.{at}"
                data = self.kept.get(image.digest) if image.url is None else None
                if data is None and image.url is None:
                    raise InvalidInput(
                        f"image {image.digest} was not shown", field=place, hint="`model.show` makes it known"
                    )
                found.setdefault(image.key, Picture(place=place, data=data))
        return found

    def keep(self, pictures: Mapping[str, Picture]) -> None:
        """For requests that go on from this one by name."""
        self.kept.update((key, each.data) for key, each in pictures.items() if each.data is not None)

    def found(self, messages: Sequence[Message], request: ChatRequest) -> dict[str, bytes]:
        """The bytes of the messages' images. Raises ``InvalidInput`` where they are not known any more."""
        found: dict[str, bytes] = {}
        for image in images_of(messages):
            if image.url is not None or image.digest in found:
                continue
            picture = request.pictures.get(image.digest)
            data = picture.data if picture is not None else self.kept.get(image.digest)
            if data is None:
                raise InvalidInput(
                    f"image {image.digest} was not sent with this request, and is not kept",
                    field="messages",
                    hint="send the whole conversation, or store the answers that are gone on from",
                )
            found[image.digest] = data
        return found

    def write(self, messages: Sequence[Message], pictures: Mapping[str, bytes], segment: Segment) -> None:
        """To the payload, each once. Blocking, as all of a record. Raises ``OSError``,
        ``InfrastructureFailure``."""
        for image in images_of(messages):
            data = pictures.get(image.digest)
            if data is not None and image.digest not in self.written:
                segment.append_artifact(image.artifact, data)
                self.written.add(image.digest)
                self.written_bytes += len(data)


def placed(messages: Sequence[Message], prompt: Sequence[int], token: int | None) -> tuple[PlacedImage, ...]:
    """The messages' images in the ids that came with them. ``token`` stands for an image, as often as the
    image is large: where there are as many runs of it as images each has its own; else they are somewhere."""
    images = images_of(messages)
    if not images or not prompt:
        return ()
    runs = _runs(prompt, token) if token is not None else []
    exact = len(runs) == len(images)
    places = runs if exact else [(0, len(prompt))] * len(images)
    return tuple(
        PlacedImage(image=image, start=start, end=end, exact=exact)
        for image, (start, end) in zip(images, places, strict=True)
    )


def _runs(ids: Sequence[int], token: int) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for at, each in enumerate(ids):
        if each != token:
            continue
        if runs and runs[-1][1] == at:
            runs[-1] = (runs[-1][0], at + 1)
        else:
            runs.append((at, at + 1))
    return runs
