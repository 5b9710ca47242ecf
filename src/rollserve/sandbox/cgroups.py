"""Limits that hold for a sandbox as a whole: a control group for each, where this process may make one.

Version 2 where a folder was delegated to us (``delegated``: empty of processes, its controllers handed
down), else each version 1 hierarchy that is writable, below our own group in it. Groups of one worker lie
in one named after its pid and start, so that a later one tells whose are left over. Groups are folders
of ``/sys/fs/cgroup``: what happens here is a few writes to the kernel's memory, and never waits for a disk.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rollserve.errors import SandboxError
from rollserve.sandbox import processes
from rollserve.sandbox.base import SandboxLimits

CGROUPS = Path("/sys/fs/cgroup")
END_WITHIN_S = 10.0
CONTROLLERS = ("memory", "pids", "cpu")
LIMIT_OF = {"memory": "memory_mb", "pids": "processes", "cpu": "cpus"}
_PREFIX = "rollserve-"
_PERIOD_US = 100_000
_PAUSE_S = 0.002


@dataclass
class Group:
    """One sandbox's, over all hierarchies."""

    folders: tuple[Path, ...]
    _closed: bool = field(default=False, init=False)

    def add(self, pids: Iterable[int]) -> None:
        """Take processes in, before anything of the sandbox's own runs in them: what they start later is
        in too. Raises ``SandboxError``."""
        for folder in self.folders:
            for pid in pids:
                try:
                    _write(folder / "cgroup.procs", str(pid))
                except ProcessLookupError:
                    continue
                except OSError as error:
                    raise SandboxError(
                        f"{folder} takes no process: {error}", operation="sandbox.start"
                    ) from error

    def close(self) -> None:
        """End what is left in it and remove it; blocking. Raises ``SandboxError``. Idempotent."""
        if self._closed:
            return
        for folder in self.folders:
            _end(folder)
        self._closed = True


class Enclosure:
    """The group of one sandbox, from when its first processes are there to when all are gone; its calls
    come from threads, in any order. Where no group can be made, it is none."""

    def __init__(self, find: Callable[[], Cgroups], sandbox_id: str, limits: SandboxLimits) -> None:
        self._find, self._sandbox_id, self._limits = find, sandbox_id, limits
        self._group: Group | None = None
        self._ended = False
        self._lock = threading.Lock()

    def admit(self, root: int) -> None:
        """Take in a process with all below it: what starts while this goes on is looked for again."""
        with self._lock:
            if self._ended:
                raise SandboxError("the sandbox is gone", operation="sandbox.start")
            group = self._group = self._find().open(self._sandbox_id, self._limits)
            held: set[int] = set()
            while group is not None and (new := {root, *processes.descendants(root, since_ticks=0)} - held):
                group.add(sorted(new))
                held |= new

    def end(self) -> None:
        with self._lock:
            self._ended = True
            if self._group is not None:
                self._group.close()


class Cgroups:
    """What can be limited here, and the groups of this process. Raises nothing where nothing can be."""

    def __init__(
        self, *, delegated: Path | None = None, root: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")
    ) -> None:
        self._version = 2 if delegated is not None else 1
        found = _delegated(delegated) if delegated is not None else _own_groups(root, own)
        self._bases = {name: place for name, place in found.items() if _takes_groups(place, name)}
        self._name = f"{_PREFIX}{os.getpid()}-{processes.start_ticks(os.getpid())}"

    @property
    def limits(self) -> tuple[str, ...]:
        """Fields of ``SandboxLimits`` that a group can hold here."""
        return tuple(LIMIT_OF[name] for name in CONTROLLERS if name in self._bases)

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where this worker's groups are, or would be."""
        return tuple({base / self._name: None for base in self._bases.values()})

    def open(self, sandbox_id: str, limits: SandboxLimits) -> Group | None:
        """A group with these limits; ``None`` where none can be made. Raises ``SandboxError``."""
        if not self._bases:
            return None
        group = Group(tuple(dict.fromkeys(base / self._name / sandbox_id for base in self._bases.values())))
        try:
            for folder in group.folders:
                self._make_parent(folder.parent)
                folder.mkdir()
            for name, base in self._bases.items():
                for knob, value in knobs(name, self._version, limits):
                    _set(base / self._name / sandbox_id / knob, value)
        except OSError as error:
            group.close()
            raise SandboxError(f"no control group can be made: {error}", operation="sandbox.start") from error
        return group

    def _make_parent(self, parent: Path) -> None:
        parent.mkdir(exist_ok=True)
        if self._version == 2:
            _write(parent / "cgroup.subtree_control", " ".join(f"+{name}" for name in self._bases))

    def reap(self, left: Iterable[Path] = ()) -> int:
        """End and remove the groups of workers that are gone, beside our own and where a worker that was
        somewhere else ``left`` word of them; blocking. How many sandboxes they held."""
        found: set[str] = set()
        beside = (place for base in set(self._bases.values()) for place in base.glob(f"{_PREFIX}*"))
        for parent in {*beside, *(place for place in left if place.name.startswith(_PREFIX))}:
            if not _lives(parent.name):
                found |= {folder.name for folder in _folders(parent)}
                _end(parent)
        return len(found)

    def close(self) -> None:
        """Remove this worker's folder, unless something else of this process still has groups in it."""
        for base in set(self._bases.values()):
            try:
                (base / self._name).rmdir()
            except OSError:
                continue


def _own_groups(root: Path, own: Path) -> dict[str, Path]:
    """Of version 1, by controller: our own group as each hierarchy has it."""
    found: dict[str, Path] = {}
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, names, path = line.split(":", 2)
        for name in set(names.split(",")) & set(CONTROLLERS):
            place = root / name / path.lstrip("/")
            found[name] = (
                place if place.is_dir() else root / name
            )  # a container sees its own group as the top
    return found


def _delegated(folder: Path) -> dict[str, Path]:
    try:
        handed = (folder / "cgroup.controllers").read_text().split()
        wanted = [name for name in CONTROLLERS if name in handed]
        _write(folder / "cgroup.subtree_control", " ".join(f"+{name}" for name in wanted))
    except OSError:
        return {}
    return dict.fromkeys(wanted, folder)


def _takes_groups(base: Path, controller: str) -> bool:
    """Whether a group can be made here that has what its limit is written to."""
    trial = base / f"{_PREFIX}trial-{os.getpid()}-{time.monotonic_ns()}"
    knobs = {"memory": ("memory.max", "memory.limit_in_bytes"), "pids": ("pids.max",)}
    wanted = knobs.get(controller, ("cpu.max", "cpu.cfs_quota_us"))
    try:
        trial.mkdir()
    except OSError:
        return False
    try:
        return any(os.access(trial / knob, os.W_OK) for knob in wanted)
    finally:
        trial.rmdir()


def knobs(controller: str, version: int, limits: SandboxLimits) -> Iterator[tuple[str, str]]:
    """Which files of a group say the limits, and with what."""
    memory = str(limits.memory_mb << 20)
    if controller == "memory" and version == 2:
        yield from (("memory.max", memory), ("memory.swap.max", "0"), ("memory.oom.group", "0"))
    elif controller == "memory":
        yield from (("memory.limit_in_bytes", memory), ("memory.memsw.limit_in_bytes", memory))
    elif controller == "pids":
        yield "pids.max", str(limits.processes)
    elif limits.cpus is not None:
        quota = max(1000, round(limits.cpus * _PERIOD_US))
        if version == 2:
            yield "cpu.max", f"{quota} {_PERIOD_US}"
        else:
            yield from (("cpu.cfs_period_us", str(_PERIOD_US)), ("cpu.cfs_quota_us", str(quota)))


def _set(knob: Path, value: str) -> None:
    """Kernels without swap accounting have no limit of it, and need none."""
    if knob.exists() or ("swap" not in knob.name and "memsw" not in knob.name):
        _write(knob, value)


def _write(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _lives(name: str) -> bool:
    """Whether the process that a folder is named after is there."""
    pid, _, ticks = name.removeprefix(_PREFIX).partition("-")
    return not (pid.isdigit() and ticks.isdigit()) or processes.start_ticks(int(pid)) == int(ticks)


def _folders(folder: Path) -> list[Path]:
    try:
        return [place for place in folder.iterdir() if place.is_dir()]
    except FileNotFoundError:
        return []


def _end(folder: Path) -> None:
    """Kill what is in a group and below, and remove it. Raises ``SandboxError``."""
    for inner in _folders(folder):
        _end(inner)
    deadline = time.monotonic() + END_WITHIN_S
    while not _removed(folder):
        if time.monotonic() > deadline:
            raise SandboxError(f"the control group {folder} is left over", operation="sandbox.close")
        for pid in _pids(folder):
            processes.send_signal(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
            raise SandboxError(f"{folder} can't be removed: {error}", operation="sandbox.close") from error
        return False
    return True


def _pids(folder: Path) -> list[int]:
    try:
        return [int(word) for word in (folder / "cgroup.procs").read_text().split()]
    except OSError:
        return []
