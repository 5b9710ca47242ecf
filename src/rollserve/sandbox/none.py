"""Runtime ``none``: for tasks that only talk. No process is started; files are a dictionary."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import NoReturn
from uuid import uuid4

from rollserve.errors import InvalidInput, SandboxError, TooLarge
from rollserve.sandbox.base import WORKDIR, Console, ExecResult, Program, RuntimeReport, SandboxSpec


class NoneSandbox:
    """Holds files, runs nothing."""

    def __init__(self, files: dict[str, bytes], *, ttl_s: float) -> None:
        self._id = f"none-{uuid4().hex}"
        self._files = {_absolute(path): data for path, data in files.items()}
        self._open = True
        self._ttl = asyncio.get_running_loop().call_later(ttl_s, self._end)

    @property
    def id(self) -> str:
        return self._id

    @property
    def is_open(self) -> bool:
        return self._open

    async def exec(
        self, command: str, *, timeout_s: float = 60.0, output_limit_bytes: int = 65536
    ) -> ExecResult:
        self._refuse("sandbox.exec")

    async def run(self, command: str, *, timeout_s: float, on_output: Callable[[bytes], None]) -> int | None:
        self._refuse("sandbox.run")

    async def spawn(self, command: str, *, on_errors: Callable[[bytes], None]) -> Program:
        self._refuse("sandbox.spawn")

    async def open_console(self) -> Console:
        self._refuse("sandbox.spawn")

    async def listen(self) -> socket.socket:
        self._refuse("sandbox.listen")

    async def connect(self, port: int) -> socket.socket:
        self._refuse("sandbox.connect")

    async def snapshot(self) -> str:
        self._refuse("sandbox.snapshot")

    async def read_file(self, path: str, *, limit_bytes: int = 16 << 20) -> bytes:
        self._check_open()
        data = self._files.get(_absolute(path))
        if data is None:
            raise SandboxError(f"cannot read {path}: no such file", operation="sandbox.file")
        if len(data) > limit_bytes:
            raise TooLarge(f"{path} holds more than {limit_bytes} bytes", field="path")
        return data

    async def write_file(self, path: str, data: bytes) -> None:
        self._check_open()
        self._files[_absolute(path)] = bytes(data)

    async def close(self) -> None:
        self._end()

    def _end(self) -> None:
        self._open = False
        self._ttl.cancel()
        self._files.clear()

    def _check_open(self) -> None:
        if not self._open:
            raise SandboxError("the sandbox is gone: it was closed", operation="sandbox.file")

    def _refuse(self, operation: str) -> NoReturn:
        raise SandboxError(
            "this task has no sandbox to run commands in",
            operation=operation,
            hint="set the task's runtime to bubblewrap",
        )


class NoneRuntime:
    """Always usable. Nothing runs, so there is nothing to isolate or to leave behind."""

    name = "none"

    def __init__(self, *, data_dir: Path | None = None) -> None:
        self._sandboxes: list[NoneSandbox] = []

    def report(self) -> RuntimeReport:
        return RuntimeReport(
            name=self.name, usable=True, isolated=True, detail="runs no commands; files in memory"
        )

    def check_image(self, image: str) -> None:
        if image not in ("host", "none", ""):
            raise InvalidInput("the runtime none takes no image", field="image")

    async def create(self, spec: SandboxSpec, *, owner: str, ttl_s: float) -> NoneSandbox:
        self.check_image(spec.image)
        if spec.snapshot:
            raise InvalidInput("the runtime none has no snapshots", field="snapshot")
        if spec.prepare:
            raise InvalidInput("the runtime none prepares no images", field="prepare")
        sandbox = NoneSandbox(spec.files, ttl_s=ttl_s)
        self._sandboxes = [known for known in self._sandboxes if known.is_open]
        self._sandboxes.append(sandbox)
        return sandbox

    async def reap(self) -> int:
        return 0

    async def close(self) -> None:
        while self._sandboxes:
            await self._sandboxes.pop().close()


def _absolute(path: str) -> str:
    if not path:
        raise InvalidInput("'' is not a path", field="path")
    return str(PurePosixPath(WORKDIR) / path)
