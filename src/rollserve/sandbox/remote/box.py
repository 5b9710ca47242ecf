"""A sandbox elsewhere, over a door: implements ``Sandbox`` by the agent inside (``agent``)."""

from __future__ import annotations

import asyncio
import shlex
import socket
import time
from collections.abc import Callable
from pathlib import PurePosixPath

from rollserve.cancelling import failed, uninterrupted
from rollserve.errors import InvalidInput, SandboxError, TooLarge
from rollserve.sandbox.base import WORKDIR, ExecResult, SandboxSpec, exports
from rollserve.sandbox.capture import Capture
from rollserve.sandbox.remote.agent import AgentText
from rollserve.sandbox.remote.console import RemoteConsole
from rollserve.sandbox.remote.door import Door
from rollserve.sandbox.remote.program import RemoteProgram
from rollserve.sandbox.remote.shell import READ_BYTES, Agent, RemoteShell, Seen, text_of
from rollserve.sandbox.script import quote

SPAWN_TIMEOUT_S = 30.0


class RemoteSandbox:
    """``on_end`` is called once it is gone."""

    def __init__(self, sandbox_id: str, door: Door, spec: SandboxSpec, *, on_end: Callable[[], None]) -> None:
        self._id = sandbox_id
        self._door = door
        self._on_end = on_end
        self._agent = Agent(door, AgentText(sandbox_id, WORKDIR, spec.limits))
        self._shell = RemoteShell(self._agent, "0")
        self._lock = asyncio.Lock()
        self._guests: dict[str, RemoteProgram | RemoteConsole] = {}
        self._count = 0
        self._closing: asyncio.Task[None] | None = None
        self._ttl: asyncio.TimerHandle | None = None

    @property
    def id(self) -> str:
        return self._id

    async def prepare(self, spec: SandboxSpec, *, ttl_s: float) -> None:
        """Lay the agent and the files down, start the shell and the life time; on failure nothing is left."""
        reason = f"its time to live ({ttl_s:g} s) is over"
        self._ttl = asyncio.get_running_loop().call_later(ttl_s, self._begin_close, reason)
        try:
            await self._door.call(self._agent.text.install(), timeout_s=SPAWN_TIMEOUT_S)
            await self._shell.start()
            if spec.env:
                await self.exec(exports(spec.env), timeout_s=SPAWN_TIMEOUT_S)
            for path, data in spec.files.items():
                await self.write_file(path, data)
        except BaseException:
            await uninterrupted(self.close())
            raise

    async def exec(
        self, command: str, *, timeout_s: float = 60.0, output_limit_bytes: int = 65536
    ) -> ExecResult:
        text = text_of(command)
        head, tail = (output_limit_bytes + 1) // 2, output_limit_bytes // 2
        async with self._lock:
            started = time.perf_counter()
            until = time.monotonic() + timeout_s
            number, seen = await self._begin(text, head=head, tail=tail)
            try:
                seen = await self._shell.over(number, head=head, tail=tail, until=until, seen=seen)
            except asyncio.CancelledError:
                await uninterrupted(self._shell.stop(number))
                raise
            if seen.code is None:
                await self._shell.stop(number)
            last = await self._shell.look(number, head=head, tail=tail, trim=False)
            output = await self._shell.whole(number, head=head, tail=tail)
            await self._shell.forget(number)
        capture = Capture(output_limit_bytes)
        capture.feed(output)
        elided = max(0, last.total_bytes - len(output))
        if elided:
            halves = (part.decode(errors="backslashreplace") for part in (output[:head], output[head:]))
            text_out = f"\n[... {elided} bytes elided ...]\n".join(halves)
        else:
            text_out = capture.text()
        return ExecResult(
            output=text_out,
            exit_code=seen.code,
            timed_out=seen.code is None,
            elided_bytes=elided,
            duration_s=time.perf_counter() - started,
        )

    async def _begin(self, text: bytes, *, head: int, tail: int) -> tuple[int, Seen]:
        """A start that is cancelled is waited for, so that it can be stopped."""
        starting = asyncio.ensure_future(self._shell.begin(text, head=head, tail=tail))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            await uninterrupted(self._undo(starting))
            raise

    async def _undo(self, starting: asyncio.Future[tuple[int, Seen]]) -> None:
        await asyncio.wait({starting})
        if not starting.cancelled() and starting.exception() is None:
            await self._shell.stop(starting.result()[0])

    async def run(self, command: str, *, timeout_s: float, on_output: Callable[[bytes], None]) -> int | None:
        text = b"( eval " + quote(text_of(command)) + b" )"
        async with self._lock:
            try:
                return await self._run(text, time.monotonic() + timeout_s, on_output)
            finally:
                await uninterrupted(self._end_others())

    async def _run(self, text: bytes, until: float, on_output: Callable[[bytes], None]) -> int | None:
        number, seen = await self._begin(text, head=0, tail=0)
        heard = 0

        async def hear(total: int) -> None:
            nonlocal heard
            while heard < total and (data := await self._shell.part(number, heard, READ_BYTES)):
                heard += len(data)
                on_output(data)

        try:
            seen = await self._shell.over(
                number, head=0, tail=0, until=until, trim=False, seen=seen, hear=hear
            )
        except asyncio.CancelledError:
            await uninterrupted(self._shell.stop(number))
            raise
        if seen.code is None:
            await self._shell.stop(number)
        return seen.code

    async def _end_others(self) -> None:
        """End all that runs in the sandbox but its shells and what was spawned."""
        if self._closing is None:
            await self._agent.ask("end_all strangers")

    async def spawn(self, command: str, *, on_errors: Callable[[bytes], None]) -> RemoteProgram:
        text = text_of(command)
        self._count += 1
        key = f"p{self._count}.{self._id[-8:]}"
        program = RemoteProgram(self._agent, key, on_errors=on_errors, on_end=lambda: self._forget(key))
        self._guests[key] = program
        try:
            await self._agent.ask(self._agent.text.place_program(key, text))
            async with self._lock:
                await self._line(self._agent.text.program_line(key))
        except BaseException:
            await uninterrupted(program.kill())
            raise
        return program

    async def _line(self, text: bytes) -> None:
        """Run a line of ours in the shell, which leaves what a command left: its exit code."""
        code = self._shell.last_code
        number, seen = await self._begin(text, head=0, tail=0)
        await self._shell.over(number, head=0, tail=0, until=time.monotonic() + SPAWN_TIMEOUT_S, seen=seen)
        self._shell.last_code = code

    async def open_console(self) -> RemoteConsole:
        self._count += 1
        key = f"c{self._count}.{self._id[-8:]}"
        console = RemoteConsole(self._agent, RemoteShell(self._agent, key), on_end=lambda: self._forget(key))
        self._guests[key] = console
        try:
            await console.start()
        except BaseException:
            await uninterrupted(console.close())
            raise
        return console

    def _forget(self, key: str) -> None:
        self._guests.pop(key, None)

    async def listen(self) -> socket.socket:
        raise SandboxError(
            "nothing is served into a sandbox elsewhere; session_address.url is where it reaches its session",
            operation="sandbox.listen",
        )

    async def connect(self, port: int) -> socket.socket:
        raise SandboxError("no port of a sandbox elsewhere is reached", operation="sandbox.connect")

    async def snapshot(self) -> str:
        raise SandboxError("this runtime keeps no snapshots", operation="sandbox.snapshot")

    async def read_file(self, path: str, *, limit_bytes: int = 16 << 20) -> bytes:
        name = _path(path)
        size = f"[ -f {name} ] || {{ echo no such file, or not a regular one; false; }} && wc -c <{name}"
        async with self._lock:
            total = int(await self._file(size, f"cannot read {path}"))
            if total > limit_bytes:
                raise TooLarge(f"{path} holds more than {limit_bytes} bytes", field="path")
            parts = []
            for start in range(0, total, READ_BYTES):
                part = f"tail -c +{start + 1} <{name} | head -c {READ_BYTES}"
                parts.append(await self._file(part, f"cannot read {path}"))
        return b"".join(parts)[: limit_bytes + 1]

    async def write_file(self, path: str, data: bytes) -> None:
        name = _path(path)
        folder = _path(str(PurePosixPath(WORKDIR, path).parent))
        async with self._lock:
            await self._file(f"mkdir -p {folder} && : >{name}", f"cannot write {path}")
            if data:
                try:
                    await self._agent.put(name, data)
                except SandboxError as error:
                    raise SandboxError(
                        f"cannot write {path}: {error.message}", operation="sandbox.file"
                    ) from error

    async def _file(self, script: str, what: str) -> bytes:
        try:
            return await self._agent.ask(script)
        except SandboxError as error:
            raise SandboxError(f"{what}: {error.message}", operation="sandbox.file") from error

    async def close(self) -> None:
        await asyncio.shield(self._begin_close("it was closed"))

    def _begin_close(self, reason: str) -> asyncio.Task[None]:
        if self._closing is None or failed(self._closing):
            if self._ttl is not None:
                self._ttl.cancel()
            gone = f"the sandbox is gone: {reason}"
            self._agent.gone = self._agent.gone or gone
            for guest in self._guests.values():
                guest.shut(gone)
            self._closing = asyncio.get_running_loop().create_task(self._end())
        return self._closing

    async def _end(self) -> None:
        await self._door.stop()
        self._on_end()


def _path(path: str) -> str:
    if not path or "\0" in path:
        raise InvalidInput(f"{path!r} is not a path", field="path")
    return shlex.quote(str(PurePosixPath(WORKDIR, path)))
