"""Looking into a stack of layers as an overlay would show it, without ever following a link of the image on
the host: an image's links lead to places inside the image."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollserve.sandbox.images.base import OPAQUE, bad_image

_MAX_LINKS = 40
_READ_LIMIT_BYTES = 1 << 20


def parts_of(path: str) -> tuple[str, ...]:
    """Components of a path of an image, relative or absolute; ``..`` stops at its root."""
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    return tuple(parts)


def is_whiteout(info: os.stat_result) -> bool:
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


@dataclass(frozen=True)
class Found:
    """An entry as the topmost layer that has it shows it."""

    path: Path
    info: os.stat_result

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.info.st_mode)

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.info.st_mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.info.st_mode)


class Stack:
    """``layers`` are folders, bottom first."""

    def __init__(self, layers: Iterable[Path]) -> None:
        self._layers = tuple(reversed(tuple(layers)))

    def find(self, parts: Sequence[str]) -> Found | None:
        """The entry of that very path; None where it, or a link or a file on the way to it, is in the way."""
        for layer in self._layers:
            found, goes_on = _look(layer, parts)
            if found is not None or not goes_on:
                return found
        return None

    def resolve(self, path: str) -> tuple[str, ...]:
        """``path`` without links, as the image's own root sees it. What does not exist stays as it is named.
        Raises ``SandboxError`` for a circle of links."""
        done: tuple[str, ...] = ()
        todo = list(reversed(parts_of(path)))
        links = 0
        while todo:
            part = todo.pop()
            if part == "..":
                done = done[:-1]
                continue
            found = self.find((*done, part))
            if found is None or not found.is_link:
                done = (*done, part)
                continue
            links += 1
            if links > _MAX_LINKS:
                raise bad_image(f"{path}: too many symbolic links")
            target = os.readlink(found.path)
            done = () if target.startswith("/") else done
            todo += [step for step in reversed(target.split("/")) if step not in ("", ".")]
        return done

    def exists(self, path: str) -> bool:
        return self.find(self.resolve(path)) is not None

    def read(self, path: str) -> bytes | None:
        """A small regular file, links followed inside the image; None where there is none."""
        found = self.find(self.resolve(path))
        if found is None or not found.is_file:
            return None
        fd = os.open(found.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            return file.read(_READ_LIMIT_BYTES)


def _look(layer: Path, parts: Sequence[str]) -> tuple[Found | None, bool]:
    """What one layer has there, and whether the layers below are to be asked otherwise."""
    place, info = layer, os.lstat(layer)
    below_shows = True
    for part in parts:
        if not stat.S_ISDIR(info.st_mode):
            return None, False
        below_shows = below_shows and not is_opaque(place)
        place = place / part
        try:
            info = os.lstat(place)
        except (FileNotFoundError, PermissionError):
            return None, below_shows
        if is_whiteout(info):
            return None, False
    return Found(place, info), True


def is_opaque(folder: Path) -> bool:
    try:
        return os.getxattr(folder, OPAQUE, follow_symlinks=False) == b"y"
    except OSError:
        return False
