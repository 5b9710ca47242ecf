"""All that a sandbox writes lies in one tmpfs with a size: one bound for image, ``/tmp`` and the rest.

bubblewrap's own overlays write to a tmpfs of half the machine's memory. Here their upper folders are in a
tmpfs with a size instead. It must be there before they are mounted, at a place that bubblewrap finds when
it starts; so an empty folder of the host lends its *name*: the tmpfs covers that folder, in the sandbox's
private copy of the mount tree only, and what is mounted from there is the tmpfs's. bubblewrap resolves a
place as ``newroot/PLACE`` with the host's tree at ``oldroot`` beside it, hence ``../oldroot``. Whether it
does so is tried before it is relied on; the folder of the host stays empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rollserve.sandbox.base import WORKDIR

_ROOT, _MODES = "root", {"/tmp": "1777", "/dev/shm": "1777", WORKDIR: "0755"}


class WritableLayer:
    """``folder`` is the host's that lends its name; blocking."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
        self._folder = folder.resolve()
        self._overlays = 0
        self._lend(_ROOT)
        for place in _MODES:
            self._lend(layer_name(place))

    def prepare(self, overlays: int) -> None:
        """Lend the names that so many overlays take; several threads may."""
        for number in range(self._overlays, overlays):
            self._lend(f"upper{number}")
            self._lend(f"work{number}")
        self._overlays = max(self._overlays, overlays)

    def arguments(self, layout: Sequence[str], places: Sequence[str], size_bytes: int) -> list[str]:
        """The layout (once ``prepare``d) over the bounded layer, and what ``places`` will need."""
        beside = f"../oldroot{self._folder}"
        arguments = ["--size", str(size_bytes), "--tmpfs", beside, "--dir", f"{beside}/{_ROOT}"]
        for number in range(layout.count("--tmp-overlay")):
            arguments += ["--dir", f"{beside}/upper{number}", "--dir", f"{beside}/work{number}"]
        for place in places:
            arguments += ["--perms", _MODES[place], "--dir", f"{beside}/{layer_name(place)}"]
        return [*arguments, *self._redirected(layout)]

    def places(self, places: Sequence[str]) -> list[str]:
        """To come after ``--dev``, which is left read-only but for what is mounted in it."""
        arguments: list[str] = []
        for place in places:
            arguments += ["--bind", str(self._folder / layer_name(place)), place]
        return [*arguments, "--remount-ro", "/dev"]

    def hidden(self) -> list[str]:
        """To come before ``--proc``, which covers it: the whole layer, for who can enter the sandbox's mount
        namespace from outside, and for nobody inside."""
        return ["--bind", str(self._folder), "/proc"]

    def is_untouched(self) -> bool:
        """Whether the host's folder is as empty as it should be."""
        return not any(any(folder.iterdir()) for folder in self._folder.iterdir())

    def _redirected(self, layout: Sequence[str]) -> Iterator[str]:
        words, number = iter(layout), 0
        for word in words:
            if word == "--tmp-overlay":
                upper, work = (str(self._folder / f"{kind}{number}") for kind in ("upper", "work"))
                yield from ("--overlay", upper, work, next(words))
                number += 1
            elif word == "--size":
                size, option, place = next(words), next(words), next(words)
                own = ("--bind", str(self._folder / _ROOT), place)
                yield from own if place == "/" else (word, size, option, place)
            elif word == "--tmpfs":  # covers what is private
                place = next(words)
                yield from (word, place, "--remount-ro", place)
            else:
                yield word

    def _lend(self, name: str) -> None:
        (self._folder / name).mkdir(exist_ok=True, mode=0o755)


def layer_name(place: str) -> str:
    """Of the folder of the layer that is mounted at ``place``."""
    return place.strip("/").replace("/", "-")
