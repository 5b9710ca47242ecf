"""Runtime ``bubblewrap``: rootless sandboxes from user namespaces, a few milliseconds a start.

A sandbox is three processes: bubblewrap, the supervisor as pid 1 of its own pid namespace, the shell.
When pid 1 is gone the kernel has ended all of them, which is what ``close`` confirms. The sandbox dies
with the worker (parent-death signal); its files are in memory.

No network, no capability, own user, pid, ipc, uts and cgroup namespaces, a filter of system calls
(``seccomp``). All that is written lies in one tmpfs with a size (``writable``). Memory, processes and
processor time hold for the sandbox where a control group can be made (``cgroups``), else as resource limits
set inside: memory then counts per process. A worker that runs as root gives its sandboxes the user
``run_as``: root's own id would void the process limit and open root's files.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from uuid import uuid4

from rollserve.cancelling import uninterrupted
from rollserve.errors import SandboxError
from rollserve.sandbox import image as images
from rollserve.sandbox import script
from rollserve.sandbox.base import STANDARD_PATH, RuntimeReport, SandboxLimits, SandboxSpec
from rollserve.sandbox.box import START_TIMEOUT_S, ShellSandbox, workdir_path
from rollserve.sandbox.bwrap_host import (
    HOME,
    REMEDY,
    Host,
    HostFinder,
    Start,
    arguments,
    opened_filter,
    prepared,
)
from rollserve.sandbox.cgroups import Cgroups, Enclosure
from rollserve.sandbox.images.base import Image
from rollserve.sandbox.images.bench import BenchWork, Writes, run_work
from rollserve.sandbox.images.reference import Kind
from rollserve.sandbox.images.shelf import ImageSettings, ImageShelf
from rollserve.sandbox.images.snapshot import snapshotted
from rollserve.sandbox.nested import first_child, listen, members, sockets, stop_nested
from rollserve.sandbox.rootfs import Rootfs, rootfs_of
from rollserve.sandbox.roster import Roster
from rollserve.sandbox.shell import Shell
from rollserve.sandbox.snapshot import copy_written
from rollserve.sandbox.wires import Launch, wire

NOBODY = 65534
_WORK_LIMITS = SandboxLimits(memory_mb=16384, processes=4096, file_mb=4096, disk_mb=16384)
"""Of a build, which whoever started it answers for, and of prepare steps."""

_PER_PROCESS = ("memory_mb", "file_mb", "cpu_s")


class BubblewrapRuntime:
    """Implements ``Runtime``. ``run_as`` is the user of sandboxes when the worker runs as root;
    ``bwrap`` another binary than the packaged one (0.11 or later), ``cgroup`` a delegated control group of
    version 2."""

    name = "bubblewrap"

    def __init__(
        self,
        *,
        data_dir: Path | None = None,
        images: ImageSettings | None = None,
        run_as: int = NOBODY,
        bwrap: Path | None = None,
        cgroup: Path | None = None,
    ) -> None:
        self._finder = HostFinder(data_dir=data_dir, run_as=run_as, bwrap=bwrap)
        self._cgroup = cgroup
        self._cgroups: Cgroups | None = None
        self._host: Host | None = None
        self._roster: Roster | None = None
        self._rootfs: dict[str, Rootfs] = {}
        folder = (data_dir or Path(tempfile.gettempdir()) / f"rollserve-{os.geteuid()}") / "images"
        self.images = ImageShelf(images or ImageSettings(folder=folder), user=self._finder.uid(), bench=self)

    def report(self) -> RuntimeReport:
        host, whole = self._finder.find(), self._find_cgroups().limits
        if host is None:
            return RuntimeReport(
                name=self.name, usable=False, isolated=True, detail=self._finder.failure, remedy=REMEDY
            )
        enforces = ("processes", *(("disk_mb",) if host.layer is not None else ()), *whole)
        return RuntimeReport(
            name=self.name,
            usable=True,
            isolated=True,
            detail="; ".join(_details(host, whole)),
            enforces=tuple(dict.fromkeys(enforces)),
            per_process=tuple(name for name in _PER_PROCESS if name not in enforces),
            can=("listen", "connect", *(("snapshot",) if host.layer is not None else ())),
        )

    def check_image(self, image: str) -> None:
        if self.images.check(image).kind in (Kind.HOST, Kind.FOLDER):
            images.check(image, uid=self._finder.uid())

    async def create(self, spec: SandboxSpec, *, owner: str, ttl_s: float) -> ShellSandbox:
        host = await self._usable_host()
        if spec.mounts:
            await asyncio.to_thread(_check_mounts, spec, host.uid)
        wanted = (spec.snapshot, ()) if spec.snapshot else (spec.image, spec.prepare)
        image, let_go = await self.images.take(*wanted)
        try:
            rootfs = self._rootfs.get(image.id)
            if rootfs is None:
                rootfs = await asyncio.to_thread(self._look_at, host, image)
                if not spec.snapshot:  # of which there may be any number
                    self._rootfs[image.id] = rootfs
            start = Start(rootfs, spec)
            keep = partial(self._keep, host, start, image)
            return await self._start(host, start, ttl_s=ttl_s, let_go=let_go, keep=keep)
        except BaseException:
            let_go()
            raise

    async def create_spare(self, spec: SandboxSpec, *, ttl_s: float) -> ShellSandbox:
        """``SpareMaker``."""
        return await self.create(spec, owner="", ttl_s=ttl_s)

    async def work(self, work: BenchWork, writes: Writes) -> None:
        """``Bench``: the commands of a build or of prepare steps, in a sandbox whose writes are kept."""
        host = await self._usable_host()
        rootfs = await asyncio.to_thread(self._look_at, host, work.image, writes=True)
        spec = SandboxSpec(image=work.image.source, env=work.env, limits=_WORK_LIMITS)
        start = Start(rootfs, spec, writes)
        sandbox = await self._start(host, start, ttl_s=work.timeout_s + START_TIMEOUT_S, let_go=_nothing)
        try:
            await run_work(sandbox, work)
        finally:
            await uninterrupted(sandbox.close())

    async def _usable_host(self) -> Host:
        host = self._host
        if host is None:
            host = self._host = await asyncio.to_thread(self._find_all)
        if host is None:
            raise SandboxError(self._finder.failure, operation="sandbox.start", hint=REMEDY)
        return host

    def _find_all(self) -> Host | None:
        host = self._finder.find()
        if host is not None:
            self._finder.leave_word(self._find_cgroups().folders)
        return host

    def _find_cgroups(self) -> Cgroups:
        """Blocking."""
        if self._cgroups is None:
            self._cgroups = Cgroups(delegated=self._cgroup)
        return self._cgroups

    def _look_at(self, host: Host, image: Image, *, writes: bool = False) -> Rootfs:
        """Looked up once per image: the file system may be slow, and images don't change their top."""
        if image.base:
            images.check(image.base, uid=host.uid)
        store = self.images.store
        layers = [store.folder(layer) for layer in image.layers]
        rootfs = rootfs_of(
            image, layers, uid=host.uid, overlays=host.overlays, empty=store.empty, writes=writes
        )
        return prepared(host, rootfs)

    async def _keep(self, host: Host, start: Start, image: Image, shell: Shell) -> str:
        """A snapshot of the sandbox, which is an image of the cache."""
        pid = shell.supervisor_pid()
        if host.layer is None or pid is None:
            raise SandboxError("what it writes can't be found, or it is gone", operation="sandbox.snapshot")
        most_bytes = start.spec.limits.disk_mb << 20
        copy = partial(_copy, pid, start.rootfs, host.uid, most_bytes)
        made = await snapshotted(self.images.store, image, copy, whole_tmp=not start.rootfs.keeps_tmp)
        return made.id

    async def _start(
        self,
        host: Host,
        start: Start,
        *,
        ttl_s: float,
        let_go: Callable[[], None],
        keep: Callable[[Shell], Awaitable[str]] | None = None,
    ) -> ShellSandbox:
        """``let_go`` is called once the sandbox is gone, ``keep`` makes a snapshot of it."""
        if self._roster is None:
            self._roster = Roster()
        roster = self._roster
        sandbox_id = f"bwrap-{uuid4().hex}"
        enclosure = Enclosure(self._find_cgroups, sandbox_id, start.spec.limits)

        async def stop(shell: Shell) -> None:
            await stop_nested(shell)
            await asyncio.to_thread(enclosure.end)
            roster.forget(sandbox_id)
            let_go()

        def make() -> ShellSandbox:
            return ShellSandbox(
                sandbox_id,
                wire(_launch(host, start)),
                stop=stop,
                locate=partial(workdir_path, workdir=start.rootfs.workdir),
                members=members,
                listen=lambda shell: listen(shell, uid=host.uid),
                sockets=lambda shell: sockets(shell, uid=host.uid),
                admit=lambda shell: enclosure.admit(shell.process.pid),
                snapshot=keep,
            )

        return await roster.start(make, start.spec, ttl_s=ttl_s)

    async def reap(self) -> int:
        """Processes die with the thread that started them, and take their mounts along; what is left of a
        worker that was killed are its control groups, a folder, and images half made."""
        cgroups = await asyncio.to_thread(self._find_cgroups)
        left = await asyncio.to_thread(self._finder.reap)
        await asyncio.to_thread(self.images.store.reap)
        return await asyncio.to_thread(cgroups.reap, left)

    async def close(self) -> None:
        await self.images.close()
        if self._roster is not None:
            await self._roster.close()
        await asyncio.to_thread(self._finder.close)
        if self._cgroups is not None:
            await asyncio.to_thread(self._cgroups.close)
        self._host = self._cgroups = None
        self._rootfs.clear()


def _details(host: Host, whole: tuple[str, ...]) -> Iterator[str]:
    yield f"sandboxes run as uid {host.uid}"
    if "memory_mb" not in whole:
        yield "no memory control group: memory is bounded per process, shared memory and the kernel's not"
    if host.layer is None:
        yield "writes to the image are unbounded"
    if host.filter is None:
        yield "no system call filter"
    if not host.overlays:
        yield "no overlays: the image is read-only"
    if not host.userns_disabled:
        yield "user namespaces can be made inside"


def _launch(host: Host, start: Start) -> Launch:
    """Secrets of the worker's environment stay out: the sandbox gets this one and nothing else."""
    rootfs, spec = start.rootfs, start.spec
    env = {
        "PATH": STANDARD_PATH,
        "HOME": HOME,
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        **rootfs.env,
        "WORKSPACE": rootfs.workdir,
        **spec.env,
    }
    supervisor = script.supervisor(spec.limits, limit_processes=True)
    filters = opened_filter(host)
    return Launch(
        argv=[*arguments(host, start, filters), "/bin/sh", "-c", supervisor],
        env=env,
        workdir=rootfs.workdir,
        identity=host.identity,
        user=host.uid if host.uid != os.geteuid() else None,
        find_supervisor=first_child,
        hand_over=filters,
    )


def _copy(pid: int, rootfs: Rootfs, uid: int, most_bytes: int, target: Path) -> None:
    copy_written(pid, rootfs, uid=uid, most_bytes=most_bytes, target=target)


def _nothing() -> None:
    """Nobody waits for the end of a sandbox that an image is made in."""


def _check_mounts(spec: SandboxSpec, uid: int) -> None:
    for outside in spec.mounts.values():
        if not os.path.isdir(outside):
            raise SandboxError(f"{outside} is to be mounted, and is no folder", operation="sandbox.start")
        barred = images.first_barred(Path(outside), uid=uid)
        if barred is not None:
            raise SandboxError(
                f"{outside} can't be entered by user {uid}",
                operation="sandbox.start",
                hint=f"chmod o+x {barred}",
            )
