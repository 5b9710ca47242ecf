"""Sandboxes in namespaces of their own whose processes are seen from here: bubblewrap, Apptainer, containers.

Most are a process of ours and, below it, pid 1 of a pid namespace: when both are gone, the kernel has ended
all that was inside.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable

from rollserve.errors import SandboxError
from rollserve.sandbox import processes
from rollserve.sandbox.namespace import listen_inside, sockets_inside
from rollserve.sandbox.shell import Shell

STOP_TIMEOUT_S = 20.0
SOCKETS_AT_ONCE = 8
_FREEZE_CHECKS = 50


def first_child(pid: int) -> int | None:
    return next(iter(processes.children(pid)), None)


def members(shell: Shell) -> list[int]:
    """All that hangs below pid 1, which inherits what was orphaned."""
    supervisor = shell.supervisor_pid()
    return [] if supervisor is None else processes.descendants(supervisor, since_ticks=0)


def listen(shell: Shell, *, uid: int) -> socket.socket:
    """Blocking; ``uid`` is whom the sandbox runs as. Raises ``SandboxError``."""
    return _inside(shell, lambda pid: [listen_inside(pid, uid=uid)])[0]


def sockets(shell: Shell, *, uid: int) -> list[socket.socket]:
    """Some that can be connected to ports inside; likewise."""
    return _inside(shell, lambda pid: sockets_inside(pid, uid=uid, count=SOCKETS_AT_ONCE))


def _inside(shell: Shell, make: Callable[[int], list[socket.socket]]) -> list[socket.socket]:
    pid = shell.supervisor_pid()
    if pid is None:
        raise SandboxError("the sandbox is gone", operation="sandbox.network")
    made = make(pid)
    if shell.supervisor_pid() != pid:  # its number may have been another's by then
        for sock in made:
            sock.close()
        raise SandboxError("the sandbox is gone", operation="sandbox.network")
    return made


async def stop_nested(shell: Shell) -> None:
    """Kill the outer process and pid 1. Raises ``SandboxError``."""
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
    """Children of the outer process; when it has none yet, it is stopped first so that it can't make one."""
    found = processes.children(pid)
    if found:
        return found
    processes.send_signal(pid, signal.SIGSTOP)
    for _ in range(_FREEZE_CHECKS):
        if processes.state(pid) in ("T", "Z", None):
            break
        await asyncio.sleep(0.001)
    return processes.children(pid)
