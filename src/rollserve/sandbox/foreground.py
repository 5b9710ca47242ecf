"""What a console knows of its command, whichever way its shell is spoken to: that there is one, whether it
has ended, and what it printed since the last look."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from rollserve.cancelling import unheard, uninterrupted
from rollserve.errors import Conflict
from rollserve.sandbox.base import ConsoleState
from rollserve.sandbox.capture import Capture

R = TypeVar("R")

HELD_OUTPUT_BYTES = 65536
"""Kept of what a command prints between two looks."""


class Foreground(Generic[R]):
    """One command at a time, as a task that returns an ``R``. It is there until that was taken, so that its
    output is not told as the next one's."""

    def __init__(self) -> None:
        self._command: asyncio.Task[R] | None = None
        self._capture = Capture(HELD_OUTPUT_BYTES)

    @property
    def empty(self) -> bool:
        return self._command is None

    @property
    def running(self) -> bool:
        return self._command is not None and not self._command.done()

    def check_empty(self) -> None:
        if self._command is not None:
            raise Conflict("a command is running in this console")

    def begin(self, command: Coroutine[Any, Any, R]) -> None:
        self._command = asyncio.get_running_loop().create_task(command)

    def hear(self, data: bytes) -> None:
        self._capture.feed(data)

    async def wait(self, wait_s: float | None) -> asyncio.Task[R] | None:
        """The command once it has ended, to be taken; None when it goes on after ``wait_s``, or there is
        none. Cancelled, it ends the command first."""
        command = self._command
        if command is None:
            return None
        try:
            await asyncio.wait({command}, timeout=wait_s)
        except asyncio.CancelledError:
            await uninterrupted(self._give_up(command))
            raise
        return command if command.done() else None

    async def _give_up(self, command: asyncio.Task[R]) -> None:
        command.cancel()
        await asyncio.wait({command})
        self._command = None

    def take(self, ended: asyncio.Task[R]) -> R:
        """What the command came to. Raises what it raised."""
        self._command = None
        return ended.result()

    def state(
        self,
        *,
        left_over: bytes = b"",
        running: bool = False,
        exit_code: int | None = None,
        timed_out: bool = False,
    ) -> ConsoleState:
        """With what was heard since the last one, and ``left_over`` behind it."""
        held, self._capture = self._capture, Capture(HELD_OUTPUT_BYTES)
        held.feed(left_over)
        return ConsoleState(
            output=held.text(),
            running=running,
            exit_code=exit_code,
            timed_out=timed_out,
            elided_bytes=held.elided_bytes,
        )

    def leave(self, *, cancel: bool = False) -> None:
        """Nobody looks any more at what it comes to."""
        if self._command is not None:
            self._command.add_done_callback(unheard)
            if cancel:
                self._command.cancel()
