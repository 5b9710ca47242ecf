"""A console: one more shell of a sandbox, run by a program of its own (``program``)."""

from __future__ import annotations

from collections.abc import Callable

from rollserve.sandbox import script
from rollserve.sandbox.base import ConsoleState
from rollserve.sandbox.foreground import Foreground
from rollserve.sandbox.program import READ, WRITE, Started
from rollserve.sandbox.script import Dialect
from rollserve.sandbox.shell import Outcome, Shell
from rollserve.sandbox.wires import Wires

START_TIMEOUT_S = 30.0


class ShellConsole:
    """Implements ``Console``. ``on_end`` is called once its processes are gone."""

    def __init__(self, started: Started, workdir: str, *, on_end: Callable[[], None]) -> None:
        self._started = started
        self._on_end = on_end
        self._foreground: Foreground[Outcome] = Foreground()
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
        return self._foreground.running

    async def begin(self, command: str, *, timeout_s: float, takes_input: bool = False) -> None:
        text = script.command_text(command)

        def line(dialect: Dialect, nonce: bytes, last_code: int) -> bytes:
            return dialect.command(text, nonce=nonce, last_code=last_code, takes_input=takes_input)

        if self._foreground.empty:
            await self._shell.ready()
        self._foreground.check_empty()
        self._foreground.begin(
            self._shell.run(line, timeout_s=timeout_s, output_limit_bytes=0, watch=self._foreground.hear)
        )

    async def look(self, wait_s: float | None) -> ConsoleState:
        foreground = self._foreground
        if foreground.empty:
            return foreground.state(left_over=self._shell.idle_output())
        ended = await foreground.wait(wait_s)
        if ended is None:
            return foreground.state(running=True)
        answer = foreground.take(ended).answer
        if answer is None:
            return foreground.state(timed_out=True)
        if answer.payload is not None and not answer.shell_exited:
            self._shell.keep_state(answer.payload)
        return foreground.state(exit_code=answer.code)

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
        self._foreground.leave()
