"""A machine of SWE-ReX's on this one: its own server under bubblewrap, spoken to by its client over HTTP."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from swerex.deployment.abstract import AbstractDeployment
from swerex.exceptions import DeploymentNotStartedError
from swerex.runtime.abstract import IsAliveResponse
from swerex.runtime.remote import RemoteRuntime

from rollserve.sandbox.remote.swerex import RemoteSettings, SwerexRuntime
from rollserve.testing.machine import end_machine, machine


def _command(port: int, token: str) -> list[str]:
    """With this machine's network, for the server."""
    server = ["-m", "swerex", "--host", "127.0.0.1", "--port", str(port), "--auth-token", token]
    return machine([sys.executable, *server], "--as-pid-1")


def _serve(port: int, token: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        _command(port, token),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"PATH": os.environ["PATH"], "HOME": "/tmp", "SWE_REX_LOG_STREAM_LEVEL": "ERROR"},
    )


class ServerDeployment(AbstractDeployment):
    """One server a machine. Once it is started, ``told`` is what makes SWE-ReX's own deployment of it."""

    def __init__(self) -> None:
        self.logger = logging.getLogger("rollserve.testing.swerex")
        self._process: subprocess.Popen[bytes] | None = None
        self._runtime: RemoteRuntime | None = None
        self.told: dict[str, Any] = {}

    def add_hook(self, hook: Any) -> None:
        """None is called."""

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:
        return await self.runtime.is_alive(timeout=timeout)

    async def start(self, *args: Any, **kwargs: Any) -> None:
        token = secrets.token_hex(16)
        with socket.socket() as held:  # until the server listens there, nobody else is given the port
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", 0))
            port = held.getsockname()[1]
            self._process = await asyncio.to_thread(_serve, port, token)
            told = {"auth_token": token, "host": "http://127.0.0.1", "port": port, "timeout": 5.0}
            self.told = {"type": "remote", **told}
            self._runtime = RemoteRuntime(logger=self.logger, **told)
            await self._runtime.wait_until_alive(timeout=60.0)

    async def stop(self, *args: Any, **kwargs: Any) -> None:
        process, self._process = self._process, None
        self._runtime = None
        if process is not None:
            await end_machine(process)

    @property
    def runtime(self) -> RemoteRuntime:
        if self._runtime is None:
            raise DeploymentNotStartedError
        return self._runtime

    def __del__(self) -> None:
        """SWE-ReX's own starts tasks from wherever the garbage collector runs."""


def make_runtime(*, data_dir: Path) -> SwerexRuntime:
    return SwerexRuntime(data_dir=data_dir, remote=RemoteSettings(make=lambda image: ServerDeployment()))
