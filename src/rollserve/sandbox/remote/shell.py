"""One persistent shell of a sandbox elsewhere, as its agent keeps it: commands by number, to be looked at."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rollserve.errors import SandboxError
from rollserve.sandbox.remote.agent import AgentText, encoded
from rollserve.sandbox.remote.door import Door
from rollserve.sandbox.script import command_text

CALL_TIMEOUT_S = 60.0
CHUNK_BYTES = 88 << 10
"""What goes into a door at once: an argument of a program is below 128 KiB, in base64."""

READ_BYTES = 1 << 20
"""What comes out of one at once."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
_FLOOD_BYTES = 4 << 20
"""Printed from one look to the next: the next comes soon, to leave the middle out before a limit is met."""


@dataclass(frozen=True)
class Seen:
    """How a command stands. ``code`` is None as long as it runs; ``total_bytes`` is what it printed."""

    code: int | None
    total_bytes: int


class Agent:
    """Scripts through one door; what they print may be any bytes."""

    def __init__(self, door: Door, text: AgentText) -> None:
        self._door = door
        self.text = text
        self.gone: str | None = None

    async def ask(self, script: str, *, timeout_s: float = CALL_TIMEOUT_S) -> bytes:
        """Its stdout. Raises ``SandboxError`` with its stderr when it ends with another code than 0."""
        self.check()
        wrapped = f"{{ {self.text.script(script)}; }} 2>&1 && printf '\\0ok' || printf '\\0no'"
        said = await self._door.call(f"{{ {wrapped}; }} | base64", timeout_s=timeout_s)
        self.check()
        try:
            answer = base64.b64decode(said)
        except ValueError:
            answer = b""
        body, sign = answer[:-3], answer[-3:]
        if sign != b"\0ok":
            message = body.decode(errors="backslashreplace").strip() or said.strip()
            raise SandboxError(message[-500:] or "no answer", operation="sandbox.remote")
        return body

    async def put(self, path: str, data: bytes) -> None:
        """``path`` as the shell reads it."""
        await self.ask(f"{encoded(data[:CHUNK_BYTES])} >{path}")
        for start in range(CHUNK_BYTES, len(data), CHUNK_BYTES):
            await self.ask(f"{encoded(data[start : start + CHUNK_BYTES])} >>{path}")

    def check(self) -> None:
        if self.gone is not None:
            raise SandboxError(self.gone, operation="sandbox.remote")


class RemoteShell:
    """The caller serialises. ``key`` names its folder."""

    def __init__(self, agent: Agent, key: str) -> None:
        self._agent = agent
        self.key = key
        self.place = f"{agent.text.folder}/{key}"
        self._number = 0
        self.last_code = 0

    async def start(self, *, guest: bool = False) -> None:
        await self._agent.ask(self._agent.text.start_shell(self.key, guest=guest))

    async def begin(
        self, command: bytes, *, head: int, tail: int, takes_input: bool = False
    ) -> tuple[int, Seen]:
        """Start it; its number, and how it stands after a moment."""
        self._number += 1
        number = self._number
        text = f"{self.place}/t.{number}"
        stdin = "/dev/null"
        prepare = ""
        if takes_input:
            stdin = f"{self.place}/i.{number}/in"
            folder = f"{self.place}/i.{number}"
            prepare = f"mkdir {folder} && mkfifo {folder}/in && {self._agent.text.start_feeder(folder)} && "
        if len(command) > CHUNK_BYTES:
            await self._agent.put(text, command)
        else:
            prepare += f"{encoded(command)} >{text} && "
        line = f"{prepare}ready {self.key} && begin {self.key} {number} {self.last_code} {stdin}"
        said = await self._agent.ask(
            f"{line} && soon {self.key} {number} 5; answer {self.key} {number} {head} {tail}"
        )
        return number, self._seen(said)

    async def look(self, number: int, *, head: int, tail: int, trim: bool) -> Seen:
        """``trim`` leaves the middle of a flood out."""
        how = "trim" if trim else "keep"
        return self._seen(await self._agent.ask(f"answer {self.key} {number} {head} {tail} {how}"))

    async def over(
        self,
        number: int,
        *,
        head: int,
        tail: int,
        until: float | None,
        trim: bool = True,
        seen: Seen | None = None,
        hear: Callable[[int], Awaitable[None]] | None = None,
    ) -> Seen:
        """Look until it is over, or the clock (``time.monotonic``) is at ``until``. ``hear`` is told how much
        there is of what it prints, and takes it."""
        pause_s = _FIRST_PAUSE_S
        seen = seen or await self.look(number, head=head, tail=tail, trim=trim)
        while True:
            if hear is not None:
                await hear(seen.total_bytes)
            if seen.code is not None or (until is not None and time.monotonic() >= until):
                return seen
            left_s = pause_s if until is None else min(pause_s, max(0.0, until - time.monotonic()))
            await asyncio.sleep(left_s)
            before, seen = seen, await self.look(number, head=head, tail=tail, trim=trim)
            flood = seen.total_bytes - before.total_bytes > _FLOOD_BYTES
            pause_s = _FIRST_PAUSE_S if flood else min(_LONGEST_PAUSE_S, pause_s * 1.5)

    async def whole(self, number: int, *, head: int, tail: int) -> bytes:
        return await self._agent.ask(f"whole {self.key} {number} {head} {tail}")

    async def part(self, number: int, offset: int, size: int) -> bytes:
        return await self._agent.ask(f"tail -c +{offset + 1} {self.place}/o.{number} | head -c {size}")

    async def stop(self, number: int) -> None:
        """Kill it with its shell; background jobs of earlier commands live on."""
        await self._agent.ask(f"stop {self.key} {number}")
        self.last_code = 0

    async def forget(self, number: int) -> None:
        names = " ".join(f"{self.place}/{kind}.{number}" for kind in ("t", "e", "old", "h", "l", "d", "i"))
        await self._agent.ask(f"rm -rf {names}")

    def _seen(self, said: bytes) -> Seen:
        words = said.split()
        if len(words) != 4:
            raise SandboxError(f"the agent says {said[:200]!r}", operation="sandbox.remote")
        alive, code, _, total = (word.decode() for word in words)
        if alive != "1":
            self._agent.gone = self._agent.gone or "the sandbox is gone"
            self._agent.check()
        if code == "-":
            return Seen(None, int(total))
        self.last_code = int(code)
        return Seen(int(code), int(total))


def text_of(command: str) -> bytes:
    """Raises ``InvalidInput``."""
    return command_text(command)
