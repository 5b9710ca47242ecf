"""Words of the images: a *layer* is an unpacked folder as an overlay's upper one looks (a deleted entry is a
0:0 character device, a folder that hides those below has ``user.overlay.opaque``); an *image* is a stack of
layers and what the image says about itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from rollserve.errors import SandboxError

OPAQUE = "user.overlay.opaque"


class ImageConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``user`` is a number or a name of the image's own ``/etc/passwd``; empty is root. ``workdir`` empty is
    the sandbox's default. ``keeps_tmp``: its ``/tmp`` is part of it, as a snapshot's is."""

    env: dict[str, str] = {}
    workdir: str = ""
    user: str = ""
    keeps_tmp: bool = False


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    size_bytes: int


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """``id`` is 64 hexadecimal digits. ``base`` is ``host`` or a folder outside the cache where the layers
    (bottom first) lie on one, else empty. ``source`` is what it was made from, for people."""

    id: str
    layers: tuple[Layer, ...] = ()
    base: str = ""
    config: ImageConfig = ImageConfig()
    source: str = ""
    created_at: float = 0.0

    @property
    def size_bytes(self) -> int:
        """Of all its layers; other images may share them."""
        return sum(layer.size_bytes for layer in self.layers)


def bad_image(message: str, *, hint: str | None = None) -> SandboxError:
    """An image that can't be had or used."""
    return SandboxError(message, operation="image", hint=hint)


Report = Callable[[str, int, int | None], None]
"""What is being done, how many bytes of it are done, of how many where that is known."""


def _silent(what: str, done_bytes: int, total_bytes: int | None) -> None:
    """Nobody looks."""


@dataclass(frozen=True)
class Job:
    """Long work in a thread: tells what it does, and ends soon after ``stop`` is set."""

    report: Report = _silent
    stop: threading.Event = field(default_factory=threading.Event)

    def tell(self, what: str, done_bytes: int = 0, total_bytes: int | None = None) -> None:
        self.check()
        self.report(what, done_bytes, total_bytes)

    def check(self) -> None:
        """Raises ``SandboxError`` once the work is to stop."""
        if self.stop.is_set():
            raise bad_image("the work on the image was stopped")
