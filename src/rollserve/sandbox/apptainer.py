"""Runtime ``apptainer``: for clusters where it is what there is. No root, no daemon, no setuid.

A sandbox is one long-lived ``apptainer exec`` in user, pid, mount, network and IPC namespaces of its own,
with our supervisor as its pid 1 and the same pipes as with bubblewrap. Its image is one folder of the cache,
which is unpacked once: a SIF too, so that no ``/dev/fuse`` is needed and a start is faster. What is written
lies in a folder of the worker's disk, over the image by an overlay.

Bounds are those of control groups of ours where they can be made, else resource limits: Apptainer's own flags
need systemd. A sandbox does not die with its worker by itself: a shell that is idle ends, one that is busy
ends when the next worker reaps it. Environment goes in over the shell: Apptainer keeps some names for itself.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from uuid import uuid4

import msgspec

from rollserve.cancelling import uninterrupted
from rollserve.errors import InvalidInput, SandboxError
from rollserve.sandbox import image as images
from rollserve.sandbox import processes, script
from rollserve.sandbox.base import STANDARD_PATH, RuntimeReport, SandboxSpec, exports
from rollserve.sandbox.box import START_TIMEOUT_S, ShellSandbox, workdir_path
from rollserve.sandbox.bubblewrap import NOBODY, BubblewrapRuntime
from rollserve.sandbox.cgroups import Cgroups, Enclosure
from rollserve.sandbox.images.base import Image
from rollserve.sandbox.images.reference import Kind
from rollserve.sandbox.images.shelf import ImageSettings, ImageShelf
from rollserve.sandbox.nested import (
    STOP_TIMEOUT_S,
    first_child,
    listen,
    members,
    sockets,
    stop_nested,
)
from rollserve.sandbox.pace import HostPace
from rollserve.sandbox.removal import remove_tree
from rollserve.sandbox.rootfs import Rootfs, rootfs_of
from rollserve.sandbox.roster import Roster
from rollserve.sandbox.shell import Shell
from rollserve.sandbox.wires import Launch, wire
from rollserve.sandbox.worker_folder import WorkerFolder, left_over

MARKER = "ROLLSERVE_SANDBOX"
REMEDY = "install Apptainer 1.2 or later, allow unprivileged user namespaces, or use another runtime"
_PER_PROCESS = ("memory_mb", "file_mb", "cpu_s")
_PROBE_TIMEOUT_S = 10.0
_OWN_TASKS = 24
"""Threads of Apptainer itself, which are in a sandbox's control group; the resource limit counts without."""

_LEFT_OUT = "hostfs,bind-paths,tmp,sys,home"
_INSIDE = (("proc", 0o755), ("sys", 0o755), ("dev", 0o755), ("tmp", 0o1777))


@dataclass(frozen=True)
class ApptainerSettings:
    """``command`` with what comes before a subcommand; ``starts_at_once`` bounds the starts of this
    machine."""

    command: tuple[str, ...] = ("apptainer",)
    starts_at_once: int = 8


class ApptainerRuntime:
    """Implements ``SpareMaker``. ``run_as`` is the user of sandboxes when the worker runs as root."""

    name = "apptainer"

    def __init__(
        self,
        *,
        data_dir: Path | None = None,
        images: ImageSettings | None = None,
        cgroup: Path | None = None,
        apptainer: ApptainerSettings = ApptainerSettings(),
        run_as: int = NOBODY,
    ) -> None:
        root = data_dir or Path(tempfile.gettempdir()) / f"rollserve-{os.geteuid()}"
        self._uid = run_as if os.geteuid() == 0 else os.geteuid()
        self._data = root.absolute()
        program, *options = apptainer.command
        self._command = (shutil.which(program) or program, *options)
        self._cgroup = cgroup
        self._maker = BubblewrapRuntime(data_dir=data_dir, images=images, run_as=run_as)
        settings = images or ImageSettings(folder=root / "images")
        self.images = ImageShelf(settings, user=self._uid, bench=self._maker, flat=True)
        self._pace = HostPace(self._data / self.name, apptainer.starts_at_once)
        self._failure: str | None = None
        self._cgroups: Cgroups | None = None
        self._home: WorkerFolder | None = None
        self._roster: Roster | None = None

    def report(self) -> RuntimeReport:
        failure = self._find()
        if failure:
            return RuntimeReport(name=self.name, usable=False, isolated=True, detail=failure, remedy=REMEDY)
        whole = self._find_cgroups().limits
        enforces = tuple(dict.fromkeys(("processes", *whole)))
        return RuntimeReport(
            name=self.name,
            usable=True,
            isolated=True,
            detail="; ".join(_details(self._uid, whole)),
            enforces=enforces,
            per_process=tuple(name for name in _PER_PROCESS if name not in enforces),
            can=("listen", "connect"),
        )

    def _find(self) -> str:
        """Why it can't be used, empty when it can; tried once. Blocking."""
        if self._failure is None:
            self._failure = self._tried()
            if self._failure and self._home is not None:
                self._home.close()
                self._home = None
        return self._failure

    def _tried(self) -> str:
        if not os.path.exists(self._command[0]):
            return f"there is no command {self._command[0]}"
        with tempfile.TemporaryDirectory(prefix="rollserve-apptainer-") as name:
            root, box = Path(name) / "root", Path(name) / "box"
            os.chmod(name, 0o755)
            root.mkdir()
            self._make_box(box, "/workspace")
            line = [*self._command, *_arguments(box, "/workspace", {}, {}), str(root), "/no/such/program"]
            try:
                done = subprocess.run(
                    line,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    env=_outer_env(box, ""),
                    timeout=_PROBE_TIMEOUT_S,
                    cwd="/",
                    check=False,
                    user=self._identity(),
                    group=self._identity(),
                    extra_groups=None if self._identity() is None else (),
                )
            except (OSError, subprocess.SubprocessError) as error:
                return f"apptainer can't be used: {error}"
            finally:
                remove_tree(box)
        said = done.stderr.decode(errors="replace").strip()
        return "" if "/no/such/program" in said else f"apptainer can't be used: {said[-500:]}"

    def _find_cgroups(self) -> Cgroups:
        """Blocking."""
        if self._cgroups is None:
            self._cgroups = Cgroups(delegated=self._cgroup)
        return self._cgroups

    def check_image(self, image: str) -> None:
        kind = self.images.check(image).kind
        if kind is Kind.HOST:
            raise InvalidInput(
                "the runtime apptainer has no image 'host'", field="image", hint="bubblewrap has"
            )
        if kind is Kind.FOLDER:
            images.check(image, uid=self._uid)

    async def create(self, spec: SandboxSpec, *, owner: str, ttl_s: float) -> ShellSandbox:
        sandbox = await self.create_spare(spec, ttl_s=ttl_s)
        await sandbox.adopt(spec, ttl_s=ttl_s)
        return sandbox

    async def create_spare(self, spec: SandboxSpec, *, ttl_s: float) -> ShellSandbox:
        """``SpareMaker``."""
        if spec.snapshot:
            raise InvalidInput("the runtime apptainer has no snapshots", field="snapshot")
        failure = await asyncio.to_thread(self._find)
        if failure:
            raise SandboxError(failure, operation="sandbox.start", hint=REMEDY)
        self.check_image(spec.image)
        image, let_go = await self.images.take(spec.image, spec.prepare)
        try:
            rootfs = await asyncio.to_thread(self._look_at, image)
            async with self._pace.place():
                return await self._start(image, rootfs, spec, ttl_s=ttl_s, let_go=let_go)
        except BaseException:
            let_go()
            raise

    def _look_at(self, image: Image) -> Rootfs:
        store = self.images.store
        layers = [store.folder(layer) for layer in image.layers]
        return rootfs_of(image, layers, uid=self._uid, overlays=True, empty=store.empty)

    async def _start(
        self, image: Image, rootfs: Rootfs, spec: SandboxSpec, *, ttl_s: float, let_go: Callable[[], None]
    ) -> ShellSandbox:
        roster = self._roster = self._roster or Roster()
        sandbox_id = f"apptainer-{uuid4().hex}"
        box = await asyncio.to_thread(self._new_box, sandbox_id, rootfs.workdir)
        limits = msgspec.structs.replace(spec.limits, processes=spec.limits.processes + _OWN_TASKS)
        enclosure = Enclosure(self._find_cgroups, sandbox_id, limits)

        async def stop(shell: Shell) -> None:
            await stop_nested(shell)
            await asyncio.to_thread(enclosure.end)
            await asyncio.to_thread(_remove, box)
            roster.forget(sandbox_id)
            let_go()

        def make() -> ShellSandbox:
            return ShellSandbox(
                sandbox_id,
                wire(self._launch(box, self._folder_of(image), rootfs, spec)),
                stop=stop,
                locate=partial(workdir_path, workdir=rootfs.workdir),
                members=members,
                listen=partial(listen, uid=self._uid),
                sockets=partial(sockets, uid=self._uid),
                admit=lambda shell: enclosure.admit(shell.process.pid),
            )

        try:
            sandbox = await roster.start(make, SandboxSpec(), ttl_s=ttl_s)
        except BaseException:
            await uninterrupted(asyncio.to_thread(_remove, box))
            raise
        try:
            await sandbox.exec(exports(_inner_env(rootfs)), timeout_s=START_TIMEOUT_S)
        except BaseException:
            await uninterrupted(sandbox.close())
            raise
        return sandbox

    def _folder_of(self, image: Image) -> str:
        return image.base or str(self.images.store.folder(image.layers[0]))

    def _launch(self, box: Path, folder: str, rootfs: Rootfs, spec: SandboxSpec) -> Launch:
        supervisor = script.supervisor(spec.limits, limit_processes=True)
        line = _arguments(box, rootfs.workdir, spec.mounts, spec.sockets)
        return Launch(
            argv=[*self._command, *line, folder, "/bin/sh", "-c", supervisor],
            env=_outer_env(box, box.name),
            workdir=rootfs.workdir,
            cwd="/",
            identity=self._identity(),
            user=self._identity(),
            find_supervisor=first_child,
        )

    def _identity(self) -> int | None:
        """Whom to become before anything is started; None where that is this process's user."""
        return None if self._uid == os.geteuid() else self._uid

    # -- folders ------------------------------------------------------------------------------

    def _roots(self) -> Iterator[tuple[Path, str]]:
        """Where a folder of ours may lie, with what its name begins."""
        place = next(each for each in (self._data, *self._data.parents) if each.exists())
        if images.first_barred(place, uid=self._uid) is None:
            yield self._data / self.name / "workers", ""
        yield Path(tempfile.gettempdir()), "rollserve-apptainer-worker-"

    def _new_box(self, sandbox_id: str, workdir: str) -> Path:
        if self._home is None:
            root, prefix = next(self._roots())
            self._home = WorkerFolder(root, prefix=prefix, mode=0o755)
        box = self._home.path / sandbox_id
        self._make_box(box, workdir)
        return box

    def _make_box(self, box: Path, workdir: str) -> None:
        """An overlay's folders, with what Apptainer mounts over and the working directory in them."""
        upper = box / "upper"
        for folder in (box, upper, box / "work"):
            folder.mkdir()
        for name, mode in (*_INSIDE, (workdir.strip("/"), 0o755)):
            (upper / name).mkdir(parents=True, exist_ok=True)
            (upper / name).chmod(mode)
        if self._uid != os.geteuid():
            for folder in (box, *box.rglob("*")):
                os.chown(folder, self._uid, self._uid)

    async def reap(self) -> int:
        return await asyncio.to_thread(self._reap)

    def _reap(self) -> int:
        """End the sandboxes of workers that no longer hold their lock. Blocking."""
        count = 0
        for root, prefix in self._roots():
            with left_over(root, prefix=prefix) as folders:
                for folder in folders:
                    count += _end_all(folder)
                    remove_tree(folder)
        self.images.store.reap()
        return count

    async def close(self) -> None:
        await self.images.close()
        await self._maker.close()
        if self._roster is not None:
            await self._roster.close()
        if self._home is not None:
            await asyncio.to_thread(self._home.close)
        if self._cgroups is not None:
            await asyncio.to_thread(self._cgroups.close)
        self._home = self._roster = self._cgroups = self._failure = None


def _arguments(box: Path, workdir: str, mounts: dict[str, str], sockets: dict[str, str]) -> list[str]:
    """Of ``exec``, up to the image. Nothing secret is in it: others can list it."""
    line = ["--quiet", "exec", "--userns", "--containall", "--pid", "--no-init", "--net", "--network", "none"]
    line += ["--uts", "--hostname", "sandbox", "--no-privs", "--no-home", "--cleanenv", "--no-eval"]
    line += ["--no-mount", _LEFT_OUT, "--overlay", str(box), "--pwd", workdir]
    for inside, outside in mounts.items():
        line += ["--mount", f"type=bind,source={outside},destination={inside},ro"]
    for inside, outside in sockets.items():
        line += ["--mount", f"type=bind,source={outside},destination={inside}"]
    return line


def _outer_env(box: Path, sandbox_id: str) -> dict[str, str]:
    """Of Apptainer itself; what begins with ``APPTAINERENV_`` is the sandbox's."""
    return {
        "PATH": STANDARD_PATH,
        "HOME": str(box),
        "TMPDIR": str(box),
        f"APPTAINERENV_{MARKER}": sandbox_id,
    }


def _inner_env(rootfs: Rootfs) -> dict[str, str]:
    return {
        "PATH": STANDARD_PATH,
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        **rootfs.env,
        "WORKSPACE": rootfs.workdir,
    }


def _remove(box: Path) -> None:
    try:
        remove_tree(box)
    except OSError as error:
        raise SandboxError(f"{box} is left over: {error}", operation="sandbox.close") from error


def _end_all(folder: Path) -> int:
    """Each sandbox's pid 1 carries its name; with it goes all that is inside."""
    names = [place.name for place in folder.iterdir() if place.is_dir()]
    for name in names:
        entry = f"{MARKER}={name}".encode()
        left = processes.kill_all(partial(processes.pids_with_environment, entry), within_s=STOP_TIMEOUT_S)
        if left:
            raise SandboxError(f"processes {left} could not be killed", operation="sandbox.close")
    return len(names)


def _details(uid: int, whole: Sequence[str]) -> Iterator[str]:
    yield f"sandboxes run as uid {uid}"
    if "memory_mb" not in whole:
        yield "no memory control group: memory is bounded per process"
    yield "writes are on disk and unbounded"
    yield "no system call filter"
    yield "user namespaces can be made inside"
