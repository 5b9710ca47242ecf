"""A runtime in memory."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable

import msgspec

from rollserve.errors import InvalidInput, SandboxError, TooLarge
from rollserve.sandbox.base import Ability, Console, ExecResult, Program, RuntimeReport, SandboxSpec
from rollserve.testing.journal import Hooks, Journal


class FakeSandbox:
    """Files in memory. ``exec`` knows how files are carried, and answers all else with nothing."""

    def __init__(self, runtime: FakeRuntime, number: int, spec: SandboxSpec, owner: str) -> None:
        self._runtime = runtime
        self.id = f"{owner}-{number}"
        self.spec = spec
        self.owner = owner
        self.files = {**runtime.snapshots.get(spec.snapshot, {}), **spec.files}
        self.closed = False
        self.commands: list[str] = []

    async def exec(
        self, command: str, *, timeout_s: float = 60.0, output_limit_bytes: int = 65536
    ) -> ExecResult:
        self._check_open()
        self.commands.append(command)
        if "tar -tf" in command:
            carried = msgspec.msgpack.decode(self.files.pop(_archive_in(command)), type=dict[str, bytes])
            self.files |= carried
        elif "tar -cf" in command:
            archive = _archive_in(command)
            self.files[archive] = msgspec.msgpack.encode(self.files)
        return ExecResult(output="", exit_code=0)

    async def run(self, command: str, *, timeout_s: float, on_output: Callable[[bytes], None]) -> int | None:
        return (await self.exec(command, timeout_s=timeout_s)).exit_code

    async def spawn(self, command: str, *, on_errors: Callable[[bytes], None]) -> Program:
        raise SandboxError("a fake runs no programs", operation="sandbox.spawn")

    async def open_console(self) -> Console:
        raise SandboxError("a fake runs no programs", operation="sandbox.spawn")

    async def listen(self) -> socket.socket:
        self._check_open()
        await self._runtime.hooks.listen()
        return socket.create_server(("127.0.0.1", 0))

    async def connect(self, port: int) -> socket.socket:
        raise SandboxError("a fake has no ports", operation="sandbox.connect")

    async def snapshot(self) -> str:
        self._check_open()
        name = f"snapshot-{len(self._runtime.snapshots)}"
        self._runtime.snapshots[name] = dict(self.files)
        return name

    async def read_file(self, path: str, *, limit_bytes: int = 16 << 20) -> bytes:
        self._check_open()
        if path not in self.files:
            raise SandboxError(f"no such file: {path}", operation="read_file")
        if len(self.files[path]) > limit_bytes:
            raise TooLarge(f"{path} is over {limit_bytes} bytes")
        return self.files[path]

    async def write_file(self, path: str, data: bytes) -> None:
        self._check_open()
        await self._runtime.hooks.write_file()
        self.files[path] = data

    async def adopt(self, spec: SandboxSpec, *, ttl_s: float) -> None:
        self._check_open()
        await self._runtime.hooks.adopt()
        self.spec, self.files = spec, dict(spec.files)

    async def close(self) -> None:
        await self._runtime.hooks.close_sandbox()
        if not self.closed:
            self.closed = True
            self._runtime.open.discard(self)
            self._runtime.journal(f"sandbox.closed {self.id}")

    def _check_open(self) -> None:
        if self.closed:
            raise SandboxError("the sandbox is gone", operation="sandbox")


def _archive_in(command: str) -> str:
    return next(word for word in command.split() if word.endswith(".tar"))


class FakeRuntime:
    def __init__(self, hooks: Hooks, journal: Journal, name: str = "fake") -> None:
        self.name = name
        self.hooks = hooks
        self.journal = journal
        self.open: set[FakeSandbox] = set()
        self.made: list[FakeSandbox] = []
        self.most_open = 0
        self.reaps = 0
        self.snapshots: dict[str, dict[str, bytes]] = {}
        self.enforces: tuple[str, ...] = ()
        self.can: tuple[Ability, ...] = ("listen", "snapshot")
        self._by_owner: Counter[str] = Counter()

    def report(self) -> RuntimeReport:
        return RuntimeReport(
            name=self.name, usable=True, isolated=False, enforces=self.enforces, can=self.can
        )

    def check_image(self, image: str) -> None:
        if image == "missing":
            raise InvalidInput("no such image: missing", field="image")

    async def create(self, spec: SandboxSpec, *, owner: str, ttl_s: float) -> FakeSandbox:
        self.check_image(spec.image)
        await self.hooks.create()
        self._by_owner[owner] += 1
        sandbox = FakeSandbox(self, self._by_owner[owner], spec, owner)
        self.open.add(sandbox)
        self.made.append(sandbox)
        self.most_open = max(self.most_open, len(self.open))
        self.journal(f"sandbox.created {sandbox.id}")
        return sandbox

    async def create_spare(self, spec: SandboxSpec, *, ttl_s: float) -> FakeSandbox:
        return await self.create(spec, owner="spare", ttl_s=ttl_s)

    async def reap(self) -> int:
        self.reaps += 1
        return 0

    async def close(self) -> None:
        for sandbox in list(self.open):
            await sandbox.close()
