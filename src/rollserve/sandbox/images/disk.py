"""Whole trees of the cache: measured and merged."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from rollserve.sandbox.images.layer import ENTRY_BYTES
from rollserve.sandbox.images.stack import is_opaque, is_whiteout
from rollserve.sandbox.removal import remove_tree


def settle(root: Path, *, owner: int | None) -> int:
    """Treat a tree that a program wrote as ``layer`` treats an archive; returns what it takes in bytes. A
    file with several names counts once a name."""
    size = _settle_entry(root, os.lstat(root), owner)
    for path, info in walk(root):
        size += _settle_entry(path, info, owner)
    return size


def _settle_entry(path: Path, info: os.stat_result, owner: int | None) -> int:
    if (stat.S_ISCHR(info.st_mode) or stat.S_ISBLK(info.st_mode)) and not is_whiteout(info):
        path.unlink()
        return 0
    if owner is not None and info.st_uid != owner:
        os.chown(path, owner, owner, follow_symlinks=False)
    wanted = info.st_mode & 0o1777 | 0o700 if stat.S_ISDIR(info.st_mode) else info.st_mode & 0o777 | 0o600
    if wanted != stat.S_IMODE(info.st_mode) and not stat.S_ISLNK(info.st_mode):
        path.chmod(wanted)
    return ENTRY_BYTES + (info.st_size if stat.S_ISREG(info.st_mode) else 0)


def walk(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Every entry below ``root``, a folder before what is in it. No link is followed."""
    waiting = [root]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                info = entry.stat(follow_symlinks=False)
                yield Path(entry.path), info
                if stat.S_ISDIR(info.st_mode):
                    waiting.append(Path(entry.path))


def merge(layers: list[Path], into: Path, *, owner: int | None) -> None:
    """The folder that an overlay of ``layers`` (bottom first) would show, made of hard links to their files.
    ``into`` is fresh and on the same file system."""
    for layer in layers:
        _copy_attributes(os.lstat(layer), into, owner)
        for path, info in walk(layer):
            _merge_entry(path, info, into / path.relative_to(layer), owner)


def _merge_entry(path: Path, info: os.stat_result, place: Path, owner: int | None) -> None:
    there = os.lstat(place) if os.path.lexists(place) else None
    is_folder = stat.S_ISDIR(info.st_mode)
    if there is not None and (not is_folder or not stat.S_ISDIR(there.st_mode) or is_opaque(path)):
        _remove_entry(place, there)
        there = None
    if is_whiteout(info):
        return
    if not is_folder:
        os.link(path, place, follow_symlinks=False)
        return
    if there is None:
        place.mkdir(0o700)
    _copy_attributes(info, place, owner)


def _copy_attributes(info: os.stat_result, folder: Path, owner: int | None) -> None:
    if owner is not None:
        os.chown(folder, owner, owner, follow_symlinks=False)
    folder.chmod(stat.S_IMODE(info.st_mode))


def _remove_entry(place: Path, info: os.stat_result) -> None:
    if stat.S_ISDIR(info.st_mode):
        remove_tree(place)
    else:
        place.unlink()
