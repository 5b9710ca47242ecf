"""Where a worker process writes what it prints: a file the server keeps small."""

from __future__ import annotations

import os
from pathlib import Path

_TAIL_BYTES = 4096


class LogFile:
    """The worker writes to the file itself, so its last words survive the server. The server cuts it:
    over ``max_bytes`` the content moves to ``<name>.1`` and the file begins anew. Blocking."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self._max_bytes = max_bytes

    def open(self) -> int:
        """A descriptor that appends; the caller closes it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def trim(self) -> None:
        size = self.size()
        if size <= self._max_bytes:
            return
        with self.path.open("rb") as current:
            current.seek(-self._max_bytes, os.SEEK_END)
            self.path.with_name(f"{self.path.name}.1").write_bytes(current.read(self._max_bytes))
        os.truncate(self.path, 0)

    def tail(self, since_byte: int) -> str:
        """The last lines written after ``since_byte``."""
        if not self.path.exists():
            return ""
        with self.path.open("rb") as current:
            end = current.seek(0, os.SEEK_END)
            start = max(min(since_byte, end), end - _TAIL_BYTES)
            current.seek(start)
            return current.read(_TAIL_BYTES).decode(errors="backslashreplace").strip()
