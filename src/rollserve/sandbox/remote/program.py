"""A program beside the shell of a sandbox elsewhere: its streams are files that the agent is asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rollserve.cancelling import unheard
from rollserve.errors import SandboxError
from rollserve.sandbox.remote.agent import GUEST, encoded
from rollserve.sandbox.remote.shell import CHUNK_BYTES, READ_BYTES, Agent

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5


class Feeder:
    """What is typed for a FIFO, in order; the agent's feeder takes it chunk by chunk."""

    def __init__(self, agent: Agent, place: str) -> None:
        self._agent = agent
        self._place = place
        self._number = 0
        self._queue: asyncio.Task[None] | None = None

    async def send(self, data: bytes) -> int:
        """The number of the last chunk."""
        for start in range(0, len(data), CHUNK_BYTES):
            piece = data[start : start + CHUNK_BYTES]
            chunk = f"{self._place}/chunk.{self._number}"
            self._number += 1
            await self._agent.ask(f"{encoded(piece)} >{chunk}.part && mv {chunk}.part {chunk}")
        return self._number - 1

    async def end(self) -> None:
        await self._agent.ask(f": >{self._place}/end")

    def later(self, data: bytes | None) -> None:
        """``send``, or ``end`` for None, after all that was asked for before."""
        before = self._queue

        async def one() -> None:
            if before is not None:
                await asyncio.wait({before})
            await (self.end() if data is None else self.send(data))

        self._queue = asyncio.get_running_loop().create_task(one())
        self._queue.add_done_callback(unheard)  # whoever waits for what the input does hears of it

    def cancel(self) -> None:
        if self._queue is not None:
            self._queue.cancel()


class RemoteProgram:
    """Implements ``Program``."""

    def __init__(
        self, agent: Agent, key: str, *, on_errors: Callable[[bytes], None], on_end: Callable[[], None]
    ) -> None:
        self._agent = agent
        self._place = f"{agent.text.folder}/{key}"
        self._mark = f"{GUEST}={key}"
        self._on_errors = on_errors
        self._on_end = on_end
        self._read = {"out": 0, "err": 0}
        self._feeder = Feeder(agent, self._place)
        self._gone: str | None = None

    async def read(self) -> bytes:
        pause_s = _FIRST_PAUSE_S
        while True:
            running = await self._runs()
            errors = await self._next("err")
            data = await self._next("out")
            while errors:
                self._on_errors(errors)
                errors = await self._next("err")
            if data or not running:
                return data
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 1.5)

    async def write(self, data: bytes) -> None:
        self._check()
        last = await self._feeder.send(data)
        pause_s = _FIRST_PAUSE_S
        while await self._agent.ask(f"if [ -e {self._place}/chunk.{last} ]; then echo left; fi"):
            if not await self._runs():
                raise SandboxError("the program does not read its input any more", operation="program.write")
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 1.5)
        if not await self._runs():
            raise SandboxError("the program does not read its input any more", operation="program.write")

    def end_input(self) -> None:
        self._feeder.later(None)

    def interrupt(self) -> None:
        interrupt = f"read -r pid <{self._place}/pid; kill -INT $pid $(below $pid) 2>/dev/null; :"
        task = asyncio.get_running_loop().create_task(self._agent.ask(interrupt))
        task.add_done_callback(unheard)

    async def kill(self) -> None:
        self.shut("the program was ended")
        await self._agent.ask(
            f"[ ! -d {self._place} ] || : >{self._place}/over; "
            f"end_all marked {self._mark}; rm -rf {self._place}"
        )
        self._on_end()

    def shut(self, reason: str) -> None:
        self._gone = self._gone or reason
        self._feeder.cancel()

    async def _runs(self) -> bool:
        self._check()
        answer = await self._agent.ask(f"marked {self._mark}")
        self._check()
        return bool(answer.strip())

    async def _next(self, stream: str) -> bytes:
        start = f"tail -c +{self._read[stream] + 1} {self._place}/{stream}"
        data = await self._agent.ask(f"{start} | head -c {READ_BYTES}")
        self._check()
        self._read[stream] += len(data)
        return data

    def _check(self) -> None:
        if self._gone is not None:
            raise SandboxError(self._gone, operation="program")
        self._agent.check()
