"""One persistent shell in a sandbox, over pipes: about 0.1 ms a command, no thread, no polling.

A supervisor (``script.supervisor``) keeps the shell; the shell answers each command on a control pipe
with its exit code, working directory and exported environment. When a command must be stopped
(time-out, cancel), the shell and what the command started are killed as a whole, so that nothing that
followed in the same command line runs; the next shell gets the directory, exported environment and
functions that the last finished command left. Background jobs of earlier commands live on. A command
that ends the shell (``exit 3``) is handled the same way.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollserve.cancelling import uninterrupted
from rollserve.errors import SandboxError
from rollserve.sandbox import processes, script
from rollserve.sandbox.answers import Answer, ControlBuffer
from rollserve.sandbox.capture import Capture, Watched
from rollserve.sandbox.pipes import PipeFeeder, discard_pending, pending_bytes, reopened
from rollserve.sandbox.wires import Wires

READ_BYTES = 65536
STATE_LIMIT_BYTES = 1 << 20
IDLE_OUTPUT_BYTES = 16384
UNTHROTTLED_BYTES = 4 << 20
THROTTLE_PAUSE_S = 0.001
IDLE_PAUSE_S = 0.01
RESTART_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Outcome:
    """What became of one line: its answer (``None`` when it was killed at its time-out)."""

    answer: Answer | None
    output: Capture


class Shell:
    """``run`` one line at a time; the caller serialises."""

    def __init__(self, wires: Wires) -> None:
        self._loop = asyncio.get_running_loop()
        self._key = secrets.token_hex(8).encode()
        self._buffer = ControlBuffer()
        self._waiter: asyncio.Future[Answer] | None = None
        self._alive = False
        self._gone: str | None = None
        self._released = False
        self._cwd = wires.workdir.encode()
        self._state = b""
        self._last_code = 0
        self._shell_pid = 0
        self._find_supervisor = wires.find_supervisor
        self._supervisor: tuple[int, int | None] | None = None
        self._started_ticks = 0
        self._paused: asyncio.TimerHandle | None = None
        self._taken_bytes = 0
        self._idle = Capture(IDLE_OUTPUT_BYTES)
        self._capture = self._idle
        self._process = wires.process
        self._data_fd, self._data_r = wires.data_fd, wires.data_r
        self._control_r, self._output_r = wires.control_r, wires.output_r
        self._commands = PipeFeeder(wires.command_w, self._loop)
        self._data = PipeFeeder(wires.data_w, self._loop)
        for fd in (self._control_r, self._output_r):
            os.set_blocking(fd, False)
        self._loop.add_reader(self._control_r, self._on_control)
        self._loop.add_reader(self._output_r, self._on_output)
        self._commands.send(self._key + b"\n")

    # -- life ---------------------------------------------------------------------------------

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """What was started for the outermost shell of a sandbox."""
        assert self._process is not None
        return self._process

    async def start(self, *, timeout_s: float) -> None:
        """Start (or restart) the shell under the supervisor; returns when it takes commands."""
        if self._gone:
            raise SandboxError(self._gone, operation="sandbox.exec")
        discard_pending(self._data_r)
        nonce = secrets.token_hex(8).encode()
        line = script.init(nonce=nonce, data_fd=self._data_fd, cwd=self._cwd, restore=self._state)
        waiter = self._expect(nonce)
        self._commands.send(b"\n" + self._key + b"\n" + line)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await waiter
        except TimeoutError:
            self._gone = f"no shell within {timeout_s:g} s{self._said()}"
            raise SandboxError(self._gone, operation="sandbox.start") from None
        except SandboxError as error:
            self._gone = f"{error.message}{self._said()}"
            raise SandboxError(self._gone, operation="sandbox.start") from None
        finally:
            self._waiter = None
        if answer.shell_exited:
            self._gone = f"the shell ended at once with code {answer.code}{self._said()}"
            raise SandboxError(self._gone, operation="sandbox.start")
        self._shell_pid = answer.pid
        if self._supervisor is None:
            pid = self._find_supervisor()
            self._supervisor = None if pid is None else (pid, processes.start_ticks(pid))
        self.dialect = script.Dialect(bash=answer.code == script.BASH_READY, data_fd=self._data_fd)
        self._alive = True

    def _said(self) -> str:
        self._drain_output()
        text = self._idle.text().strip()
        return f": {text[-500:]}" if text else ""

    def shut(self, reason: str) -> None:
        """Fail what waits and let go of the pipes; stopping the processes is the owner's part."""
        if self._released:
            return
        self._released = True
        self._alive = False
        self._gone = self._gone or reason
        self._fail(self._gone)
        self._commands.close()
        self._data.close()
        if self._paused is not None:
            self._paused.cancel()
        for fd in (self._control_r, self._output_r):
            self._loop.remove_reader(fd)
            os.close(fd)
        os.close(self._data_r)

    # -- one line -----------------------------------------------------------------------------

    async def ready(self) -> None:
        """Start the shell anew if the last line ended it."""
        if not self._alive:
            await uninterrupted(self.start(timeout_s=RESTART_TIMEOUT_S))

    async def run(
        self,
        line: Callable[[script.Dialect, bytes, int], bytes],
        *,
        timeout_s: float,
        output_limit_bytes: int,
        payload_limit_bytes: int = STATE_LIMIT_BYTES,
        data: Sequence[bytes] = (),
        watch: Callable[[bytes], None] | None = None,
    ) -> Outcome:
        """Send the line made by ``line(dialect, nonce, last_code)`` and await its answer. ``watch`` is
        handed what is printed as it comes; none of it is kept then."""
        await self.ready()
        nonce = secrets.token_hex(8).encode()
        capture = self._begin_capture(Capture(output_limit_bytes) if watch is None else Watched(watch))
        waiter = self._expect(nonce, payload_limit_bytes)
        self._started_ticks = processes.now_ticks()
        timer = self._loop.call_later(timeout_s, _time_out, waiter)
        self._commands.send(line(self.dialect, nonce, self._last_code))
        if data:
            self.feed(*data)
        try:
            answer = await waiter
        except TimeoutError:
            await uninterrupted(self._stop_command())
            return Outcome(None, capture)
        except asyncio.CancelledError:
            await uninterrupted(self._stop_command())
            raise
        finally:
            timer.cancel()
            self._waiter = None
            self._drop_data()
            self._drain_output()
            self._capture = self._idle
        self._last_code = answer.code
        return Outcome(answer, capture)

    def feed(self, *data: bytes) -> None:
        """For the data pipe, which the running line may read."""
        if self._data.closed and not self._released:
            self._data = PipeFeeder(reopened(self._data_r), self._loop)
        self._data.send(*data)

    def end_feed(self) -> None:
        """The data pipe ends for its reader once it has taken all; a later ``feed`` opens it again."""
        self._data.end()

    def interrupt(self) -> None:
        """What Ctrl-C does: SIGINT to the running command and its shell, which ends with it if it dies of
        it. The shell first: one that had none when its program died of one goes on with the line."""
        pid = self._find_shell()
        if pid is not None:
            for each in (pid, *processes.descendants(pid, since_ticks=self._started_ticks)):
                processes.send_signal(each, signal.SIGINT)

    def idle_output(self) -> bytes:
        """What background jobs wrote since the last line ended; it is told once."""
        self._drain_output()
        left_over, self._idle = self._idle.raw(), Capture(IDLE_OUTPUT_BYTES)
        self._capture = self._idle
        return left_over

    def keep_state(self, payload: bytes) -> None:
        """Remember what a command's answer says about directory, environment and functions."""
        cwd, separator, state = payload.partition(b"\0")
        if separator:
            self._cwd, self._state = cwd or self._cwd, state

    def _drop_data(self) -> None:
        """What a failed write left in the data pipe: nobody else reads it by now."""
        self._data.clear()
        if not self._released:
            discard_pending(self._data_r)

    def _begin_capture(self, capture: Capture) -> Capture:
        """What background jobs wrote since the last command comes first, as on a terminal."""
        left_over = self.idle_output()
        if left_over:
            capture.feed(left_over)
        self._capture = capture
        self._taken_bytes = 0
        self._resume_output()
        return capture

    async def _stop_command(self) -> None:
        """Kill the running command with its shell; returns when both are gone and the supervisor knows."""
        self._commands.clear()
        self._data.clear()
        if not self._alive or self._gone:
            return
        if not processes.supported():
            self._gone = "a command had to be stopped, which takes the sandbox with it on this system"
            return
        waiter = self._expect(self._key)
        pid = self._find_shell()
        killed = set() if pid is None else processes.kill_tree(pid, since_ticks=self._started_ticks)
        watch = processes.ProcessWatch(killed)
        try:
            async with asyncio.timeout(RESTART_TIMEOUT_S):
                await waiter
                await watch.gone(timeout_s=RESTART_TIMEOUT_S)
        except TimeoutError:
            self._gone = "the shell could not be killed"
            raise SandboxError(self._gone, operation="sandbox.exec") from None
        finally:
            watch.close()
        self._alive = False
        self._last_code = 0

    def supervisor_pid(self) -> int | None:
        """The supervisor's pid here, as long as that names the same process."""
        if self._supervisor is None:
            return None
        pid, started = self._supervisor
        return pid if processes.start_ticks(pid) == started else None

    def own_pids(self) -> set[int]:
        """Of the supervisor and of the shell, as far as they are there."""
        return {pid for pid in (self.supervisor_pid(), self._find_shell()) if pid is not None}

    def _find_shell(self) -> int | None:
        supervisor = self.supervisor_pid()
        if supervisor is None:
            return None
        found = (pid for pid in processes.children(supervisor) if self._is_shell(pid))
        return next(found, None)

    def _is_shell(self, pid: int) -> bool:
        return processes.innermost_pid(pid) == self._shell_pid

    # -- pipes --------------------------------------------------------------------------------

    def _expect(self, nonce: bytes, payload_limit_bytes: int = STATE_LIMIT_BYTES) -> asyncio.Future[Answer]:
        self._buffer.expect(nonce, key=self._key, payload_limit_bytes=payload_limit_bytes)
        self._waiter = self._loop.create_future()
        if self._gone:
            self._fail(self._gone)
        return self._waiter

    def _fail(self, reason: str) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(SandboxError(reason, operation="sandbox.exec"))

    def _on_control(self) -> None:
        try:
            chunk = os.read(self._control_r, READ_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            self._loop.remove_reader(self._control_r)
            self._alive = False
            self._gone = self._gone or "the sandbox is gone"
            self._fail(self._gone)
            return
        for answer in self._buffer.feed(chunk):
            if answer.shell_exited:
                self._alive = False
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(answer)

    def _on_output(self) -> None:
        """One bounded read per turn of the loop; floods are slowed down rather than chased."""
        if not self._take_output(READ_BYTES):
            return
        idle = self._capture is self._idle
        if idle or self._taken_bytes > UNTHROTTLED_BYTES:
            self._loop.remove_reader(self._output_r)
            pause_s = IDLE_PAUSE_S if idle else THROTTLE_PAUSE_S
            self._paused = self._loop.call_later(pause_s, self._resume_output)

    def _resume_output(self) -> None:
        if self._paused is not None:
            self._paused.cancel()
            self._paused = None
            self._loop.add_reader(self._output_r, self._on_output)

    def _take_output(self, size_bytes: int) -> int:
        try:
            chunk = os.read(self._output_r, size_bytes)
        except BlockingIOError:
            return 0
        if not chunk:
            self._loop.remove_reader(self._output_r)
            return 0
        self._taken_bytes += len(chunk)
        self._capture.feed(chunk)
        return len(chunk)

    def _drain_output(self) -> None:
        """All a finished command wrote is in the pipe by now; take that much and no more."""
        if self._released:
            return
        left = pending_bytes(self._output_r)
        while left > 0:
            taken = self._take_output(min(left, READ_BYTES))
            if not taken:
                return
            left -= taken


def _time_out(waiter: asyncio.Future[Answer]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError())
