"""One worker process: started with its launch data, ended for sure."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from rollserve.executor.channel import Launch
from rollserve.executor.log_file import LogFile


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to wait: for a worker's hello; for a process to follow its connection's end, and the
    other way round; for the next word of a worker, which sends its vitals each second; after the grace it
    was given, before it is terminated; after that, before it is
    killed."""

    hello_s: float = 60.0
    follow_s: float = 5.0
    silent_s: float = 60.0
    after_grace_s: float = 12.0
    after_term_s: float = 3.0


class WorkerProcess:
    """Leader of its own session, so that a Ctrl-C meant for the server does not reach it and its
    children can be signalled with it."""

    def __init__(self, process: asyncio.subprocess.Process, log: LogFile, log_from: int) -> None:
        self._process = process
        self._log = log
        self._log_from = log_from
        self._killed = False

    @classmethod
    async def start(
        cls, command: Sequence[str], launch: Launch, log: LogFile, env: Mapping[str, str] | None
    ) -> WorkerProcess:
        """Raises ``OSError`` when there is no such command."""
        log_from, output = await asyncio.to_thread(lambda: (log.size(), log.open()))
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=None if env is None else dict(env),
                start_new_session=True,
            )
        finally:
            os.close(output)
        if process.stdin is not None:
            process.stdin.write(msgspec.json.encode(launch) + b"\n")
            process.stdin.close()
        return cls(process, log, log_from)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> None:
        """Until it is gone; then what it left in its process group is killed too."""
        await self._process.wait()
        self._signal_group(signal.SIGKILL)

    def kill(self) -> None:
        if self._process.returncode is None:
            self._killed = True
            self._signal_group(signal.SIGKILL)

    async def end(self, grace_s: float, patience: Patience) -> None:
        """It was asked to stop within ``grace_s``: wait for that, then terminate it, then kill it.
        Returns when it is gone."""
        if await self._gone_within(grace_s + patience.after_grace_s):
            return
        if self._process.returncode is None:
            self._process.terminate()
        if not await self._gone_within(patience.after_term_s):
            self.kill()
            await self.wait()

    async def describe_end(self) -> str:
        """How it ended, and its last words."""
        code = self._process.returncode
        if self._killed:
            how = "killed by the server"
        elif code is not None and code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        else:
            how = f"exit code {code}"
        words = await self.last_words()
        return f"{how}: {words}" if words else how

    async def last_words(self) -> str:
        return await asyncio.to_thread(self._log.tail, self._log_from)

    async def trim_log(self) -> None:
        await asyncio.to_thread(self._log.trim)

    async def _gone_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self.wait()
        except TimeoutError:
            return False
        return True

    def _signal_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):
            return  # nobody is left in it
