"""The sandbox that the shell-based runtimes share: commands, files and life time over one ``Shell``."""

from __future__ import annotations

import asyncio
import secrets
import socket
import tarfile
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import PurePosixPath
from typing import TypeVar

from rollserve.cancelling import failed, uninterrupted
from rollserve.errors import InvalidInput, NotFound, SandboxError, TooLarge
from rollserve.sandbox import processes
from rollserve.sandbox.base import ExecResult, SandboxSpec, exports
from rollserve.sandbox.console import ShellConsole
from rollserve.sandbox.program import ShellProgram, Started
from rollserve.sandbox.script import Dialect, command_text, inner_supervisor, quote
from rollserve.sandbox.shell import Outcome, Shell
from rollserve.sandbox.wires import Wires

G = TypeVar("G", ShellProgram, ShellConsole)

FILE_TIMEOUT_S = 120.0
SPAWN_TIMEOUT_S = 15.0
START_TIMEOUT_S = 30.0
END_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 10.0
LOOPBACK = "127.0.0.1"
_TAR_FROM_FILES = 4
_MESSAGE_BYTES = 2000


class ShellSandbox:
    """Implements ``Sandbox``. ``stop`` ends every process of it and removes its remains, or raises;
    ``members`` finds its processes; ``listen`` opens a socket inside, ``sockets`` makes some there that can
    be connected; ``admit`` bounds what has started before anything else does. Those four block.
    ``snapshot`` keeps its files."""

    def __init__(
        self,
        sandbox_id: str,
        wires: Wires,
        *,
        stop: Callable[[Shell], Awaitable[None]],
        locate: Callable[[str], str],
        members: Callable[[Shell], Iterable[int]],
        listen: Callable[[Shell], socket.socket],
        sockets: Callable[[Shell], list[socket.socket]] | None = None,
        admit: Callable[[Shell], None] | None = None,
        snapshot: Callable[[Shell], Awaitable[str]] | None = None,
    ) -> None:
        self._id = sandbox_id
        self._stop = stop
        self._members = members
        self._open_socket = listen
        self._make_sockets = sockets
        self._unconnected: list[socket.socket] = []
        self._making = asyncio.Lock()
        self._admit = admit
        self._keep = snapshot
        self._sockets: list[socket.socket] = []
        self._locate = locate
        self._lock = asyncio.Lock()
        self._closing: asyncio.Task[None] | None = None
        self._ttl: asyncio.TimerHandle | None = None
        self._workdir = wires.workdir
        self._guests: dict[Started, ShellProgram | ShellConsole] = {}
        self._shell = Shell(wires)

    @property
    def id(self) -> str:
        return self._id

    async def prepare(self, files: dict[str, bytes], *, ttl_s: float) -> None:
        """Wait for the shell, lay the files down, start the life time; on failure nothing is left."""
        self._live_for(ttl_s)
        try:
            await self._start()
            await self._lay_down(files)
        except BaseException:
            await uninterrupted(self.close())
            raise

    async def _start(self) -> None:
        """The shell starts while its processes are admitted; nothing is run in it before both are done."""
        if self._admit is None:
            await self._shell.start(timeout_s=START_TIMEOUT_S)
            return
        admitting = asyncio.ensure_future(asyncio.to_thread(self._admit, self._shell))
        try:
            await self._shell.start(timeout_s=START_TIMEOUT_S)
        finally:
            await uninterrupted(asyncio.wait({admitting}))
            refused = admitting.exception()
        if refused is not None:
            raise refused

    async def adopt(self, spec: SandboxSpec, *, ttl_s: float) -> None:
        """``Spare``: the environment is the shell's from here on, and of all that it starts."""
        self._live_for(ttl_s)
        try:
            if spec.env:
                await self.exec(exports(spec.env), timeout_s=START_TIMEOUT_S)
            await self._lay_down(spec.files)
        except BaseException:
            await uninterrupted(self.close())
            raise

    def _live_for(self, ttl_s: float) -> None:
        if self._ttl is not None:
            self._ttl.cancel()
        if self._closing is not None:
            raise SandboxError("the sandbox is gone", operation="sandbox.start")
        reason = f"its time to live ({ttl_s:g} s) is over"
        self._ttl = asyncio.get_running_loop().call_later(ttl_s, self._begin_close, reason)

    async def exec(
        self, command: str, *, timeout_s: float = 60.0, output_limit_bytes: int = 65536
    ) -> ExecResult:
        text = command_text(command)

        def line(dialect: Dialect, nonce: bytes, last_code: int) -> bytes:
            return dialect.command(text, nonce=nonce, last_code=last_code)

        async with self._lock:
            started = time.perf_counter()
            outcome = await self._shell.run(line, timeout_s=timeout_s, output_limit_bytes=output_limit_bytes)
            answer = outcome.answer
            if answer is not None and answer.payload is not None and not answer.shell_exited:
                self._shell.keep_state(answer.payload)
        return ExecResult(
            output=outcome.output.text(),
            exit_code=None if answer is None else answer.code,
            timed_out=answer is None,
            elided_bytes=outcome.output.elided_bytes,
            duration_s=time.perf_counter() - started,
        )

    async def run(self, command: str, *, timeout_s: float, on_output: Callable[[bytes], None]) -> int | None:
        text = b"( eval " + quote(command_text(command)) + b" )"

        def line(dialect: Dialect, nonce: bytes, last_code: int) -> bytes:
            return dialect.command(text, nonce=nonce, last_code=0)

        async with self._lock:
            try:
                outcome = await self._shell.run(
                    line, timeout_s=timeout_s, output_limit_bytes=0, watch=on_output
                )
            finally:
                if self._closing is None:
                    await uninterrupted(asyncio.to_thread(self._end_others))
        return None if outcome.answer is None else outcome.answer.code

    def _end_others(self) -> None:
        """End all that runs in the sandbox but the shell and its supervisor, where that can be told."""
        if not processes.supported():
            return
        left = processes.kill_all(self._others, within_s=END_TIMEOUT_S)
        if left and self._closing is None:
            raise SandboxError(f"processes {left} could not be killed", operation="sandbox.run")

    def _others(self) -> list[int]:
        """Whoever is no part of the shell or of what was spawned. Members are listed first: what one of
        those starts meanwhile is not taken for a stranger."""
        members = list(self._members(self._shell))
        own = self._shell.own_pids().union(*(started.processes() for started in list(self._guests)))
        return [pid for pid in members if pid not in own]

    async def spawn(self, command: str, *, on_errors: Callable[[bytes], None]) -> ShellProgram:
        def make(started: Started) -> ShellProgram:
            return ShellProgram(started, on_errors=on_errors, on_end=self._forget(started))

        return await self._start_program(command_text(command), make, with_input=False)

    async def open_console(self) -> ShellConsole:
        def make(started: Started) -> ShellConsole:
            return ShellConsole(started, self._workdir, on_end=self._forget(started))

        console = await self._start_program(inner_supervisor(), make, with_input=True)
        try:
            await console.start()
        except BaseException:
            await uninterrupted(console.close())
            raise
        return console

    async def _start_program(self, text: bytes, make: Callable[[Started], G], *, with_input: bool) -> G:
        if not processes.supported():
            raise SandboxError("programs beside the shell need Linux", operation="sandbox.spawn")
        mark = secrets.token_hex(8).encode()

        def line(dialect: Dialect, nonce: bytes, last_code: int) -> bytes:
            return dialect.program(text, mark=mark, nonce=nonce, with_input=with_input)

        async with self._lock:
            started = Started(mark, lambda: self._members(self._shell))
            outcome = await self._shell.run(line, timeout_s=SPAWN_TIMEOUT_S, output_limit_bytes=0)
            answer = outcome.answer
            try:
                await asyncio.to_thread(started.find, 0 if answer is None else answer.pid)
                if self._closing is not None:
                    raise SandboxError("the sandbox is gone", operation="sandbox.spawn")
                guest = self._guests[started] = make(started)
            except BaseException:
                await uninterrupted(started.kill())
                raise
        return guest

    def _forget(self, started: Started) -> Callable[[], None]:
        def forget() -> None:
            self._guests.pop(started, None)

        return forget

    async def listen(self) -> socket.socket:
        opening = asyncio.ensure_future(asyncio.to_thread(self._listen))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_drop_socket)
            raise

    def _listen(self) -> socket.socket:
        sock = self._open_socket(self._shell)
        self._sockets.append(sock)
        if self._closing is not None:
            sock.close()
            raise SandboxError("the sandbox is gone", operation="sandbox.listen")
        return sock

    async def connect(self, port: int) -> socket.socket:
        sock = await self._unconnected_socket()
        sock.setblocking(False)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await asyncio.get_running_loop().sock_connect(sock, (LOOPBACK, port))
        except BaseException as error:
            sock.close()
            if isinstance(error, OSError | OverflowError | TimeoutError):
                raise NotFound(f"nothing answers on port {port} of the sandbox: {error}") from error
            raise
        return sock

    async def _unconnected_socket(self) -> socket.socket:
        """Making one takes as long as making some."""
        if self._make_sockets is None:
            raise SandboxError("this runtime reaches no port of a sandbox", operation="sandbox.connect")
        async with self._making:
            if not self._unconnected and self._closing is None:
                making = asyncio.ensure_future(asyncio.to_thread(self._make_sockets, self._shell))
                try:
                    self._unconnected += await asyncio.shield(making)
                except asyncio.CancelledError:
                    making.add_done_callback(_drop_sockets)
                    raise
            if self._closing is not None:
                raise SandboxError("the sandbox is gone", operation="sandbox.connect")
            return self._unconnected.pop()

    async def snapshot(self) -> str:
        if self._keep is None:
            raise SandboxError("this runtime keeps no sandboxes", operation="sandbox.snapshot")
        async with self._lock:
            if self._closing is not None:
                raise SandboxError("the sandbox is gone", operation="sandbox.snapshot")
            return await self._keep(self._shell)

    async def read_file(self, path: str, *, limit_bytes: int = 16 << 20) -> bytes:
        name = self._path(path)

        def line(dialect: Dialect, nonce: bytes, last_code: int) -> bytes:
            return dialect.read_file(name, nonce=nonce, limit_bytes=limit_bytes + 1)

        async with self._lock:
            outcome = await self._file_run(line, payload_limit_bytes=limit_bytes + 1)
        payload = self._payload(outcome, f"cannot read {path}")
        if len(payload) > limit_bytes:
            raise TooLarge(f"{path} holds more than {limit_bytes} bytes", field="path")
        return payload

    async def write_file(self, path: str, data: bytes) -> None:
        name = self._path(path)

        def line(dialect: Dialect, nonce: bytes, last_code: int) -> bytes:
            return dialect.write_file(name, nonce=nonce, size_bytes=len(data))

        async with self._lock:
            outcome = await self._file_run(line, data=[data])
        self._payload(outcome, f"cannot write {path}")

    async def close(self) -> None:
        await asyncio.shield(self._begin_close("it was closed"))

    def _begin_close(self, reason: str) -> asyncio.Task[None]:
        if self._closing is None or failed(self._closing):
            if self._ttl is not None:
                self._ttl.cancel()
            for shut in (self._shell.shut, *(guest.shut for guest in self._guests.values())):
                shut(f"the sandbox is gone: {reason}")
            self._closing = asyncio.get_running_loop().create_task(self._end())
        return self._closing

    async def _end(self) -> None:
        for sock in self._sockets:
            _shut(sock)
        while self._unconnected:
            self._unconnected.pop().close()
        await self._stop(self._shell)

    # -- files --------------------------------------------------------------------------------

    def _path(self, path: str) -> bytes:
        if not path or "\0" in path:
            raise InvalidInput(f"{path!r} is not a path", field="path")
        return self._locate(path).encode("utf-8", "surrogateescape")

    async def _lay_down(self, files: dict[str, bytes]) -> None:
        if len(files) < _TAR_FROM_FILES:
            for path, data in files.items():
                await self.write_file(path, data)
            return
        parts = _archive({self._locate(path): data for path, data in files.items()})
        size = sum(len(part) for part in parts)

        def line(dialect: Dialect, nonce: bytes, last_code: int) -> bytes:
            return dialect.unpack(nonce=nonce, size_bytes=size)

        async with self._lock:
            outcome = await self._file_run(line, data=parts)
        if outcome.answer is None or outcome.answer.code != 0:  # an image without tar, for one
            for path, data in files.items():
                await self.write_file(path, data)

    async def _file_run(
        self,
        line: Callable[[Dialect, bytes, int], bytes],
        *,
        payload_limit_bytes: int = 4096,
        data: Sequence[bytes] = (),
    ) -> Outcome:
        return await self._shell.run(
            line,
            timeout_s=FILE_TIMEOUT_S,
            output_limit_bytes=_MESSAGE_BYTES,
            payload_limit_bytes=payload_limit_bytes,
            data=data,
        )

    def _payload(self, outcome: Outcome, what: str) -> bytes:
        answer = outcome.answer
        if answer is None:
            raise SandboxError(f"{what}: no answer in {FILE_TIMEOUT_S:g} s", operation="sandbox.file")
        if answer.code != 0 or answer.shell_exited or answer.payload is None:
            raise SandboxError(f"{what}: {outcome.output.text().strip()}", operation="sandbox.file")
        return answer.payload


def _shut(sock: socket.socket) -> None:
    """Nobody gets in any more; whoever asked for the socket closes it."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it is closed


def _drop_socket(opening: asyncio.Task[socket.socket]) -> None:
    """What a cancelled ``listen`` opened all the same."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _drop_sockets(making: asyncio.Task[list[socket.socket]]) -> None:
    if not making.cancelled() and making.exception() is None:
        for sock in making.result():
            sock.close()


def workdir_path(path: str, workdir: str) -> str:
    return str(PurePosixPath(workdir) / path)


def _archive(files: dict[str, bytes]) -> list[bytes]:
    """A tar stream as a list of buffers: the contents are not copied."""
    parts: list[bytes] = []
    for path, data in files.items():
        info = tarfile.TarInfo(path.lstrip("/"))
        info.size, info.mode, info.mtime = len(data), 0o644, time.time()
        parts += [info.tobuf(tarfile.GNU_FORMAT, errors="surrogateescape"), data]
        parts.append(bytes(-len(data) % tarfile.BLOCKSIZE))
    parts.append(bytes(tarfile.RECORDSIZE))
    return parts
