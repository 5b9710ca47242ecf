"""A program in a shell-based sandbox, spoken to over pipes that its shell made inside.

Nothing can be handed into a running sandbox, so the pipes come out of it: a pipeline of the shell makes
them (``script.Dialect.program``), and this side opens their free ends through ``/proc/PID/fd``. The
program is a child of the sandbox's supervisor like any command: same limits, same namespaces, same end.
"""

from __future__ import annotations

import asyncio
import os
import signal
import stat
from collections.abc import Callable, Iterable

from rollserve.errors import SandboxError
from rollserve.sandbox import processes, script
from rollserve.sandbox.pipes import PipeFeeder, pending_bytes

READ_BYTES = 65536
KILL_TIMEOUT_S = 10.0
READ, WRITE = os.O_RDONLY, os.O_WRONLY


class Started:
    """The processes of one program: ``mark`` is what its environment says, ``members`` finds all
    processes of the sandbox."""

    def __init__(self, mark: bytes, members: Callable[[], Iterable[int]]) -> None:
        self._entry = f"{script.PROGRAM_MARKER}=".encode() + mark
        self._members = members
        self._pid = 0
        self._ticks: int | None = None

    def find(self, inner_pid: int) -> None:
        """Find the process that calls itself ``inner_pid``; blocking. Raises ``SandboxError``."""
        pids = (pid for pid in self._members() if processes.innermost_pid(pid) == inner_pid)
        pid = next((pid for pid in pids if processes.has_environment(pid, self._entry)), None)
        if pid is None:
            raise SandboxError("the program did not start", operation="sandbox.spawn")
        self._pid, self._ticks = pid, processes.start_ticks(pid)

    def pipes(self, *ends: tuple[int, int]) -> list[int]:
        """Open the other ends of its pipes, each given as (number, flags), and let it go on. Raises
        ``SandboxError``."""
        fds: list[int] = []
        try:
            for number, flags in ends:
                fds.append(open_end(self._pid, number, flags))
            os.write(fds[0], script.PROGRAM_GO)
        except OSError as error:
            for fd in fds:
                os.close(fd)
            raise SandboxError(f"the program can't be reached: {error}", operation="sandbox.spawn") from error
        return fds

    def pid(self) -> int | None:
        """As long as that names the same process."""
        known = self._ticks is not None and processes.start_ticks(self._pid) == self._ticks
        return self._pid if known else None

    def tree(self) -> list[int]:
        pid = self.pid()
        return [] if pid is None else [pid, *processes.descendants(pid, since_ticks=0)]

    def processes(self) -> set[int]:
        """The program, what it started, and what of that was orphaned, as long as it is there."""
        marked = {pid for pid in self._members() if processes.has_environment(pid, self._entry)}
        return marked | set(self.tree())

    async def kill(self) -> None:
        left = await asyncio.to_thread(processes.kill_all, self.processes, within_s=KILL_TIMEOUT_S)
        if left:
            raise SandboxError(f"processes {left} could not be killed", operation="program.kill")


def open_end(pid: int, number: int, flags: int) -> int:
    """What is there is the sandbox's word: it is looked at without opening it, and only a pipe is opened."""
    place = os.open(f"/proc/{pid}/fd/{number}", os.O_PATH | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISFIFO(os.fstat(place).st_mode):
            raise OSError(f"descriptor {number} is no pipe")
        return os.open(f"/proc/self/fd/{place}", flags | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(place)


class ShellProgram:
    """Implements ``Program``. ``on_end`` is called once its processes are gone."""

    def __init__(
        self, started: Started, *, on_errors: Callable[[bytes], None], on_end: Callable[[], None]
    ) -> None:
        self._started = started
        self._on_errors = on_errors
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._readable: asyncio.Future[None] | None = None
        self._gone: str | None = None
        stdin, self._stdout, self._stderr = started.pipes(
            (script.STDIN_FD, WRITE), (script.STDOUT_FD, READ), (script.STDERR_FD, READ)
        )
        self._input = PipeFeeder(stdin, self._loop)
        self._loop.add_reader(self._stderr, self._take_errors)

    async def write(self, data: bytes) -> None:
        self._check()
        self._input.send(data)
        await self._input.drained()
        self._check()
        if self._input.broken:
            raise SandboxError("the program does not read its input any more", operation="program.write")

    def end_input(self) -> None:
        self._input.end()

    async def read(self) -> bytes:
        while True:
            self._check()
            try:
                data = os.read(self._stdout, READ_BYTES)
            except BlockingIOError:
                await self._wait_readable()
                continue
            self._drain_errors()
            return data

    def interrupt(self) -> None:
        for pid in self._started.tree():
            processes.send_signal(pid, signal.SIGINT)

    async def kill(self) -> None:
        self.shut("the program was ended")
        await self._started.kill()
        self._on_end()

    def shut(self, reason: str) -> None:
        """Let go of the pipes; whoever reads or writes hears why."""
        if self._gone is not None:
            return
        self._gone = reason
        self._input.close()
        for fd in (self._stdout, self._stderr):
            self._loop.remove_reader(fd)
            os.close(fd)
        self._wake()

    # -- pipes --------------------------------------------------------------------------------

    async def _wait_readable(self) -> None:
        if self._readable is not None:
            raise RuntimeError("a program is read by one at a time")
        self._readable = self._loop.create_future()
        self._loop.add_reader(self._stdout, self._wake)
        try:
            await self._readable
        finally:
            self._readable = None
            if self._gone is None:
                self._loop.remove_reader(self._stdout)

    def _wake(self) -> None:
        if self._readable is not None and not self._readable.done():
            self._readable.set_result(None)

    def _take_errors(self) -> int:
        try:
            data = os.read(self._stderr, READ_BYTES)
        except BlockingIOError:
            return 0
        if data:
            self._on_errors(data)
        else:
            self._loop.remove_reader(self._stderr)
        return len(data)

    def _drain_errors(self) -> None:
        """What was written to stderr before what was read from stdout is in the pipe by now."""
        left = pending_bytes(self._stderr)
        while left > 0 and (taken := self._take_errors()):
            left -= taken

    def _check(self) -> None:
        if self._gone is not None:
            raise SandboxError(self._gone, operation="program")
