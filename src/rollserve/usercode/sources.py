"""The sources in the folder of user code: what runs is compiled from the bytes that were hashed.

Python trusts a cached ``.pyc`` whose source has the same second and size. A file that is edited twice in a
second would run as it was, under the hash of what it is: in the folder no such cache is read or written.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
)
from types import CodeType
from typing import NamedTuple

from rollserve.usercode.base import Stamp

GRAIN_NS = 20_000_000
"""More than a file's clock takes from one tick to the next: within one, two edits have the same time."""

WAITS = 5
"""For a file that is being written; one that never rests is read as it is."""


class Source(NamedTuple):
    """One reading of a file; ``digest`` is ``sha256:<hex>`` of its bytes."""

    stamp: Stamp
    digest: str


class Sources:
    """Of one zygote and the hosts forked from it. ``read`` holds the last reading of each file that was
    imported from ``folder`` (absolute; empty: there is none), installed packages aside."""

    def __init__(self, folder: str) -> None:
        self.read: dict[str, Source] = {}
        self._folder = folder
        self._inside = os.path.join(folder, "")
        self._hook = FileFinder.path_hook(
            (ExtensionFileLoader, EXTENSION_SUFFIXES), (_loader_into(self), SOURCE_SUFFIXES)
        )

    def install(self) -> None:
        """Put the folder on this process's import path."""
        if not self._folder:
            return
        sys.path.insert(0, self._folder)
        sys.path_hooks.insert(0, self._find)
        for path in [path for path in sys.path_importer_cache if self._owns(path)]:
            del sys.path_importer_cache[path]

    def files(self) -> dict[str, Stamp | None]:
        """Every file of the folder that is imported, as it was when it was read; what other means than
        Python's import path have loaded, as it is now."""
        modules = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
        others = {path for path in modules if path and path not in self.read and self._owns(path)}
        found = {path: stamp_of(path) for path in others}
        return {**found, **{path: source.stamp for path, source in self.read.items()}}

    def digest(self, path: str) -> str:
        """``sha256:<hex>`` of what was imported from ``path``; of what is there now, where an installed
        package was."""
        if (source := self.read.get(path)) is not None:
            return source.digest
        with open(path, "rb") as file:
            return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"

    def _find(self, path: str) -> FileFinder:
        """A hook of ``sys.path_hooks``. Raises ``ImportError`` for what the next one shall have."""
        if not self._owns(path):
            raise ImportError(f"not in the folder of code: {path}", path=path)
        finder = self._hook(path)
        assert isinstance(finder, FileFinder)
        return finder

    def _owns(self, path: str) -> bool:
        if not self._folder or "-packages" in path:
            return False
        return path == self._folder or path.startswith(self._inside)


def _loader_into(sources: Sources) -> type[SourceFileLoader]:
    class Loader(SourceFileLoader):
        def get_code(self, fullname: str) -> CodeType | None:
            path = self.get_filename(fullname)
            data, source = _read(path)
            sources.read[path] = source
            code: CodeType = self.source_to_code(data, path)
            return code

    return Loader


def _read(path: str) -> tuple[bytes, Source]:
    """The stamp is taken before the bytes: an edit in between makes it one of the past. Likewise an edit
    right after them, as the file's last tick is over."""
    with open(path, "rb") as file:
        for _ in range(WAITS):
            found = os.fstat(file.fileno())
            if not 0 <= time.time_ns() - found.st_mtime_ns < GRAIN_NS:
                break
            time.sleep(GRAIN_NS / 1e9)
        data = file.read()
    return data, Source(_stamp(found), f"sha256:{hashlib.sha256(data).hexdigest()}")


def stamp_of(path: str) -> Stamp | None:
    """What changes with the file: time, size, inode; None where it is not there. Blocking."""
    try:
        return _stamp(os.stat(path))
    except OSError:
        return None


def _stamp(found: os.stat_result) -> Stamp:
    return found.st_mtime_ns, found.st_size, found.st_ino
