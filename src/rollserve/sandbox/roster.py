"""The open sandboxes of one runtime: paces their starts, closes them all at the end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable

from rollserve.errors import SandboxError
from rollserve.sandbox.base import Sandbox, SandboxSpec
from rollserve.sandbox.box import ShellSandbox


class Roster:
    """Too many starts at once make every one of them late; a few per core keep the machine busy."""

    def __init__(self) -> None:
        self._open: dict[str, ShellSandbox] = {}
        self._starts = asyncio.Semaphore(max(4, 2 * (os.cpu_count() or 1)))
        self._closed = False

    async def start(
        self, make: Callable[[], ShellSandbox], spec: SandboxSpec, *, ttl_s: float
    ) -> ShellSandbox:
        async with self._starts:
            if self._closed:
                raise SandboxError("the runtime was closed", operation="sandbox.start")
            sandbox = make()
            self._open[sandbox.id] = sandbox
            await sandbox.prepare(spec.files, ttl_s=ttl_s)
        return sandbox

    def forget(self, sandbox_id: str) -> None:
        self._open.pop(sandbox_id, None)

    async def close(self) -> None:
        self._closed = True
        await close_all(self._open.values())


async def close_all(sandboxes: Iterable[Sandbox]) -> None:
    """At once, each whatever becomes of the others; raises what the first of them raised."""
    ends = await asyncio.gather(*(sandbox.close() for sandbox in list(sandboxes)), return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException):
            raise end
