"""The command line of one container. Nothing secret is in it: others can list it."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollserve.sandbox.base import STANDARD_PATH, SandboxLimits, SandboxSpec
from rollserve.sandbox.containers.init import MARKER
from rollserve.sandbox.containers.shelf import Prepared

LABEL = "rollserve.sandbox"
_HOME, _ROOT, _OWNER, _ENDS = ("rollserve.home", "rollserve.root", "rollserve.owner", "rollserve.ends-at")
_MOST_FILES, _MOST_TASKS = 65536, 32768
"""Of open files, and of the processes of a user: of all its containers together."""

_SHM_SHARE, _TMP_SHARE = 8, 4
"""Parts of ``disk_mb`` that ``/dev/shm`` and ``/tmp`` get where the image is read-only."""


@dataclass(frozen=True)
class MarkOf:
    """What a container's labels say: its worker's folder, where the folders of such workers are, the attempt,
    and when (seconds since 1970) its time is over."""

    home: Path
    root: Path
    owner: str
    ends_at: float

    def arguments(self, sandbox_id: str) -> list[str]:
        labels = {
            LABEL: sandbox_id,
            _HOME: str(self.home),
            _ROOT: str(self.root),
            _OWNER: self.owner,
            _ENDS: f"{self.ends_at:.0f}",
        }
        return [word for name, value in labels.items() for word in ("--label", f"{name}={value}")]

    @classmethod
    def read(cls, labels: dict[str, str]) -> MarkOf | None:
        """None for a container that is none of ours, whatever it calls itself."""
        try:
            return cls(
                home=Path(labels[_HOME]),
                root=Path(labels[_ROOT]),
                owner=labels[_OWNER],
                ends_at=float(labels[_ENDS]),
            )
        except (KeyError, ValueError):
            return None


def run_arguments(
    sandbox_id: str,
    prepared: Prepared,
    spec: SandboxSpec,
    *,
    marks: MarkOf,
    holds: Sequence[str],
    keep_id: bool,
    read_only: bool,
) -> list[str]:
    """Of ``run``, up to and with the image. ``keep_id`` maps this user to the container's: its pipes belong
    to who made them."""
    user, group = prepared.ids
    line = ["--detach", "--name", sandbox_id, "--hostname", "sandbox", *marks.arguments(sandbox_id)]
    line += ["--network", "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
    line += ["--log-driver", "none", "--pull", "never", "--workdir", prepared.workdir]
    line += ["--user", f"{user}:{group}"]
    if keep_id and user != 0:
        line += ["--userns", f"keep-id:uid={user},gid={group}"]
    env = {
        "PATH": STANDARD_PATH,
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        **prepared.env,
        "WORKSPACE": prepared.workdir,
        MARKER: sandbox_id,
    }
    for name, value in env.items():
        line += ["--env", f"{name}={value}"]
    line += _bounds(spec.limits, holds)
    line += _places(spec.limits, prepared.workdir, read_only=read_only)
    for inside, outside in spec.mounts.items():
        line += ["--volume", f"{outside}:{inside}:ro"]
    for inside, outside in spec.sockets.items():
        line += ["--volume", f"{outside}:{inside}"]
    return [*line, prepared.name]


def _bounds(limits: SandboxLimits, holds: Sequence[str]) -> list[str]:
    """Engines complain of, or pass over, what they can't hold. What an engine sets by itself may be more than
    it may: hence both limits are said, no higher than this process's."""
    files = _at_most(resource.RLIMIT_NOFILE, _MOST_FILES)
    tasks = _at_most(resource.RLIMIT_NPROC, _MOST_TASKS)
    line = ["--ulimit", f"nofile={files}:{files}", "--ulimit", f"nproc={tasks}:{tasks}"]
    if "memory_mb" in holds:
        line += ["--memory", f"{limits.memory_mb}m", "--memory-swap", f"{limits.memory_mb}m"]
    if "processes" in holds:
        line += ["--pids-limit", str(limits.processes)]
    if "cpus" in holds and limits.cpus is not None:
        line += ["--cpus", f"{limits.cpus:g}"]
    return line


def _at_most(which: int, most: int) -> int:
    hard = resource.getrlimit(which)[1]
    return most if hard == resource.RLIM_INFINITY else min(hard, most)


def _places(limits: SandboxLimits, workdir: str, *, read_only: bool) -> list[str]:
    if not read_only:
        tmp, shm = limits.disk_mb, min(limits.disk_mb, 64)
        return ["--tmpfs", f"/tmp:{_options(tmp)}", "--shm-size", f"{shm}m"]
    shm, tmp = limits.disk_mb // _SHM_SHARE, limits.disk_mb // _TMP_SHARE
    work = limits.disk_mb - shm - tmp
    line = ["--read-only", "--shm-size", f"{shm}m"]
    for place, size_mb in (("/tmp", tmp), (workdir, work)):
        line += ["--tmpfs", f"{place}:{_options(size_mb)}"]
    return line


def _options(size_mb: int) -> str:
    return f"rw,nosuid,nodev,exec,mode=1777,size={size_mb}m"
