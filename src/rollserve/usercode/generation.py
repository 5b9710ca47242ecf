"""The user's code as it was loaded at one time: the zygote that holds it, and what is known of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rollserve.usercode.base import CodeInfo, Role, Stamp
from rollserve.usercode.zygote_client import ZygoteClient


class Generation:
    """``files`` are the sources loaded from the folder of code, as they were when they were first loaded:
    what a later import finds on the disk is not what the zygote holds."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.zygote: ZygoteClient | None = None
        self.known: dict[tuple[str, Role], CodeInfo] = {}
        self.files: dict[str, Stamp | None] = {}

    @property
    def live(self) -> int:
        """How many host processes there are."""
        return 0 if self.zygote is None else len(self.zygote.hosts)

    def learn(self, info: CodeInfo) -> None:
        for path, stamp in info.files.items():
            self.files.setdefault(path, stamp)

    def changed(self) -> list[str]:
        """The files that are no longer what was loaded. Blocking."""
        return [path for path, stamp in list(self.files.items()) if stamp_of(path) != stamp]

    async def close(self) -> None:
        if self.zygote is not None:
            await self.zygote.close()


def stamp_of(path: str) -> Stamp | None:
    """What changes with the file: time, size, inode; None where it is not there. Blocking."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def loaded_from(folder: str) -> dict[str, Stamp | None]:
    """Inside a host: every source below ``folder`` that is imported, installed packages aside."""
    if not folder:
        return {}
    inside = Path(folder).parts
    sources = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return {
        path: stamp_of(path)
        for path in sorted(source for source in sources if source)
        if Path(path).parts[: len(inside)] == inside and "-packages" not in path
    }
