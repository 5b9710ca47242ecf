"""What can be an image without being in the cache: ``host``, which is ``/usr`` and ``/etc`` of this machine,
and a folder that holds a root file system; and what of the host a sandbox may not see.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from rollserve.errors import InvalidInput

HOST = "host"
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
