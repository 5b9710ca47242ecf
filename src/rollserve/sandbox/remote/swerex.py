"""Runtime ``remote``: sandboxes of providers that SWE-ReX knows (Modal, Fargate, Daytona, Docker elsewhere, a
server of its own), one adapter for all.

SWE-ReX starts and stops a machine with its small server; what is asked of that is one call, ``execute``,
which its server answers one at a time. Shells, programs and files are our agent's (``agent``), the same
everywhere. What a provider isolates, bounds and lets out to the network is the provider's: nothing is
claimed, unless the settings vouch for it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from rollserve import installing
from rollserve.cancelling import uninterrupted
from rollserve.errors import InvalidInput, SandboxError
from rollserve.sandbox.base import RuntimeReport, SandboxSpec
from rollserve.sandbox.images.reference import HOST, Kind, parse
from rollserve.sandbox.pace import HostPace
from rollserve.sandbox.remote.box import RemoteSandbox
from rollserve.sandbox.roster import close_all

if TYPE_CHECKING:
    from swerex.deployment.abstract import AbstractDeployment

STOP_TIMEOUT_S = 120.0
_ANSWER_SLACK_S = 10.0


@dataclass(frozen=True)
class RemoteSettings:
    """``deployment`` is SWE-ReX's configuration (``type`` and its fields); a task's image takes the place
    of its ``image``. ``make`` makes deployments instead of it, from the image. ``isolated`` says that whoever
    runs this vouches for isolation, and for no network. ``start_s`` bounds the start of one machine."""

    deployment: Mapping[str, Any] = field(default_factory=dict)
    make: Callable[[str], AbstractDeployment] | None = None
    isolated: bool = False
    starts_at_once: int = 8
    start_s: float = 600.0


class SwerexDoor:
    """Implements ``Door`` over a started deployment."""

    def __init__(self, deployment: AbstractDeployment) -> None:
        self._deployment = deployment
        self._stopped = False

    async def call(self, script: str, *, timeout_s: float) -> str:
        from swerex.runtime.abstract import Command

        command = Command(command=["/bin/sh", "-c", script], timeout=timeout_s)
        try:
            async with asyncio.timeout(timeout_s + _ANSWER_SLACK_S):
                answer = await self._deployment.runtime.execute(command)
        except Exception as error:  # what a provider's client raises is its own
            raise SandboxError(
                f"the machine does not answer: {error!r}", operation="sandbox.remote"
            ) from error
        return answer.stdout

    async def stop(self) -> None:
        if self._stopped:
            return
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._deployment.stop()
        except Exception as error:  # likewise
            raise SandboxError(
                f"the machine was not stopped: {error!r}", operation="sandbox.close"
            ) from error
        self._stopped = True


class SwerexRuntime:
    """Implements ``Runtime``."""

    name = "remote"

    def __init__(self, *, data_dir: Path | None = None, remote: RemoteSettings = RemoteSettings()) -> None:
        self._settings = remote
        self._pace = HostPace((data_dir or Path("/tmp")).absolute() / self.name, remote.starts_at_once)
        self._open: dict[str, RemoteSandbox] = {}
        self._closed = False

    def report(self) -> RuntimeReport:
        problem = self._problem()
        kind = self._settings.deployment.get("type", "its own")
        return RuntimeReport(
            name=self.name,
            usable=not problem,
            isolated=self._settings.isolated,
            detail=problem or f"SWE-ReX deployment {kind}; isolation, bounds and network are the provider's",
            remedy=_remedy() if problem else "",
            per_process=() if problem else ("memory_mb", "file_mb", "cpu_s"),
            can=() if problem else ("dial",),
        )

    def _problem(self) -> str:
        if importlib.util.find_spec("swerex") is None:
            return "the package swe-rex is not installed"
        if self._settings.make is None and not self._settings.deployment:
            return "no deployment is set"
        return ""

    def check_image(self, image: str) -> None:
        self._image_of(image)

    def _image_of(self, image: str) -> str:
        """As providers name it; empty for the deployment's own."""
        if image == HOST:
            return ""
        reference = parse(image)
        if reference.kind is not Kind.REGISTRY or ("image" not in self._settings.deployment):
            raise InvalidInput(
                f"the runtime remote can't start from {image!r}",
                field="image",
                hint="docker://HOST/NAME:TAG where the deployment is set with an image; 'host' is its own",
            )
        return str(reference.place)

    async def create(self, spec: SandboxSpec, *, owner: str, ttl_s: float) -> RemoteSandbox:
        problem = self._problem()
        if problem:
            raise SandboxError(problem, operation="sandbox.start", hint=_remedy())
        image = self._image_of(spec.image)
        for what in ("prepare", "sockets", "mounts", "snapshot"):
            if getattr(spec, what, None):
                raise InvalidInput(f"the runtime remote has no {what}", field=what)
        sandbox_id = f"remote-{uuid4().hex}"
        async with self._pace.place():
            if self._closed:
                raise SandboxError("the runtime was closed", operation="sandbox.start")
            door = await self._started(image)
            sandbox = RemoteSandbox(sandbox_id, door, spec, on_end=lambda: self._forget(sandbox_id))
            self._open[sandbox_id] = sandbox
            await sandbox.prepare(spec, ttl_s=ttl_s)
        return sandbox

    async def _started(self, image: str) -> SwerexDoor:
        """A machine whose start fails, takes too long or is given up is stopped. SWE-ReX waits for it without
        letting go of its event loop, so that is another one, in a thread."""
        deployment = self._deployment(image)
        door = SwerexDoor(deployment)
        starting = asyncio.ensure_future(asyncio.to_thread(_in_its_own_loop, deployment.start))
        try:
            async with asyncio.timeout(self._settings.start_s):
                await asyncio.shield(starting)
        except asyncio.CancelledError:
            await uninterrupted(self._give_up(starting, door))
            raise
        except Exception as error:  # what a provider's client raises is its own
            await uninterrupted(self._give_up(starting, door))
            message = f"the machine was not started: {error!r}"
            raise SandboxError(message, operation="sandbox.start") from error
        return door

    async def _give_up(self, starting: asyncio.Future[None], door: SwerexDoor) -> None:
        """What was asked for comes all the same; then it is stopped."""
        await asyncio.wait({starting}, timeout=self._settings.start_s)
        try:
            await door.stop()
        except SandboxError:
            if starting.done() and starting.exception() is None:
                raise  # otherwise there may be nothing to stop

    def _deployment(self, image: str) -> AbstractDeployment:
        if self._settings.make is not None:
            deployment = self._settings.make(image)
        else:
            from pydantic import TypeAdapter
            from swerex.deployment.config import DeploymentConfig

            said = {**self._settings.deployment, **({"image": image} if image else {})}
            deployment = TypeAdapter(DeploymentConfig).validate_python(said).get_deployment()
        deployment.logger.setLevel(logging.WARNING)
        return deployment

    def _forget(self, sandbox_id: str) -> None:
        self._open.pop(sandbox_id, None)

    async def reap(self) -> int:
        """SWE-ReX lists no machines: what a killed worker leaves ends by the provider's own time-out."""
        return 0

    async def close(self) -> None:
        self._closed = True
        await close_all(self._open.values())


def _remedy() -> str:
    return f"{installing.extra('remote')}, and set remote.deployment"


def _in_its_own_loop(start: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await start()

    asyncio.run(run())
