"""The worker's code hosts: the zygote's life, slots, descriptions of import paths."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import msgspec

from rollserve.errors import ConfigError, InfrastructureFailure, InvalidInput
from rollserve.usercode import params
from rollserve.usercode.base import CodeFault, CodeInfo, Handlers, LogLine, Pause, Role, Use
from rollserve.usercode.host import Host
from rollserve.usercode.zygote_client import ZygoteClient


class HostSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``memory_mb`` bounds a host's address space, ``cpu_s`` its processor time (None: unbounded).
    ``log_limit_chars`` bounds what one host may log and print. ``start_s`` is the deadline of the
    zygote's start and of a fork, ``describe_s`` that of importing a user's module,
    ``cancel_grace_s`` what a cancelled coroutine gets before the kill."""

    memory_mb: int | None = None
    cpu_s: int | None = None
    log_limit_chars: int = 256 << 10
    start_s: float = 60.0
    describe_s: float = 60.0
    cancel_grace_s: float = 1.0


class ZygoteHosts:
    """``CodeHosts`` by forking from a zygote, which starts with the first use.

    ``code_dir`` goes on the import path of hosts only. At most ``max_hosts`` agents and ``max_hosts``
    other uses are alive at once; more wait, first come first served. ``preload`` names import paths
    to be checked and preloaded by ``start``. Raises ``ConfigError`` when ``code_dir`` is no folder.
    """

    def __init__(
        self,
        *,
        code_dir: Path | None = None,
        max_hosts: int = 32,
        preload: Sequence[str] = (),
        settings: HostSettings | None = None,
    ) -> None:
        if code_dir is not None and not code_dir.is_dir():
            raise ConfigError(f"no such folder: {code_dir}", field="code_dir")
        self._code_dir = None if code_dir is None else str(code_dir.absolute())
        self._preload = tuple(preload)
        self._settings = settings or HostSettings()
        self._slots = {use: asyncio.Semaphore(max_hosts) for use in Use}
        self._ids = itertools.count(1)
        self._zygote: ZygoteClient | None = None
        self._starting = asyncio.Lock()
        self._describing = asyncio.Lock()
        self._known: dict[tuple[str, Role], CodeInfo] = {}
        self._closed = False

    async def start(self) -> None:
        """Start the zygote, check and preload. Raises ``ConfigError`` (field ``preload.<i>``),
        ``InfrastructureFailure``."""
        await self._running_zygote()
        for index, path in enumerate(self._preload):
            try:
                await self.describe(path, Role.ANY, field=f"preload.{index}")
            except InvalidInput as error:
                raise ConfigError(error.message, field=error.field, hint=error.hint) from error

    async def close(self) -> None:
        """Kill every host and the zygote; returns when they are gone."""
        self._closed = True
        async with self._starting:
            if self._zygote is not None:
                await self._zygote.close()

    @property
    def live(self) -> int:
        """How many host processes there are."""
        return 0 if self._zygote is None else len(self._zygote.hosts)

    async def describe(self, path: str, role: Role, *, field: str) -> CodeInfo:
        if (known := self._known.get((path, role))) is not None:
            return known
        async with self._describing:
            if (known := self._known.get((path, role))) is not None:
                return known
            info = await self._describe(path, role, field)
            self._known[path, role] = info
            return info

    async def _describe(self, path: str, role: Role, field: str) -> CodeInfo:
        try:
            async with self.open(Use.LEAF, handlers={}, log=lambda line: None) as host:
                info = await host.call(
                    "describe", params.Describe(path, role), CodeInfo, timeout_s=self._settings.describe_s
                )
        except InvalidInput as error:
            raise InvalidInput(error.message, field=field) from error
        except CodeFault as fault:
            raise InvalidInput(f"{path!r} can't be loaded: {fault.report}", field=field) from fault
        if info.forkable:
            await self._hold(path, role)
        return info

    async def _hold(self, path: str, role: Role) -> None:
        """Let the zygote import what a host has imported without trouble. Should it make trouble
        after all, the zygote is replaced by one that does without."""
        zygote = await self._running_zygote()
        try:
            await zygote.preload(path, role, timeout_s=self._settings.describe_s)
        except TimeoutError:
            await zygote.close()

    @asynccontextmanager
    async def open(
        self, use: Use, *, handlers: Handlers, log: LogLine, pause: Pause = nullcontext
    ) -> AsyncIterator[Host]:
        with pause():
            await self._slots[use].acquire()
        try:
            host, zygote = await self._make(handlers, log)
        except BaseException:
            self._slots[use].release()
            raise
        host.ended.add_done_callback(lambda _: self._slots[use].release())
        try:
            await self._fork(host, zygote)
            yield host
        finally:
            await host.close()

    async def _make(self, handlers: Handlers, log: LogLine) -> tuple[Host, ZygoteClient]:
        zygote = await self._running_zygote()
        output_read, output_write = os.pipe()
        os.set_blocking(output_read, False)
        host = Host(
            next(self._ids),
            handlers=handlers,
            log=log,
            output_fd=output_read,
            log_limit_chars=self._settings.log_limit_chars,
            cancel_grace_s=self._settings.cancel_grace_s,
        )
        ours, theirs = socket.socketpair()
        try:
            ours.setblocking(False)
            reader, writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            theirs.close()
            os.close(output_write)
            host.on_fork_failed("could not be opened")
            await host.close()
            raise
        host.attach(reader, writer)
        zygote.adopt(host, theirs, output_write)
        return host, zygote

    async def _fork(self, host: Host, zygote: ZygoteClient) -> None:
        limits = self._settings
        try:
            async with asyncio.timeout(limits.start_s):
                await zygote.fork(host, memory_mb=limits.memory_mb, cpu_s=limits.cpu_s)
                await asyncio.shield(host.started)
        except TimeoutError:
            message = f"no code host after {limits.start_s:g} s"
            raise InfrastructureFailure(message, operation="code_host.start") from None

    async def _running_zygote(self) -> ZygoteClient:
        async with self._starting:
            if self._closed:
                raise InfrastructureFailure("code hosts are closed", operation="code_host.start")
            if self._zygote is None or not self._zygote.alive:
                if self._zygote is not None:
                    await self._zygote.close()
                self._zygote = await ZygoteClient.start(self._code_dir, timeout_s=self._settings.start_s)
            return self._zygote
