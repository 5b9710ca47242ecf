"""What a host prints: read from its pipe line by line into the attempt's log, bounded.

Past the bound the pipe is still emptied, so that the user's code does not block, but at a bounded
rate: code that prints without end slows itself down and not the worker.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque

from rollserve.usercode.base import LogLine

LINE_CHARS = 4096
TAIL_LINES = 20
TAIL_CHARS = 4000
_READ_BYTES = 65536
_DRAIN_EVERY_S = 0.01
_LAST_READS = 16


class BoundedLog:
    """Passes lines on until ``limit_chars`` have been written, then says so once."""

    def __init__(self, write: LogLine, limit_chars: int) -> None:
        self._write = write
        self._left = limit_chars
        self.full = False

    def line(self, text: str) -> None:
        if self.full:
            return
        text = text[:LINE_CHARS]
        self._left -= len(text) + 1
        if self._left < 0:
            self.full = True
            text = "[the log's bound is reached: what follows is dropped]"
        self._write(text)


class Output:
    """Owns the read end ``fd`` of a host's output pipe (non-blocking)."""

    def __init__(self, fd: int, log: BoundedLog) -> None:
        self._fd = fd
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._partial = b""
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._loop.add_reader(fd, self._readable)

    @property
    def tail(self) -> str:
        """The last lines, for the report of a crash."""
        return "\n".join(self._tail)[-TAIL_CHARS:]

    def close(self) -> None:
        """Take what is still in the pipe (a bounded amount) and close it."""
        for _ in range(_LAST_READS):
            if self._closed or not self._take():
                break
        self._end()

    def _readable(self) -> None:
        self._take()
        if self._log.full and not self._closed:
            self._loop.remove_reader(self._fd)
            self._timer = self._loop.call_later(_DRAIN_EVERY_S, self._drain)

    def _drain(self) -> None:
        self._take()
        if not self._closed:
            self._timer = self._loop.call_later(_DRAIN_EVERY_S, self._drain)

    def _take(self) -> bool:
        """Read once; False when there was nothing."""
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._end()
            return False
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > LINE_CHARS * 4:
            lines.append(self._partial)
            self._partial = b""
        for line in lines[-TAIL_LINES:] if self._log.full else lines:
            self._line(line)
        return True

    def _line(self, line: bytes) -> None:
        text = line[: LINE_CHARS * 4].decode(errors="backslashreplace")
        self._tail.append(text[:LINE_CHARS])
        self._log.line(text)

    def _end(self) -> None:
        if self._closed:
            return
        if self._partial:
            self._line(self._partial)
            self._partial = b""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
