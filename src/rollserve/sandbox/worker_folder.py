"""A folder of one living worker, which any later worker can tell from one left over.

``ROOT/<prefix><worker>/lock`` is locked as long as its worker lives; the kernel lets go of it when the
worker ends in any way.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from rollserve.sandbox.locking import holding
from rollserve.sandbox.removal import remove_tree


class WorkerFolder:
    """Blocking. ``mode`` is that of the folder; its parents are made as they come."""

    def __init__(self, root: Path, *, prefix: str = "", mode: int = 0o700) -> None:
        root.mkdir(parents=True, exist_ok=True)
        name = f"{prefix}{uuid4().hex}"
        fresh = root / f".{name}"
        fresh.mkdir()
        fresh.chmod(mode)
        lock = os.open(fresh / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self.path = root / name
        fresh.rename(self.path)  # visible to reapers only once it is locked
        self._finalizer = weakref.finalize(self, _end, self.path, lock, os.getpid())

    def close(self) -> None:
        """Idempotent; done at the latest when this is forgotten, or the process ends."""
        self._finalizer()


def _end(path: Path, lock: int, pid: int) -> None:
    if pid == os.getpid():  # not in a fork of it
        try:
            remove_tree(path)
        finally:
            os.close(lock)  # what could not be removed is the reaper's now


@contextmanager
def left_over(root: Path, *, prefix: str = "") -> Iterator[list[Path]]:
    """The folders whose workers are gone, locked while the caller removes them."""
    locks: list[int] = []
    folders: list[Path] = []
    try:
        for folder in sorted(root.glob(f"{prefix}*")) if root.is_dir() else ():
            lock = _taken(folder)
            if lock is not None:
                locks.append(lock)
                folders.append(folder)
        yield folders
    finally:
        for lock in locks:
            os.close(lock)


def _taken(folder: Path) -> int | None:
    try:
        if folder.stat().st_uid != os.geteuid():
            return None
        lock = os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    return holding(lock)
