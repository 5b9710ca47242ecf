"""The lines an attempt leaves behind, bounded."""

from __future__ import annotations

from typing import Protocol

from rollserve.errors import RollserveError
from rollserve.rollouts.worker_ports import Bounds


class Lines:
    """The last ``most`` lines, in memory."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.kept: list[str] = []

    def append_log(self, line: str) -> None:
        self.kept.append(line)
        del self.kept[: -self._most]


class TakesLines(Protocol):
    def append_log(self, line: str) -> None: ...


class AttemptLog:
    """Writes lines to the attempt's segment. A disk that is full, or a segment that is closed
    already, must not fail an attempt for the sake of a line: ``trouble`` remembers it instead."""

    def __init__(self, segment: TakesLines, bounds: Bounds) -> None:
        self._segment = segment
        self._line_chars = bounds.line_chars
        self._left = bounds.log_bytes
        self.trouble: list[str] = []

    def __call__(self, line: str) -> None:
        if self._left <= 0:
            return
        if len(line) > self._line_chars:
            line = f"{line[: self._line_chars]} [… {len(line) - self._line_chars} characters cut]"
        self._left -= len(line) + 1
        if self._left <= 0:
            line = "[the log is over its limit; later lines are not kept]"
        try:
            self._segment.append_log(line)
        except (OSError, UnicodeError, RollserveError) as error:
            self._left = 0
            self.trouble.append(f"log: {error}")
