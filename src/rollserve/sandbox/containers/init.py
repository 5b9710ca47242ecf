"""Pid 1 of a container, and the pipes it is spoken to over.

An engine's own streams go through its relays, which keep no order between stdout and stderr and cost a
process more. So pid 1, a shell, makes four pipes inside; this side opens their free ends through
``/proc/PID/fd``, as with every program (``program``), and says go. From then on pid 1 is the supervisor of
``script`` and holds its own ends only: when the worker dies, it reads the end of its commands and ends.

Needs: an engine on this machine whose processes this process may look into, which is so for root and for the
user of a rootless engine.
"""

from __future__ import annotations

import os
import stat
import time

from rollserve.errors import SandboxError
from rollserve.sandbox import processes
from rollserve.sandbox.program import READ, WRITE, open_end
from rollserve.sandbox.script import PROGRAM_GO
from rollserve.sandbox.wires import Wires

MARKER = "ROLLSERVE_CONTAINER"
DATA_FD = 6
_COMMANDS, _CONTROL, _OUTPUT, _READY = 4, 5, 8, 3
_PAUSE_S = 0.002

_PIPES = r"""fresh() { : | { exec 7>/proc/self/fd/0; read -r go; } & until [ -p /proc/$!/fd/7 ]; do :; done; }
fresh; exec 4<>/proc/$!/fd/0; echo >&4; wait $!
fresh; exec 5<>/proc/$!/fd/0; echo >&5; wait $!
fresh; exec 8<>/proc/$!/fd/0; echo >&8; wait $!
fresh; exec 6<>/proc/$!/fd/0; echo >&6; wait $!
exec 3<&8
read -r go <&4
exec 0</proc/self/fd/4 1>/proc/self/fd/5 2>/proc/self/fd/8 9</proc/self/fd/6
exec 4>&- 5>&- 8>&- 6<&9 9<&-
eval "$1"
"""
"""A pipe is taken from a pipeline while its reader waits; opened for both, it has no end before it is used.
That 3 and 8 are the same says that all are there and nobody else reads them."""


def command(supervisor: str) -> list[str]:
    """What the container runs."""
    return ["/bin/sh", "-c", _PIPES, "sh", supervisor]


def connect(pid: int, mark: str, *, workdir: str, timeout_s: float) -> Wires:
    """The pipes of the container whose pid 1 is ``pid`` here and has ``mark`` in its environment. Blocking.
    Raises ``SandboxError``."""
    ticks = processes.start_ticks(pid)
    entry = f"{MARKER}={mark}".encode()
    deadline = time.monotonic() + timeout_s
    while not processes.has_environment(pid, entry):
        if ticks is None or processes.start_ticks(pid) != ticks or time.monotonic() > deadline:
            raise _failed(
                "its process is none of this machine, or of another user: a remote or rootful engine?"
            )
        time.sleep(_PAUSE_S)
    output_r, command_w, control_r, data_w, data_r = _opened(pid, deadline)
    return Wires(
        command_w=command_w,
        data_w=data_w,
        data_r=data_r,
        control_r=control_r,
        output_r=output_r,
        data_fd=DATA_FD,
        workdir=workdir,
        find_supervisor=lambda: pid if processes.start_ticks(pid) == ticks else None,
    )


def _opened(pid: int, deadline: float) -> list[int]:
    """Of output, commands, control, and both ends of data; pid 1 is told to go on."""
    while not _is_ready(pid):
        if processes.state(pid) in ("Z", "X", None) or time.monotonic() > deadline:
            raise _failed("its pid 1 made no pipes")
        time.sleep(_PAUSE_S)
    wanted = ((_OUTPUT, READ), (_COMMANDS, WRITE), (_CONTROL, READ), (DATA_FD, WRITE), (DATA_FD, READ))
    fds: list[int] = []
    try:
        for number, flags in wanted:
            fds.append(open_end(pid, number, flags))
        os.write(fds[1], PROGRAM_GO)
    except OSError as error:
        for fd in fds:
            os.close(fd)
        raise _failed(f"its pipes can't be opened: {error}") from error
    return fds


def _is_ready(pid: int) -> bool:
    try:
        ready, output = (os.stat(f"/proc/{pid}/fd/{number}") for number in (_READY, _OUTPUT))
    except OSError:
        return False
    return stat.S_ISFIFO(output.st_mode) and os.path.samestat(ready, output)


def _failed(what: str) -> SandboxError:
    return SandboxError(f"the container can't be reached: {what}", operation="sandbox.start")
