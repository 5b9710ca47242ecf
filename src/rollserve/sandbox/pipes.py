"""Pipes on the event loop without threads: a feeder that never blocks, and how much lies in a pipe."""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
import termios
from collections import deque


class PipeFeeder:
    """Writes buffers into the write end of a pipe as fast as the reader takes them.

    A reader that has gone away is not an error here: its death is noticed, and reported, by whoever
    waits for its answer.
    """

    def __init__(self, fd: int, loop: asyncio.AbstractEventLoop) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._loop = loop
        self._queue: deque[memoryview] = deque()
        self._waiting = False
        self._ending = False
        self._drained: asyncio.Future[None] | None = None
        self.closed = False
        self.broken = False

    def send(self, *buffers: bytes) -> None:
        if self.closed:
            return
        self._queue.extend(memoryview(buffer) for buffer in buffers if buffer)
        if not self._waiting:
            self._flush()

    async def drained(self) -> None:
        """Wait until all of it was taken, or nobody is left to take it (``broken``)."""
        while self._queue and not self.closed:
            if self._drained is None:
                self._drained = self._loop.create_future()
            await asyncio.shield(self._drained)

    def end(self) -> None:
        """Close the pipe once all of it was taken: its reader sees the end."""
        self._ending = True
        if not self._queue:
            self.close()

    def clear(self) -> None:
        """Forget what was not written yet."""
        self._queue.clear()
        self._stop_waiting()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.clear()
            os.close(self._fd)

    def _flush(self) -> None:
        while self._queue:
            view = self._queue[0]
            try:
                written = os.write(self._fd, view)
            except BlockingIOError:
                if not self._waiting:
                    self._waiting = True
                    self._loop.add_writer(self._fd, self._flush)
                return
            except OSError:
                self._queue.clear()
                self.broken = True
                break
            if written == len(view):
                self._queue.popleft()
            else:
                self._queue[0] = view[written:]
        self._stop_waiting()

    def _stop_waiting(self) -> None:
        if self._waiting:
            self._waiting = False
            self._loop.remove_writer(self._fd)
        if self._drained is not None:
            if not self._drained.done():
                self._drained.set_result(None)
            self._drained = None
        if self._ending:
            self.close()


def reopened(fd: int) -> int:
    """A fresh write end of the pipe of which ``fd`` is a read end."""
    return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def renumber(fd: int, *, lowest: int, avoid: frozenset[int]) -> int:
    """Move a descriptor to a number of at least ``lowest`` that is not in ``avoid``."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)
    os.close(fd)
    if moved in avoid:
        return renumber(moved, lowest=max(avoid) + 1, avoid=avoid)
    return moved


def pending_bytes(fd: int) -> int:
    """How many bytes can be read from the pipe right now."""
    raw = fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0")
    return int(struct.unpack("i", raw)[0])


def discard_pending(fd: int) -> None:
    """Read away what lies in a pipe that nobody else reads at the moment."""
    os.set_blocking(fd, False)
    try:
        while pending_bytes(fd) > 0:
            os.read(fd, 65536)
    finally:
        os.set_blocking(fd, True)
