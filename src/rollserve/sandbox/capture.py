"""Bounded capture of a command's output: the head and the tail are kept, the middle is counted.

Memory stays within about twice the limit however much a command prints.
"""

from __future__ import annotations

from collections.abc import Callable


class Capture:
    """Collects bytes; ``text()`` is at most ``limit_bytes`` of them plus a note of what was elided."""

    def __init__(self, limit_bytes: int) -> None:
        self._head_limit = (limit_bytes + 1) // 2
        self._tail_limit = limit_bytes - self._head_limit
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped_bytes = 0

    def feed(self, data: bytes) -> None:
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if not data:
            return
        self._tail += data
        if len(self._tail) > 2 * self._tail_limit:
            self._trim()

    @property
    def elided_bytes(self) -> int:
        return self._dropped_bytes + max(0, len(self._tail) - self._tail_limit)

    def raw(self) -> bytes:
        """Head and tail without a note; meaningful when nothing was elided."""
        self._trim()
        return bytes(self._head + self._tail)

    def text(self) -> str:
        self._trim()
        head = self._head.decode("utf-8", "backslashreplace")
        if not self._dropped_bytes:
            return bytes(self._head + self._tail).decode("utf-8", "backslashreplace")
        tail = self._tail.decode("utf-8", "backslashreplace")
        return f"{head}\n[... {self._dropped_bytes} bytes elided ...]\n{tail}"

    def _trim(self) -> None:
        excess = len(self._tail) - self._tail_limit
        if excess > 0:
            del self._tail[:excess]
            self._dropped_bytes += excess


class Watched(Capture):
    """Hands on what a command prints, and keeps none of it."""

    def __init__(self, hand_on: Callable[[bytes], None]) -> None:
        super().__init__(0)
        self._hand_on = hand_on

    def feed(self, data: bytes) -> None:
        self._hand_on(data)
