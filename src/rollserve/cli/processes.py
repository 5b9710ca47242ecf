"""Processes a command starts beside itself: output in a log each, waited for, stopped for sure: by the
command, and by a keeper where the command was killed."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from rollserve.cli import keeper
from rollserve.errors import InfrastructureFailure

_KEPT_FOR_S = keeper.GRACE_S + 10.0
"""How long the keeper may take for what is left after a stop."""


@dataclass(frozen=True, slots=True)
class Running:
    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def tail(self, lines: int = 15) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


class Processes:
    """Owns what it started and the ports it gave out; ``stop`` leaves none behind, nor does the death of
    this process: what was started, and all that descends from it, is then ended by ``cli.keeper``."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._running: list[Running] = []
        self._held: list[socket.socket] = []
        self._mark = secrets.token_hex(16)
        self._keeper: subprocess.Popen[bytes] | None = None

    def port(self) -> int:
        """A TCP port of the loopback interface for one of them. Until ``stop`` the system gives it to nobody
        who asks for any port; a server that asks for this one gets it, and gets it again."""
        held = socket.socket()
        self._held.append(held)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # bound here, it is listened on elsewhere
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> Running:
        self._keep()
        log = self._log_dir / f"{name}.log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {}), keeper.OWNER: self._mark},
                start_new_session=True,
            )
        running = Running(name, process, log)
        self._running.append(running)
        return running

    def _keep(self) -> None:
        """Before the first of them starts: none is ever without a keeper."""
        if self._keeper is None:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", keeper.__file__, self._mark],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )

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
        """Newest first: SIGTERM to each process group, SIGKILL after the grace. The keeper ends what they
        have left."""
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
        self._dismiss()
        while self._held:
            self._held.pop().close()

    def _dismiss(self) -> None:
        kept, self._keeper = self._keeper, None
        if kept is None:
            return
        assert kept.stdin is not None
        kept.stdin.close()
        try:
            kept.wait(_KEPT_FOR_S)
        except subprocess.TimeoutExpired:
            kept.kill()
            kept.wait()
