"""A console of a sandbox elsewhere: one more shell of its agent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from rollserve.cancelling import uninterrupted
from rollserve.errors import Conflict, SandboxError
from rollserve.sandbox.base import ConsoleState
from rollserve.sandbox.capture import Capture
from rollserve.sandbox.console import HELD_OUTPUT_BYTES
from rollserve.sandbox.remote.agent import GUEST
from rollserve.sandbox.remote.program import Feeder
from rollserve.sandbox.remote.shell import READ_BYTES, Agent, RemoteShell, Seen, text_of


class RemoteConsole:
    """Implements ``Console``."""

    def __init__(self, agent: Agent, shell: RemoteShell, *, on_end: Callable[[], None]) -> None:
        self._agent = agent
        self._shell = shell
        self._on_end = on_end
        self._number = 0
        self._command: asyncio.Task[Seen] | None = None
        self._capture = Capture(HELD_OUTPUT_BYTES)
        self._heard = 0
        self._feeder: Feeder | None = None
        self._timed_out = False
        self._gone: str | None = None

    async def start(self) -> None:
        await self._shell.start(guest=True)

    @property
    def running(self) -> bool:
        return self._command is not None and not self._command.done()

    async def begin(self, command: str, *, timeout_s: float, takes_input: bool = False) -> None:
        text = text_of(command)
        self._check()
        if self._command is not None:
            raise Conflict("a command is running in this console")
        self._heard, self._timed_out = 0, False
        self._number, seen = await self._shell.begin(text, head=0, tail=0, takes_input=takes_input)
        self._feeder = Feeder(self._agent, f"{self._shell.place}/i.{self._number}") if takes_input else None
        self._command = asyncio.get_running_loop().create_task(self._run(seen, time.monotonic() + timeout_s))

    async def _run(self, seen: Seen, until: float) -> Seen:
        try:
            seen = await self._shell.over(
                self._number, head=0, tail=0, until=until, trim=False, seen=seen, hear=self._hear
            )
        except asyncio.CancelledError:
            await uninterrupted(self._shell.stop(self._number))
            raise
        if seen.code is None:
            self._timed_out = True
            await self._shell.stop(self._number)
        return seen

    async def _hear(self, total: int) -> None:
        while self._heard < total and (data := await self._shell.part(self._number, self._heard, READ_BYTES)):
            self._heard += len(data)
            self._capture.feed(data)

    async def look(self, wait_s: float | None) -> ConsoleState:
        command = self._command
        self._check()
        if command is None:
            return self._state()
        try:
            await asyncio.wait({command}, timeout=wait_s)
        except asyncio.CancelledError:
            await uninterrupted(self._give_up(command))
            raise
        self._check()
        if not command.done():
            return self._state(running=True)
        self._command = None
        seen = command.result()
        return self._state(exit_code=None if self._timed_out else seen.code, timed_out=self._timed_out)

    def _state(
        self, *, running: bool = False, exit_code: int | None = None, timed_out: bool = False
    ) -> ConsoleState:
        held, self._capture = self._capture, Capture(HELD_OUTPUT_BYTES)
        return ConsoleState(
            output=held.text(),
            running=running,
            exit_code=exit_code,
            timed_out=timed_out,
            elided_bytes=held.elided_bytes,
        )

    async def _give_up(self, command: asyncio.Task[Seen]) -> None:
        command.cancel()
        await asyncio.wait({command})
        self._command = None

    def type(self, data: bytes) -> None:
        if self._feeder is not None:
            self._feeder.later(data)

    def end_input(self) -> None:
        if self._feeder is not None:
            self._feeder.later(None)

    def interrupt(self) -> None:
        """The shell first, as on a terminal."""
        place = self._shell.place
        text = (
            f"read -r pid <{place}/shell && kill -INT $pid "
            f'$(below $pid "$(cat {place}/old.{self._number})") 2>/dev/null; :'
        )
        task = asyncio.get_running_loop().create_task(self._agent.ask(text))
        task.add_done_callback(_retrieve)

    async def close(self) -> None:
        self.shut("the console was closed")
        place = self._shell.place
        await self._agent.ask(
            f": >{place}/stop; for each in {place}/i.*; do [ ! -d $each ] || : >$each/over; done; "
            f"end_all marked {GUEST}={self._shell.key}; rm -rf {place}"
        )
        self._on_end()

    def shut(self, reason: str) -> None:
        self._gone = self._gone or reason
        if self._command is not None:
            self._command.add_done_callback(_forget)
            self._command.cancel()
        if self._feeder is not None:
            self._feeder.cancel()

    def _check(self) -> None:
        if self._gone is not None:
            raise SandboxError(self._gone, operation="console")
        self._agent.check()


def _retrieve(task: asyncio.Task[bytes]) -> None:
    if not task.cancelled():
        task.exception()


def _forget(task: asyncio.Task[Seen]) -> None:
    """Nobody looks any more at what a shut console ran."""
    if not task.cancelled():
        task.exception()
