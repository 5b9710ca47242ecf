"""A stack of layers as one tar stream, for what takes no layers of ours: a container engine.

What an overlay would show is what is written: whiteouts, opaque folders and covered entries are left out.
Links are taken as they are and never followed. Everything belongs to the image's user, as in every sandbox.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from rollserve.sandbox.images.base import Job
from rollserve.sandbox.images.stack import is_opaque, is_whiteout

_Place = tuple[str, ...]
_LEFT_OUT = frozenset({("proc",), ("sys",), ("dev",)})
"""The engine mounts its own there; a folder of the machine may be full of what must not be read."""


def entries(layers: Sequence[Path]) -> Iterator[tuple[_Place, Path, os.stat_result]]:
    """What ``layers`` (bottom first) show, folders before what is in them. Blocking."""
    waiting: list[tuple[_Place, list[Path]]] = [((), list(reversed(layers)))]
    while waiting:
        place, folders = waiting.pop()
        for name, shown in sorted(_shown(folders).items()):
            inner = (*place, name)
            if inner in _LEFT_OUT:
                continue
            info = os.lstat(shown[0])
            yield inner, shown[0], info
            if stat.S_ISDIR(info.st_mode):
                waiting.append((inner, shown))


def _shown(folders: Sequence[Path]) -> dict[str, list[Path]]:
    """By name: the entry that is seen, and for a folder those below it that show through. Topmost first."""
    shown: dict[str, list[Path]] = {}
    ended: set[str] = set()
    for folder in folders:
        for entry in os.scandir(folder):
            if entry.name in ended:
                continue
            info = entry.stat(follow_symlinks=False)
            if not stat.S_ISDIR(info.st_mode):
                ended.add(entry.name)
            if not is_whiteout(info) and (stat.S_ISDIR(info.st_mode) or entry.name not in shown):
                shown.setdefault(entry.name, []).append(Path(entry.path))
        if is_opaque(folder):
            break
    return shown


def write_tar(
    layers: Sequence[Path], out: IO[bytes], *, ids: tuple[int, int], folders: Sequence[str], job: Job
) -> None:
    """``ids`` are user and group of every entry, ``folders`` those that must be there (absolute, without
    links). Blocking; ends soon after the job is stopped."""
    made: set[_Place] = set()
    links: dict[tuple[int, int], str] = {}
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for place, path, info in entries(layers):
            job.check()
            member = _member("/".join(place), path, info, links)
            if member is None:
                continue
            made.add(place)
            member.uid, member.gid = ids
            if member.isreg():
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                with open(fd, "rb") as file:
                    archive.addfile(member, file)
            else:
                archive.addfile(member)
        for folder in folders:
            parts = tuple(folder.strip("/").split("/"))
            for end in range(1, len(parts) + 1):
                if parts[:end] not in made:
                    made.add(parts[:end])
                    member = tarfile.TarInfo("/".join(parts[:end]))
                    member.type, member.mode = tarfile.DIRTYPE, 0o755
                    member.uid, member.gid = ids
                    archive.addfile(member)


def _member(
    name: str, path: Path, info: os.stat_result, links: dict[tuple[int, int], str]
) -> tarfile.TarInfo | None:
    """``links`` are the files met so far that have several names."""
    member = tarfile.TarInfo(name)
    member.mode, member.mtime = stat.S_IMODE(info.st_mode) & 0o1777, int(info.st_mtime)
    if stat.S_ISDIR(info.st_mode):
        member.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(info.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, os.readlink(path)
    elif not stat.S_ISREG(info.st_mode):
        return None
    elif info.st_nlink > 1 and (info.st_dev, info.st_ino) in links:
        member.type, member.linkname = tarfile.LNKTYPE, links[info.st_dev, info.st_ino]
    else:
        member.size = info.st_size
        links[info.st_dev, info.st_ino] = name
    return member
