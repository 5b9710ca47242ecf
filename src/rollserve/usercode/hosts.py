"""The worker's code hosts: the zygote's life, slots, descriptions of import paths."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path

import msgspec

from rollserve.errors import ConfigError, InfrastructureFailure, InvalidInput
from rollserve.usercode import params
from rollserve.usercode.base import CodeFault, CodeInfo, Handlers, LogLine, Pause, Role, Use
from rollserve.usercode.generation import Generation
from rollserve.usercode.host import Host
from rollserve.usercode.zygote_client import ZygoteClient

log = logging.getLogger(__name__)

KEPT = 4
"""Earlier states of the code that are held for what began with them, at rest or not."""

TRIES = 3
"""Of an import whose files change meanwhile."""


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
    """``CodeHosts`` by forking from a zygote, which starts with the first use. Once a file that it was
    loaded from has changed (``describe`` looks), there is a new generation: a zygote that loads the files
    anew. What was described before runs on with the old one; of those, ``KEPT`` are held, and any
    that has a host.

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
        self._now = Generation(1)
        self._old: list[Generation] = []
        self._starting = asyncio.Lock()
        self._describing = asyncio.Lock()
        self._closed = False

    async def start(self) -> None:
        """Start the zygote, check and preload. Raises ``ConfigError`` (field ``preload.<i>``),
        ``InfrastructureFailure``."""
        await self._running_zygote(self._now)
        for index, path in enumerate(self._preload):
            try:
                await self.describe(path, Role.ANY, field=f"preload.{index}")
            except InvalidInput as error:
                raise ConfigError(error.message, field=error.field, hint=error.hint) from error

    async def close(self) -> None:
        """Kill every host and the zygote; returns when they are gone."""
        self._closed = True
        async with self._starting:
            for generation in (*self._old, self._now):
                await generation.close()

    @property
    def live(self) -> int:
        """How many host processes there are."""
        return sum(generation.live for generation in (*self._old, self._now))

    async def describe(self, path: str, role: Role, *, field: str) -> CodeInfo:
        if (known := (await self._current()).known.get((path, role))) is not None:
            return known
        async with self._describing:
            for _ in range(TRIES):
                generation = await self._current()
                if (known := generation.known.get((path, role))) is not None:
                    return known
                info, sure = await self._describe(generation, path, role, field)
                if not sure:
                    await self._renew(generation, "read differently twice")
                elif generation is await self._current():  # else what was looked at is not what is held
                    generation.known[path, role] = info
                    return info
        raise InfrastructureFailure(f"the files of {path!r} keep changing", operation="code_host.describe")

    async def _current(self) -> Generation:
        """The generation of what the files are now."""
        generation = self._now
        if not generation.files:
            return generation
        changed = await asyncio.to_thread(generation.changed)
        if changed:
            await self._renew(generation, ", ".join(changed))
        return self._now

    async def _renew(self, generation: Generation, why: str) -> None:
        """Begin a new generation, unless another has begun since ``generation``."""
        if self._now is generation:
            self._old.append(generation)
            self._now = Generation(generation.number + 1)
            log.info("code has changed and is loaded anew: %s", why)
            await self._forget_old()

    async def _forget_old(self) -> None:
        """Those at rest beyond what is kept, the oldest first."""
        async with self._starting:
            for generation in [each for each in self._old if not each.live]:
                if len(self._old) > KEPT:
                    await generation.close()
                    self._old.remove(generation)

    async def _describe(
        self, generation: Generation, path: str, role: Role, field: str
    ) -> tuple[CodeInfo, bool]:
        """And whether all that was read is of one state of the files."""
        order = params.Describe(path, role)
        try:
            async with self._leaf(generation) as host:
                info = await host.call("describe", order, CodeInfo, timeout_s=self._settings.describe_s)
        except InvalidInput as error:
            raise InvalidInput(error.message, field=field) from error
        except CodeFault as fault:
            raise InvalidInput(f"{path!r} can't be loaded: {fault.report}", field=field) from fault
        sure = generation.learn(info)
        if sure and info.forkable and path not in generation.unfit:
            sure = await self._hold(generation, info)
        return msgspec.structs.replace(info, generation=generation.number), sure

    async def _hold(self, generation: Generation, info: CodeInfo) -> bool:
        """Let the zygote import what a host has imported without trouble. Should it make trouble
        after all, the zygote is replaced by one that does without. Returns False when it read other files
        than the host had."""
        zygote = await self._running_zygote(generation)
        try:
            if not await zygote.preload(info.path, info.role, timeout_s=self._settings.describe_s):
                return True
        except TimeoutError:
            generation.unfit.add(info.path)
            await zygote.close()
            return True
        async with self._leaf(generation) as host:  # as those to come will be
            if await self._changed(host, generation, (info,)):
                return False
        zygote.hold(info)
        return True

    def _leaf(self, generation: Generation) -> AbstractAsyncContextManager[Host]:
        """A host of ours, to look."""
        return self._opened(generation, Use.LEAF, handlers={}, log=lambda line: None, pause=nullcontext)

    def _of(self, code: Sequence[CodeInfo]) -> Generation:
        """Raises ``InfrastructureFailure`` when there is none: whoever asks describes it anew."""
        numbers = {info.generation for info in code} or {self._now.number}
        held = {each.number: each for each in (*self._old, self._now)}
        found = held.get(min(numbers))
        if found is None or len(numbers) > 1:
            raise _changed_meanwhile(code)
        return found

    async def _changed(self, host: Host, generation: Generation, code: Sequence[CodeInfo]) -> list[str]:
        """The files that ``host`` read otherwise than they were described. An import that fails or does
        not end is told by the operation that comes next."""
        order = params.Load(tuple(info.path for info in code), generation.files)
        try:
            return await host.call("load", order, list[str], timeout_s=self._settings.describe_s)
        except CodeFault as fault:
            told = CodeFault(f"at import: {fault.message}", ending=fault.ending, trace=fault.trace)
            host.kill(because=told)  # it may have come to its end since, and nobody looked at what it read
            return []

    @asynccontextmanager
    async def open(
        self,
        use: Use,
        *,
        handlers: Handlers,
        log: LogLine,
        pause: Pause = nullcontext,
        code: Sequence[CodeInfo] = (),
    ) -> AsyncIterator[Host]:
        async with self._opened(None, use, handlers=handlers, log=log, pause=pause, code=code) as host:
            yield host

    @asynccontextmanager
    async def _opened(
        self,
        generation: Generation | None,
        use: Use,
        *,
        handlers: Handlers,
        log: LogLine,
        pause: Pause,
        code: Sequence[CodeInfo] = (),
    ) -> AsyncIterator[Host]:
        """Of ``generation``, or of that of ``code``."""
        with pause():
            await self._slots[use].acquire()
        try:
            found = generation or self._of(code)
            host, zygote = await self._make(found, handlers, log)
        except BaseException:
            self._slots[use].release()
            raise
        host.ended.add_done_callback(lambda _: self._slots[use].release())
        try:
            await self._fork(host, zygote)
            if not all(zygote.holds(info) for info in code) and await self._changed(host, found, code):
                raise _changed_meanwhile(code)
            yield host
        finally:
            await host.close()

    async def _make(
        self, generation: Generation, handlers: Handlers, log: LogLine
    ) -> tuple[Host, ZygoteClient]:
        zygote = await self._running_zygote(generation)
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

    async def _running_zygote(self, generation: Generation) -> ZygoteClient:
        async with self._starting:
            if self._closed:
                raise InfrastructureFailure("code hosts are closed", operation="code_host.start")
            if generation.zygote is None or not generation.zygote.alive:
                if generation is not self._now:  # what it held can't be loaded again
                    raise InfrastructureFailure("the code has changed", operation="code_host.start")
                await generation.close()
                generation.known.clear()  # to be described anew is to be held anew
                generation.zygote = await ZygoteClient.start(self._code_dir, timeout_s=self._settings.start_s)
            return generation.zygote


def _changed_meanwhile(code: Sequence[CodeInfo]) -> InfrastructureFailure:
    paths = ", ".join(info.path for info in code)
    return InfrastructureFailure(f"the code of {paths} has changed meanwhile", operation="code_host.start")
