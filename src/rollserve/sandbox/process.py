"""Runtime ``process``: plain processes of this user in a temporary folder. **UNSAFE**: no isolation.

For development, and for code one would run by hand anyway. What it does keep: no inherited environment,
resource limits, and an end for every process, also one that left its session: each carries a marker in
its environment. After a crash of the worker, ``reap`` of any later worker finds the rest on disk.

On disk: ``DATA/process/<worker>/lock`` is locked as long as the worker lives; ``<worker>/<sandbox>/``
holds one sandbox and the name of its owner. ``/workspace`` in file operations stands for the sandbox's
folder; a command finds it in ``$WORKSPACE``, which is where it starts.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from uuid import uuid4

from rollserve.errors import InvalidInput, SandboxError
from rollserve.sandbox import processes, script
from rollserve.sandbox.base import STANDARD_PATH, WORKDIR, RuntimeReport, SandboxSpec
from rollserve.sandbox.box import ShellSandbox, workdir_path
from rollserve.sandbox.removal import remove_tree
from rollserve.sandbox.roster import Roster
from rollserve.sandbox.shell import Shell
from rollserve.sandbox.wires import Launch, wire
from rollserve.sandbox.worker_folder import WorkerFolder, left_over

MARKER = "ROLLSERVE_SANDBOX"
STOP_TIMEOUT_S = 20.0
_FOLDERS = ("workspace", "home", "tmp")


class ProcessRuntime:
    """Implements ``Runtime`` without isolation. ``path`` is the ``PATH`` of the commands."""

    name = "process"

    def __init__(self, *, data_dir: Path | None = None, path: str = STANDARD_PATH) -> None:
        root = data_dir or Path(tempfile.gettempdir()) / f"rollserve-{os.geteuid()}"
        self._root = (root / "process").absolute()
        self._path = path
        self._home: WorkerFolder | None = None
        self._roster: Roster | None = None
        self._opening = asyncio.Lock()

    def report(self) -> RuntimeReport:
        detail = "UNSAFE: commands run as this user, with its files and network"
        if not processes.supported():
            detail += "; on this system a command that is stopped takes its sandbox with it"
        return RuntimeReport(
            name=self.name,
            usable=os.path.exists("/bin/sh"),
            isolated=False,
            detail=detail,
            remedy="use bubblewrap for anything a model wrote",
            per_process=("memory_mb", "file_mb", "cpu_s"),
            can=("listen", "connect"),
        )

    def check_image(self, image: str) -> None:
        if image != "host":
            raise InvalidInput(f"the runtime process runs on the host, not in {image!r}", field="image")

    async def create(self, spec: SandboxSpec, *, owner: str, ttl_s: float) -> ShellSandbox:
        self.check_image(spec.image)
        if spec.snapshot:
            raise InvalidInput("the runtime process has no snapshots", field="snapshot")
        if spec.prepare:
            raise InvalidInput("the runtime process prepares no images", field="prepare")
        if spec.sockets:
            raise InvalidInput("the runtime process binds no sockets: use the host's path", field="sockets")
        if spec.mounts:
            raise InvalidInput("the runtime process mounts nothing: use the host's path", field="mounts")
        roster = self._roster = self._roster or Roster()
        sandbox_id = f"process-{uuid4().hex}"
        async with self._opening:
            if self._home is None:
                self._home = await asyncio.to_thread(WorkerFolder, self._root)
            folder = self._home.path / sandbox_id
            await asyncio.to_thread(_make_folders, folder, owner)

        async def stop(shell: Shell) -> None:
            await _stop(sandbox_id, shell.process)
            try:
                await asyncio.to_thread(remove_tree, folder)
            except OSError as error:
                raise SandboxError(f"{folder} is left over: {error}", operation="sandbox.close") from error
            roster.forget(sandbox_id)

        def make() -> ShellSandbox:
            launch = _launch(folder, spec, sandbox_id, self._path)
            return ShellSandbox(
                sandbox_id,
                wire(launch),
                stop=stop,
                locate=_locator(launch.workdir),
                members=lambda shell: _members(sandbox_id, shell.process.pid),
                listen=_listen,
                sockets=lambda shell: [socket.socket()],
            )

        return await roster.start(make, spec, ttl_s=ttl_s)

    async def reap(self) -> int:
        return await asyncio.to_thread(_reap, self._root)

    async def close(self) -> None:
        if self._roster is not None:
            await self._roster.close()
        if self._home is not None:
            await asyncio.to_thread(self._home.close)
        self._home = self._roster = None


def _make_folders(folder: Path, owner: str) -> None:
    for name in _FOLDERS:
        (folder / name).mkdir(parents=True)
    (folder / "owner").write_text(owner)


def _launch(folder: Path, spec: SandboxSpec, sandbox_id: str, path: str) -> Launch:
    workdir, home, temporary = (folder / name for name in _FOLDERS)
    env = {
        "PATH": path,
        "HOME": str(home),
        "TMPDIR": str(temporary),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "WORKSPACE": str(workdir),
        **spec.env,
        MARKER: sandbox_id,
    }
    supervisor = script.supervisor(spec.limits, limit_processes=False)
    return Launch(argv=["/bin/sh", "-c", supervisor], env=env, workdir=str(workdir), cwd=str(workdir))


def _locator(workdir: str) -> Callable[[str], str]:
    def locate(path: str) -> str:
        absolute = PurePosixPath(workdir_path(path, WORKDIR))
        if absolute.is_relative_to(WORKDIR):
            return workdir_path(str(absolute.relative_to(WORKDIR)), workdir)
        return str(absolute)

    return locate


def _listen(shell: Shell) -> socket.socket:
    """Nothing is inside: this machine's loopback address is the sandbox's."""
    return socket.create_server(("127.0.0.1", 0), backlog=128)


# -- ending -----------------------------------------------------------------------------------


async def _stop(sandbox_id: str, process: subprocess.Popen[bytes]) -> None:
    if not processes.supported():
        os.killpg(process.pid, signal.SIGKILL)
        await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)
        return
    processes.send_signal(process.pid, signal.SIGSTOP)
    await asyncio.to_thread(_kill_all, sandbox_id, process.pid)
    watch = processes.ProcessWatch([process.pid])
    try:
        await watch.gone(timeout_s=STOP_TIMEOUT_S)
    finally:
        watch.close()
    process.poll()


def _kill_all(sandbox_id: str, session: int | None) -> None:
    """Kill until a look over all processes finds none of this sandbox."""
    left = processes.kill_all(lambda: _members(sandbox_id, session), within_s=STOP_TIMEOUT_S)
    if left:
        raise SandboxError(f"processes {left} could not be killed", operation="sandbox.close")


def _members(sandbox_id: str, session: int | None) -> list[int]:
    entry = f"{MARKER}={sandbox_id}".encode()
    found = set(processes.pids_with_environment(entry))
    if session is not None:
        found |= set(processes.pids_of_session(session))
    return list(found)


def _reap(root: Path) -> int:
    """End the sandboxes of workers that no longer hold their lock."""
    with left_over(root) as folders:
        return sum(_reap_worker(folder) for folder in folders)


def _reap_worker(folder: Path) -> int:
    sandboxes = [place.name for place in folder.iterdir() if place.is_dir()]
    for sandbox_id in sandboxes:
        if processes.supported():
            _kill_all(sandbox_id, None)
    remove_tree(folder)
    return len(sandboxes)
