"""What a recipe's COPY takes: files below the recipe's own folder, never through a link out of it."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rollserve.sandbox.images.base import Job, bad_image
from rollserve.sandbox.images.layer import LayerWriter, checked_parts
from rollserve.sandbox.images.recipe import Copy
from rollserve.sandbox.images.stack import Stack, parts_of
from rollserve.sandbox.images.streams import READ_BYTES

_IGNORE = ".dockerignore"


@dataclass(frozen=True)
class Copied:
    """One entry and where it goes."""

    source: Path
    target: tuple[str, ...]
    info: os.stat_result


class Context:
    """The folder of a recipe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        ignore = self._folder / _IGNORE
        lines = ignore.read_text().splitlines() if ignore.is_file() else []
        self._rules = [_rule(line.strip()) for line in lines if line.strip() and not line.startswith("#")]

    def select(self, step: Copy, below: Stack) -> list[Copied]:
        """What ``step`` copies, in order. Raises ``SandboxError`` that names its line."""
        target = step.target if step.target.startswith("/") else f"{step.workdir or '/'}/{step.target}"
        place = below.resolve(target)
        sources = [source for pattern in step.sources for source in self._matching(step, pattern)]
        found = below.find(place)
        as_folder = (
            target.endswith(("/", "/.")) or len(sources) > 1 or (found is not None and found.is_folder)
        )
        copied: list[Copied] = []
        for source in sources:
            info = source.stat()
            if stat.S_ISDIR(info.st_mode):
                copied += self._below(source, place)
            elif self._is_wanted(source):
                copied.append(Copied(source, (*place, source.name) if as_folder else place, info))
        if not copied:
            raise bad_image(f"line {step.line}: COPY finds nothing to copy")
        return copied

    def _matching(self, step: Copy, pattern: str) -> list[Path]:
        parts = parts_of(pattern)
        try:
            checked_parts(pattern.lstrip("/"))
        except Exception as error:
            raise bad_image(f"line {step.line}: {pattern} leaves the recipe's folder") from error
        inner = "/".join(parts)
        found = sorted(self._folder.glob(inner)) if set(inner) & set("*?[") else [self._folder / inner]
        for path in found:
            if not path.exists():
                raise bad_image(f"line {step.line}: there is no {pattern} beside the recipe")
            if not path.resolve().is_relative_to(self._folder):
                raise bad_image(f"line {step.line}: {pattern} leads out of the recipe's folder")
        return [path if path == self._folder else path.resolve() for path in found]

    def _below(self, folder: Path, place: tuple[str, ...]) -> Iterator[Copied]:
        waiting = [folder]
        while waiting:
            here = waiting.pop()
            yield Copied(here, (*place, *here.relative_to(folder).parts), here.lstat())
            for path in sorted(here.iterdir()):
                info = path.lstat()
                if stat.S_ISDIR(info.st_mode):
                    if self._is_wanted(path) or self._rules_bring_back():
                        waiting.append(path)
                elif self._is_wanted(path):
                    yield Copied(path, (*place, *path.relative_to(folder).parts), info)

    def _rules_bring_back(self) -> bool:
        return any(keeps for _, keeps in self._rules)

    def _is_wanted(self, path: Path) -> bool:
        """The last rule of the ignore file that fits it, or a folder it is in, decides."""
        inner = path.relative_to(self._folder)
        names = [str(inner), *(str(parent) for parent in inner.parents if parent.parts)]
        wanted = True
        for pattern, keeps in self._rules:
            if any(pattern.fullmatch(name) for name in names):
                wanted = keeps
        return wanted


def digest_of(copied: list[Copied], job: Job) -> str:
    """Of names, modes and contents: the same files make the same layer."""
    found = hashlib.sha256()
    for one in copied:
        kind = stat.S_IFMT(one.info.st_mode)
        found.update(
            f"{'/'.join(one.target)}\0{one.info.st_mode & 0o777:o}\0{kind}\0".encode(errors="replace")
        )
        if stat.S_ISLNK(one.info.st_mode):
            found.update(os.readlink(one.source).encode("utf-8", "surrogateescape"))
        elif stat.S_ISREG(one.info.st_mode):
            for piece in _pieces(one.source, job):
                found.update(piece)
        found.update(b"\0")
    return found.hexdigest()


def write(copied: list[Copied], writer: LayerWriter, job: Job) -> None:
    for one in copied:
        info = one.info
        if stat.S_ISDIR(info.st_mode):
            writer.folder(one.target, stat.S_IMODE(info.st_mode))
        elif stat.S_ISLNK(info.st_mode):
            writer.symlink(one.target, os.readlink(one.source), info.st_mtime)
        elif stat.S_ISREG(info.st_mode):
            mode = stat.S_IMODE(info.st_mode)
            pieces = _pieces(one.source, job)
            writer.file(one.target, pieces, size_bytes=info.st_size, mode=mode, mtime=info.st_mtime)


def _pieces(path: Path, job: Job) -> Iterator[bytes]:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        while piece := file.read(READ_BYTES):
            job.check()
            yield piece


def _rule(line: str) -> tuple[re.Pattern[str], bool]:
    """``*`` and ``?`` within a name, ``**`` over folders, ``!`` brings back."""
    keeps = line.startswith("!")
    pattern = line.removeprefix("!").strip("/")
    words = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(known.get(word, re.escape(word)) for word in words)), keeps
