"""A console: one more shell of a sandbox, run by a program of its own (``program``)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rollserve.cancelling import uninterrupted
from rollserve.errors import Conflict
from rollserve.sandbox import script
from rollserve.sandbox.base import ConsoleState
from rollserve.sandbox.capture import Capture
from rollserve.sandbox.program import READ, WRITE, Started
from rollserve.sandbox.script import Dialect
from rollserve.sandbox.shell import Outcome, Shell, Wires

START_TIMEOUT_S = 30.0
HELD_OUTPUT_BYTES = 65536
"""Kept of what a command prints between two looks."""


class ShellConsole:
    """Implements ``Console``. ``on_end`` is called once its processes are gone."""

    def __init__(self, started: Started, workdir: str, *, on_end: Callable[[], None]) -> None:
        self._started = started
        self._on_end = on_end
        self._command: asyncio.Task[Outcome] | None = None
        self._capture = Capture(HELD_OUTPUT_BYTES)
        command_w, control_r, output_r, data_w, data_r = started.pipes(
            (script.STDIN_FD, WRITE),
            (script.STDOUT_FD, READ),
            (script.STDERR_FD, READ),
            (script.INPUT_FD, WRITE),
            (script.INPUT_FD, READ),
        )
        self._shell = Shell(
            Wires(
                command_w=command_w,
                data_w=data_w,
                data_r=data_r,
                control_r=control_r,
                output_r=output_r,
                data_fd=script.INPUT_FD,
                workdir=workdir,
                find_supervisor=started.pid,
            )
        )

    async def start(self) -> None:
        await self._shell.start(timeout_s=START_TIMEOUT_S)

    @property
    def running(self) -> bool:
        return self._command is not None and not self._command.done()

    async def begin(self, command: str, *, timeout_s: float, takes_input: bool = False) -> None:
        text = script.command_text(command)

        def line(dialect: Dialect, nonce: bytes, last_code: int) -> bytes:
            return dialect.command(text, nonce=nonce, last_code=last_code, takes_input=takes_input)

        if self._command is None:
            await self._shell.ready()
        if (
            self._command is not None
        ):  # also one that is over and has not been looked at: its output is its own
            raise Conflict("a command is running in this console")
        running = self._shell.run(line, timeout_s=timeout_s, output_limit_bytes=0, watch=self._hear)
        self._command = asyncio.get_running_loop().create_task(running)

    def _hear(self, data: bytes) -> None:
        self._capture.feed(data)

    async def look(self, wait_s: float | None) -> ConsoleState:
        command = self._command
        if command is None:
            return self._state(left_over=self._shell.idle_output())
        try:
            await asyncio.wait({command}, timeout=wait_s)
        except asyncio.CancelledError:
            await uninterrupted(self._give_up(command))
            raise
        if not command.done():
            return self._state(running=True)
        self._command = None
        answer = command.result().answer
        if answer is None:
            return self._state(timed_out=True)
        if answer.payload is not None and not answer.shell_exited:
            self._shell.keep_state(answer.payload)
        return self._state(exit_code=answer.code)

    def _state(
        self,
        *,
        left_over: bytes = b"",
        running: bool = False,
        exit_code: int | None = None,
        timed_out: bool = False,
    ) -> ConsoleState:
        held, self._capture = self._capture, Capture(HELD_OUTPUT_BYTES)
        held.feed(left_over)
        return ConsoleState(
            output=held.text(),
            running=running,
            exit_code=exit_code,
            timed_out=timed_out,
            elided_bytes=held.elided_bytes,
        )

    async def _give_up(self, command: asyncio.Task[Outcome]) -> None:
        command.cancel()
        await asyncio.wait({command})
        self._command = None

    def type(self, data: bytes) -> None:
        self._shell.feed(data)

    def end_input(self) -> None:
        self._shell.end_feed()

    def interrupt(self) -> None:
        self._shell.interrupt()

    async def close(self) -> None:
        self.shut("the console was closed")
        await self._started.kill()
        self._on_end()

    def shut(self, reason: str) -> None:
        """Let go of the pipes; a command that is waited for fails."""
        self._shell.shut(reason)
        if self._command is not None:
            self._command.add_done_callback(_retrieve)


def _retrieve(command: asyncio.Task[Outcome]) -> None:
    """Nobody looks any more at what a shut console ran."""
    if not command.cancelled():
        command.exception()
