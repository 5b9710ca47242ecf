"""Runtimes ``podman`` and ``docker``: each sandbox is a container of the engine that is installed.

A container is started detached and without a network, all capabilities dropped, ``no-new-privileges``, the
engine's own filter of system calls, bounds as the engine can hold them; its pid 1 is our supervisor, which is
spoken to over pipes (``init``). The engine starts and removes; commands never pass through it.

Labels say whose a container is: the folder of its worker (locked as long as that lives), the attempt, and
when its time is over. ``reap`` removes those whose worker is gone, those of this worker that nobody holds (an
engine may carry out what was given up), and, whoever made them, those past their time.

An image is imported into the engine's store once, flat, from the cache that all runtimes share; prepare steps
and recipes are run by bubblewrap. There is no image ``host``: an engine has no folder of the machine as a
root with private writes.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from uuid import uuid4

from rollserve.cancelling import uninterrupted
from rollserve.errors import InvalidInput, SandboxError
from rollserve.sandbox import image as images
from rollserve.sandbox import processes, script
from rollserve.sandbox.base import RuntimeReport, SandboxSpec
from rollserve.sandbox.box import ShellSandbox, workdir_path
from rollserve.sandbox.bubblewrap import BubblewrapRuntime
from rollserve.sandbox.containers import init
from rollserve.sandbox.containers.arguments import LABEL, MarkOf, run_arguments
from rollserve.sandbox.containers.engine import Engine, Facts
from rollserve.sandbox.containers.shelf import EngineImages, Prepared
from rollserve.sandbox.images.reference import Kind
from rollserve.sandbox.images.shelf import ImageSettings
from rollserve.sandbox.nested import STOP_TIMEOUT_S, listen, members, sockets
from rollserve.sandbox.pace import HostPace
from rollserve.sandbox.removal import remove_tree
from rollserve.sandbox.roster import Roster
from rollserve.sandbox.shell import Shell
from rollserve.sandbox.worker_folder import WorkerFolder, left_over

CONNECT_TIMEOUT_S = 30.0
_OVERTIME_S = 60.0
_PER_PROCESS = ("memory_mb", "file_mb", "cpu_s")


@dataclass(frozen=True)
class ContainerSettings:
    """``commands`` are the engines' by runtime, with what comes before a subcommand. ``starts_at_once``
    bounds the starts of this machine, of all workers together. With ``read_only`` the image can't be written
    to, and ``disk_mb`` bounds the rest."""

    commands: dict[str, tuple[str, ...]]
    starts_at_once: int = 4
    read_only: bool = False


DEFAULTS = ContainerSettings(commands={"podman": ("podman",), "docker": ("docker",)})


class ContainerRuntime:
    """Implements ``SpareMaker`` for the engine that ``name`` says."""

    name = ""

    def __init__(
        self,
        *,
        data_dir: Path | None = None,
        images: ImageSettings | None = None,
        containers: ContainerSettings = DEFAULTS,
    ) -> None:
        root = data_dir or Path(tempfile.gettempdir()) / f"rollserve-{os.geteuid()}"
        self._root = (root / self.name).absolute()
        self._settings = containers
        self._engine = Engine(containers.commands[self.name])
        self._maker = BubblewrapRuntime(data_dir=data_dir, images=images)
        self.images = self._maker.images
        self._shelf = EngineImages(self._engine, self.images)
        self._pace = HostPace(self._root, containers.starts_at_once)
        self._home: WorkerFolder | None = None
        self._facts: Facts | None = None
        self._failure = ""
        self._held: set[str] = set()
        self._roster: Roster | None = None

    def report(self) -> RuntimeReport:
        facts = self._find()
        if facts is None:
            remedy = f"install {self.name} and start what it needs, or use another runtime"
            return RuntimeReport(
                name=self.name, usable=False, isolated=True, detail=self._failure, remedy=remedy
            )
        holds = (*facts.holds, *(("disk_mb",) if self._settings.read_only else ()))
        return RuntimeReport(
            name=self.name,
            usable=True,
            isolated=True,
            detail="; ".join(_details(facts, holds)),
            enforces=holds,
            per_process=tuple(name for name in _PER_PROCESS if name not in holds),
            can=("listen", "connect"),
        )

    def _find(self) -> Facts | None:
        """Asked once; blocking."""
        if self._facts is None:
            try:
                facts = self._engine.facts()
            except SandboxError as error:
                self._failure = error.message
                return None
            if not facts.rootless and os.geteuid() != 0:
                self._failure = f"{self.name} runs as root and this process does not: run it rootless"
                return None
            self._facts = facts
        return self._facts

    def check_image(self, image: str) -> None:
        kind = self.images.check(image).kind
        if kind is Kind.HOST:
            raise InvalidInput(
                f"the runtime {self.name} has no image 'host'", field="image", hint="bubblewrap has"
            )
        if kind is Kind.FOLDER:
            images.check(image, uid=os.geteuid())

    async def create(self, spec: SandboxSpec, *, owner: str, ttl_s: float) -> ShellSandbox:
        sandbox = await self._start(spec, owner=owner, ttl_s=ttl_s)
        await sandbox.adopt(spec, ttl_s=ttl_s)
        return sandbox

    async def create_spare(self, spec: SandboxSpec, *, ttl_s: float) -> ShellSandbox:
        """``SpareMaker``."""
        return await self._start(spec, owner="", ttl_s=ttl_s)

    async def _start(self, spec: SandboxSpec, *, owner: str, ttl_s: float) -> ShellSandbox:
        """Files and environment are not there yet: a command line can be read by others."""
        if spec.snapshot:
            raise InvalidInput(f"the runtime {self.name} has no snapshots", field="snapshot")
        facts = await asyncio.to_thread(self._find)
        if facts is None:
            raise SandboxError(self._failure, operation="sandbox.start", hint="`rollserve doctor`")
        self.check_image(spec.image)
        _check_mounts(spec)
        image, let_go = await self.images.take(spec.image, spec.prepare)
        sandbox_id = f"{self.name}-{uuid4().hex}"
        self._held.add(sandbox_id)
        try:
            prepared = await self._shelf.prepared(image)
            async with self._pace.place():
                return await self._start_one(sandbox_id, prepared, spec, owner=owner, ttl_s=ttl_s)
        except BaseException:
            await uninterrupted(self._engine.remove([sandbox_id]))
            self._held.discard(sandbox_id)
            raise
        finally:
            let_go()  # the engine has a copy

    async def _start_one(
        self, sandbox_id: str, prepared: Prepared, spec: SandboxSpec, *, owner: str, ttl_s: float
    ) -> ShellSandbox:
        roster = self._roster = self._roster or Roster()
        pid = await self._run(sandbox_id, prepared, spec, owner=owner, ttl_s=ttl_s)
        wires = await asyncio.to_thread(
            init.connect, pid, sandbox_id, workdir=prepared.workdir, timeout_s=CONNECT_TIMEOUT_S
        )

        async def stop(shell: Shell) -> None:
            await self._stop(sandbox_id, pid)
            roster.forget(sandbox_id)

        def make() -> ShellSandbox:
            return ShellSandbox(
                sandbox_id,
                wires,
                stop=stop,
                locate=partial(workdir_path, workdir=prepared.workdir),
                members=members,
                listen=partial(listen, uid=os.geteuid()),
                sockets=partial(sockets, uid=os.geteuid()),
            )

        return await roster.start(make, SandboxSpec(), ttl_s=ttl_s)

    async def _run(
        self, sandbox_id: str, prepared: Prepared, spec: SandboxSpec, *, owner: str, ttl_s: float
    ) -> int:
        """Start the container; the pid here of its pid 1. A start that is given up is waited for, so that
        what it made can be removed."""
        assert self._facts is not None
        marks = MarkOf(
            home=await asyncio.to_thread(self._own_home),
            root=self._root,
            owner=owner,
            ends_at=time.time() + ttl_s,
        )
        supervisor = script.supervisor(spec.limits, limit_processes=False)
        line = run_arguments(
            sandbox_id,
            prepared,
            spec,
            marks=marks,
            holds=self._facts.holds,
            keep_id=self._facts.rootless and self.name == "podman",
            read_only=self._settings.read_only,
        )
        await uninterrupted(self._engine.call("run", *line, *init.command(supervisor)))
        shown = await self._engine.call("inspect", "--format", "{{.State.Pid}}", sandbox_id)
        pid = int(shown.strip() or 0)
        if pid <= 0:
            said = await self._engine.call("inspect", "--format", "{{json .State}}", sandbox_id)
            raise SandboxError(
                f"the container ended at once: {said.strip()[:400]}", operation="sandbox.start"
            )
        return pid

    async def _stop(self, sandbox_id: str, pid: int) -> None:
        """Removed, and pid 1 gone: then the kernel has ended all that was in it."""
        watch = processes.ProcessWatch([pid])
        try:
            await self._engine.remove([sandbox_id])
            if not await watch.gone(timeout_s=STOP_TIMEOUT_S):
                raise SandboxError(
                    f"container {sandbox_id} is removed and runs on", operation="sandbox.close"
                )
        finally:
            watch.close()
        self._held.discard(sandbox_id)

    def _own_home(self) -> Path:
        """Blocking."""
        if self._home is None:
            self._home = WorkerFolder(self._root / "workers")
        return self._home.path

    async def reap(self) -> int:
        if await asyncio.to_thread(self._find) is None:
            return 0
        found = await self._engine.labels(LABEL)
        with left_over(self._root / "workers") as gone:
            doomed = [name for name, labels in found.items() if self._is_orphan(labels, gone)]
            await self._engine.remove(doomed)
            for folder in gone:
                await asyncio.to_thread(remove_tree, folder)
        return len(doomed)

    def _is_orphan(self, labels: dict[str, str], gone: Sequence[Path]) -> bool:
        marks = MarkOf.read(labels)
        if marks is None:
            return False
        if self._home is not None and marks.home == self._home.path:
            return labels[LABEL] not in self._held
        if time.time() > marks.ends_at + _OVERTIME_S:
            return True
        return marks.root == self._root and (marks.home in gone or not marks.home.exists())

    async def close(self) -> None:
        if self._roster is not None:
            await self._roster.close()
        await self._maker.close()
        if self._home is not None:
            await asyncio.to_thread(self._home.close)
        self._home = self._roster = self._facts = None


class PodmanRuntime(ContainerRuntime):
    name = "podman"


class DockerRuntime(ContainerRuntime):
    name = "docker"


def _details(facts: Facts, holds: Sequence[str]) -> list[str]:
    words = [f"{'rootless' if facts.rootless else 'rootful'}, storage {facts.storage}"]
    if "memory_mb" not in holds:
        words.append("the engine can't bound memory here: it is bounded per process")
    if "processes" not in holds:
        words.append("the engine can't bound the number of processes here")
    if "disk_mb" not in holds:
        words.append("writes to the image are unbounded")
    if facts.storage == "vfs":
        words.append("storage vfs copies the image for each start: set driver=overlay in storage.conf")
    return words


def _check_mounts(spec: SandboxSpec) -> None:
    for outside in spec.mounts.values():
        if not os.path.isdir(outside):
            raise SandboxError(f"{outside} is to be mounted, and is no folder", operation="sandbox.start")
    for outside in spec.sockets.values():
        if not os.path.exists(outside):
            raise SandboxError(f"there is no socket {outside}", operation="sandbox.start")
