"""A console of a sandbox elsewhere: one more shell of its agent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from rollserve.cancelling import unheard, uninterrupted
from rollserve.errors import SandboxError
from rollserve.sandbox.base import ConsoleState
from rollserve.sandbox.foreground import Foreground
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
        self._foreground: Foreground[Seen] = Foreground()
        self._heard = 0
        self._feeder: Feeder | None = None
        self._timed_out = False
        self._gone: str | None = None

    async def start(self) -> None:
        await self._shell.start(guest=True)

    @property
    def running(self) -> bool:
        return self._foreground.running

    async def begin(self, command: str, *, timeout_s: float, takes_input: bool = False) -> None:
        text = text_of(command)
        self._check()
        self._foreground.check_empty()
        self._heard, self._timed_out = 0, False
        self._number, seen = await self._shell.begin(text, head=0, tail=0, takes_input=takes_input)
        self._feeder = Feeder(self._agent, f"{self._shell.place}/i.{self._number}") if takes_input else None
        self._foreground.begin(self._run(seen, time.monotonic() + timeout_s))

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
            self._foreground.hear(data)

    async def look(self, wait_s: float | None) -> ConsoleState:
        foreground = self._foreground
        self._check()
        if foreground.empty:
            return foreground.state()
        ended = await foreground.wait(wait_s)
        self._check()
        if ended is None:
            return foreground.state(running=True)
        seen = foreground.take(ended)
        return foreground.state(exit_code=None if self._timed_out else seen.code, timed_out=self._timed_out)

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
        task.add_done_callback(unheard)

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
        self._foreground.leave(cancel=True)
        if self._feeder is not None:
            self._feeder.cancel()

    def _check(self) -> None:
        if self._gone is not None:
            raise SandboxError(self._gone, operation="console")
        self._agent.check()
