"""The sandbox that the shell-based runtimes share: commands, files and life time over one ``Shell``."""

from __future__ import annotations

import asyncio
import tarfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import PurePosixPath

from rollserve.errors import InvalidInput, SandboxError, TooLarge
from rollserve.sandbox.base import ExecResult
from rollserve.sandbox.pipes import uninterrupted
from rollserve.sandbox.script import Dialect
from rollserve.sandbox.shell import Launch, Outcome, Shell

FILE_TIMEOUT_S = 120.0
START_TIMEOUT_S = 30.0
_TAR_FROM_FILES = 4
_MESSAGE_BYTES = 2000


class ShellSandbox:
    """Implements ``Sandbox``. ``stop`` ends every process of it and removes its remains, or raises."""

    def __init__(
        self,
        sandbox_id: str,
        launch: Launch,
        *,
        stop: Callable[[Shell], Awaitable[None]],
        locate: Callable[[str], str],
    ) -> None:
        self._id = sandbox_id
        self._stop = stop
        self._locate = locate
        self._lock = asyncio.Lock()
        self._closing: asyncio.Task[None] | None = None
        self._ttl: asyncio.TimerHandle | None = None
        self._shell = Shell(launch)

    @property
    def id(self) -> str:
        return self._id

    async def prepare(self, files: dict[str, bytes], *, ttl_s: float) -> None:
        """Wait for the shell, lay the files down, start the life time; on failure nothing is left."""
        loop = asyncio.get_running_loop()
        self._ttl = loop.call_later(ttl_s, self._begin_close, f"its time to live ({ttl_s:g} s) is over")
        try:
            await self._shell.start(timeout_s=START_TIMEOUT_S)
            await self._lay_down(files)
        except BaseException:
            await uninterrupted(self.close())
            raise

    async def exec(
        self, command: str, *, timeout_s: float = 60.0, output_limit_bytes: int = 65536
    ) -> ExecResult:
        text = command.encode("utf-8", "surrogateescape")
        if b"\0" in text:
            raise InvalidInput("a command can't hold a NUL byte", field="command")

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
        if self._closing is None or _failed(self._closing):
            if self._ttl is not None:
                self._ttl.cancel()
            self._shell.shut(f"the sandbox is gone: {reason}")
            self._closing = asyncio.get_running_loop().create_task(self._end())
        return self._closing

    async def _end(self) -> None:
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


def _failed(task: asyncio.Task[None]) -> bool:
    """A close that failed is tried again by the next."""
    return task.done() and (task.cancelled() or task.exception() is not None)


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
