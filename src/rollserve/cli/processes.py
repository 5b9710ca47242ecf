"""Processes a command starts beside itself: output in a log each, waited for, stopped for sure."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from rollserve.errors import InfrastructureFailure


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Running:
    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def tail(self, lines: int = 15) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


class Processes:
    """Owns what it started; ``stop`` leaves none behind."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._running: list[Running] = []

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> Running:
        log = self._log_dir / f"{name}.log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        running = Running(name, process, log)
        self._running.append(running)
        return running

    def forget(self, running: Running) -> None:
        """It has ended, and that is as it should be."""
        self._running.remove(running)

    def check(self) -> None:
        """Raises ``InfrastructureFailure`` with its last words when one has died."""
        for running in self._running:
            code = running.process.poll()
            if code not in (None, 0):
                raise InfrastructureFailure(
                    f"{running.name} ended with exit code {code}; {running.log} ends with:\n{running.tail()}"
                )

    async def wait_ready(self, running: Running, url: str, timeout_s: float) -> None:
        """Until ``url`` answers 200. Raises ``InfrastructureFailure``."""
        deadline = time.monotonic() + timeout_s
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            while time.monotonic() < deadline:
                self.check()
                with suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(url) as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(0.2)
        raise InfrastructureFailure(
            f"{running.name} did not answer {url} within {timeout_s:g} s; {running.log} ends with:\n"
            f"{running.tail()}"
        )

    def stop(self, grace_s: float = 10.0) -> None:
        """Newest first: SIGTERM to each process group, SIGKILL after the grace."""
        for running in reversed(self._running):
            with suppress(ProcessLookupError):
                os.killpg(running.process.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        for running in reversed(self._running):
            try:
                running.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(running.process.pid, signal.SIGKILL)
                running.process.wait()
        self._running.clear()
