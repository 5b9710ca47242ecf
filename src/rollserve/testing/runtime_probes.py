"""What the checks of ``runtime_conformance`` stand on: sandboxes with an end, and looking at the host."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib import import_module
from pathlib import Path
from typing import ClassVar, TypedDict, cast

from rollserve.sandbox.base import Ability, Runtime, RuntimeReport, Sandbox, SandboxLimits, SandboxSpec

OWNER = "conformance"
TTL_S = 600.0
PATIENCE_S = 60.0


def load_runtime(factory: str, data_dir: Path) -> Runtime:
    module, _, attribute = factory.partition(":")
    return cast("Runtime", getattr(import_module(module), attribute)(data_dir=data_dir))


def unique_seconds() -> str:
    """A duration for ``sleep`` that marks the process on the host."""
    return f"{300 + secrets.randbelow(100)}.{secrets.randbelow(10**9):09d}"


def processes_with(mark: str) -> list[int]:
    """Pids on the host that have ``mark`` as a word of their command line and are not zombies."""
    found = []
    for name in os.listdir("/proc"):
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0") if name.isdigit() else []
        except OSError:
            continue
        if mark.encode() in words:
            found.append(int(name))
    return found


async def wait_until_gone(mark: str, *, timeout_s: float = PATIENCE_S) -> None:
    await _wait_for(mark, present=False, timeout_s=timeout_s)


async def wait_until_present(mark: str, *, timeout_s: float = PATIENCE_S) -> None:
    await _wait_for(mark, present=True, timeout_s=timeout_s)


async def _wait_for(mark: str, *, present: bool, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while bool(processes_with(mark)) is not present:
        wanted = "running" if present else "gone"
        assert time.monotonic() < deadline, f"sleep {mark} is not {wanted}: {processes_with(mark)}"
        await asyncio.sleep(0.01)


async def must_fail(error: type[BaseException], awaitable: Awaitable[object]) -> BaseException:
    """Await and expect ``error``: pytest is not imported here."""
    try:
        await awaitable
    except error as caught:
        return caught
    raise AssertionError(f"{error.__name__} was not raised")


def open_descriptors() -> int:
    """Of this process, without those that only the collector has still to close."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def host_has(path: str) -> bool:
    return os.path.exists(path)


def processes_with_environment(entry: str) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        try:
            words = Path(f"/proc/{name}/environ").read_bytes().split(b"\0") if name.isdigit() else []
        except OSError:
            continue
        if entry.encode() in words:
            found.append(int(name))
    return found


class Ticks:
    """How often the event loop comes round, by the processor time that it takes: on a machine that is busy
    with other things a second of the clock says nothing."""

    def __init__(self) -> None:
        self.count = 0
        self._begun = time.thread_time()

    async def go_on(self) -> None:
        while True:
            await asyncio.sleep(0.01)
            self.count += 1

    def a_second(self) -> float:
        return self.count / (time.thread_time() - self._begun)


class _Hears(TypedDict):
    timeout_s: float
    on_output: Callable[[bytes], None]


class Said:
    """Hears what a program prints."""

    def __init__(self) -> None:
        self.data = b""
        self._more = asyncio.Event()

    def hears(self, *, timeout_s: float = 60.0) -> _Hears:
        """The arguments of ``Sandbox.run``."""
        self.data = b""
        return {"timeout_s": timeout_s, "on_output": self._hear}

    def _hear(self, data: bytes) -> None:
        self.data += data
        self._more.set()

    async def until(self, text: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while text.encode() not in self.data:
                self._more.clear()
                await self._more.wait()


def dial(port: int) -> str:
    """A command that says a word to a port of the sandbox's loopback address and prints the answer."""
    return f"bash -c 'exec 5<>/dev/tcp/127.0.0.1/{port} && echo inside >&5 && cat <&5'"


@asynccontextmanager
async def greeting(sock: socket.socket) -> AsyncIterator[int]:
    """Greets whoever says a word on the socket; yields its port."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello " + await reader.readline())
        writer.close()

    server = await asyncio.start_server(greet, sock=sock)
    async with server:
        yield int(sock.getsockname()[1])


def host_socket() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def bound_here(port: int) -> socket.socket | None:
    """The port on the host's loopback interface, taken so that nobody listens on it; None where somebody has
    it."""
    sock = socket.socket()
    try:
        sock.bind(("127.0.0.1", port))
    except OSError:
        sock.close()
        return None
    return sock


def accepts(sock: socket.socket) -> bool:
    """Whether the socket still listens."""
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that the sandboxes' user can enter, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="rollserve-probe-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


class RuntimeChecks:
    """How a check gets its runtime and its sandbox; ``factory`` is ``module:callable``, ``many`` how many
    sandboxes at once are asked of it."""

    factory: ClassVar[str] = ""
    many: ClassVar[int] = 50

    def image_reference(self) -> str:
        """What the checks' sandboxes start from."""
        return "host"

    def spec(
        self,
        *,
        files: dict[str, bytes] | None = None,
        env: dict[str, str] | None = None,
        limits: SandboxLimits | None = None,
        mounts: dict[str, str] | None = None,
    ) -> SandboxSpec:
        return SandboxSpec(
            image=self.image_reference(),
            files=files or {},
            env=env or {},
            limits=limits or SandboxLimits(),
            mounts=mounts or {},
        )

    def make(self, data_dir: Path) -> Runtime:
        return load_runtime(self.factory, data_dir)

    def report_of(self, runtime: Runtime) -> RuntimeReport:
        report = runtime.report()
        if not report.usable:
            self.skip(f"{report.name} can't be used here: {report.detail}")
        return report

    def skip(self, reason: str) -> None:
        import pytest

        pytest.skip(reason)

    @asynccontextmanager
    async def runtime(self, data_dir: Path) -> AsyncIterator[Runtime]:
        runtime = self.make(data_dir)
        self.report_of(runtime)
        try:
            yield runtime
        finally:
            await runtime.close()

    @asynccontextmanager
    async def able(self, data_dir: Path, ability: Ability) -> AsyncIterator[Runtime]:
        async with self.runtime(data_dir) as runtime:
            if ability not in runtime.report().can:
                self.skip(f"{runtime.name} has no {ability}, and says so")
            yield runtime

    @asynccontextmanager
    async def sandbox(self, data_dir: Path, spec: SandboxSpec | None = None) -> AsyncIterator[Sandbox]:
        async with self.runtime(data_dir) as runtime:
            yield await runtime.create(spec or self.spec(), owner=OWNER, ttl_s=TTL_S)

    async def needs_bash(self, box: Sandbox) -> None:
        """To open a connection without a program of its own."""
        if (await box.exec("command -v bash")).exit_code != 0:
            self.skip("the default image has no bash")

    @asynccontextmanager
    async def isolated(self, data_dir: Path, spec: SandboxSpec | None = None) -> AsyncIterator[Sandbox]:
        """For checks of isolation: skipped where the runtime does not claim any."""
        async with self.runtime(data_dir) as runtime:
            if not runtime.report().isolated:
                self.skip(f"{runtime.name} does not isolate, and says so")
            yield await runtime.create(spec or self.spec(), owner=OWNER, ttl_s=TTL_S)

    @asynccontextmanager
    async def limited(self, data_dir: Path, limit: str, limits: SandboxLimits) -> AsyncIterator[Sandbox]:
        async with self.runtime(data_dir) as runtime:
            report = runtime.report()
            if limit not in (*report.enforces, *report.per_process):
                self.skip(f"{runtime.name} does not enforce {limit}, and says so")
            yield await runtime.create(self.spec(limits=limits), owner=OWNER, ttl_s=TTL_S)
