"""From an image to the arguments that lay its root file system out for bubblewrap.

``host`` is ``/usr`` and ``/etc`` of this machine under private overlays; an absolute path is a folder
that holds a root file system.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from rollserve.errors import InvalidInput

HOST = "host"
_HOST_ENTRIES = ("usr", "etc", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_OWN_MOUNTS = frozenset({"proc", "dev", "sys", "tmp", "run", "workspace", "lost+found"})
ROOT_BYTES = 64 << 20


def check(image: str, *, uid: int) -> None:
    """Raise ``InvalidInput`` when ``uid`` can't start a sandbox from ``image``."""
    if image == HOST:
        return
    root = Path(image)
    if not root.is_absolute():
        raise InvalidInput(
            f"no image {image!r}", field="image", hint="'host', or the absolute path of a root file system"
        )
    if not root.is_dir():
        raise InvalidInput(f"{image} is not a folder", field="image")
    if not any(os.path.lexists(root / shell) for shell in ("bin/sh", "usr/bin/sh")):
        raise InvalidInput(f"{image} holds no /bin/sh", field="image")
    barred = first_barred(root, uid=uid)
    if barred is not None:
        raise InvalidInput(
            f"{image} can't be entered by user {uid}", field="image", hint=f"chmod o+x {barred}"
        )


def first_barred(path: Path, *, uid: int) -> Path | None:
    """The first folder on the way to ``path`` that user ``uid`` (in no group) can't pass."""
    for folder in (*reversed(path.resolve().parents), path.resolve()):
        info = folder.stat()
        bit = stat.S_IXUSR if info.st_uid == uid else stat.S_IXOTH
        if not info.st_mode & bit and uid != 0 and uid != os.geteuid():
            return folder
    return None


def layout(image: str, *, uid: int, overlays: bool) -> list[str]:
    """Arguments that mount the image at ``/`` with private writes."""
    root = Path("/" if image == HOST else image)
    if image != HOST and overlays and root.stat().st_uid == uid:
        return ["--overlay-src", str(root), "--tmp-overlay", "/"]
    names = _HOST_ENTRIES if image == HOST else tuple(sorted(os.listdir(root)))
    arguments = ["--size", str(ROOT_BYTES), "--tmpfs", "/"]
    for name in names:
        arguments += _entry(root / name, f"/{name}", overlays=overlays)
    return arguments


def _entry(source: Path, place: str, *, overlays: bool) -> list[str]:
    """One top-level entry: a root folder that another user owns can't be an overlay's top, since the
    sandbox's own mount points could not be made in it."""
    if source.name in _OWN_MOUNTS:
        return []
    if source.is_symlink():
        return ["--symlink", os.readlink(source), place]
    if source.is_dir():
        if overlays:
            return ["--overlay-src", str(source), "--tmp-overlay", place]
        return ["--ro-bind", str(source), place]
    return ["--ro-bind", str(source), place] if source.is_file() else []


def masks(folder: Path) -> list[str]:
    """Arguments that hide what this process can read below ``folder`` and others can't.

    For a sandbox that runs as the user of this process: file permissions alone would let it read, say,
    ``/etc/shadow`` when that user is root.
    """
    arguments: list[str] = []
    for path, info in _private(folder):
        if stat.S_ISDIR(info.st_mode):
            arguments += ["--perms", "0000", "--tmpfs", str(path)]
        else:
            arguments += ["--ro-bind", "/dev/null", str(path)]
    return arguments


def _private(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for entry in sorted(folder.iterdir()):
        info = entry.lstat()
        if stat.S_ISLNK(info.st_mode):
            continue
        wanted = 0o005 if stat.S_ISDIR(info.st_mode) else 0o004
        if info.st_mode & wanted != wanted:
            if os.access(entry, os.R_OK) or info.st_uid == os.geteuid():
                yield entry, info
        elif stat.S_ISDIR(info.st_mode):
            yield from _private(entry)
