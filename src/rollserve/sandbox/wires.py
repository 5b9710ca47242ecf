"""The pipes between this process and the supervisor of a shell, and how one is started on them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rollserve.errors import SandboxError
from rollserve.sandbox import script
from rollserve.sandbox.pipes import renumber


@dataclass(frozen=True)
class Launch:
    """How to start the supervisor. ``find_supervisor`` maps the started pid to the supervisor's;
    ``identity`` is the user to become before ``argv``, ``user`` the one the shell ends up as; ``hand_over``
    are descriptors for what is started, closed here."""

    argv: Sequence[str]
    env: dict[str, str]
    workdir: str
    cwd: str | None = None
    identity: int | None = None
    user: int | None = None
    find_supervisor: Callable[[int], int | None] = field(default=lambda pid: pid)
    hand_over: tuple[int, ...] = ()


@dataclass(frozen=True)
class Wires:
    """A started supervisor and this side's ends of its pipes. ``data_fd`` is the number its data pipe has
    inside, of which ``data_r`` is this side's read end. ``process`` is there where we started it."""

    command_w: int
    data_w: int
    data_r: int
    control_r: int
    output_r: int
    data_fd: int
    workdir: str
    find_supervisor: Callable[[], int | None]
    process: subprocess.Popen[bytes] | None = None


def wire(launch: Launch) -> Wires:
    """Start the supervisor from this thread: a sandbox dies with the thread that started it."""
    pipes = [os.pipe() for _ in range(4)]
    (command_r, command_w), (data_r, data_w), (control_r, control_w), (output_r, output_w) = pipes
    data_r = renumber(data_r, lowest=script.LOWEST_DATA_FD, avoid=script.SHELL_FDS)
    if launch.user is not None:  # a POSIX shell opens the data pipe by its path
        os.fchown(data_r, launch.user, launch.user)
    try:
        process = _started(launch, command_r, control_w, output_w, data_r)
    except OSError as error:
        for fd in (data_r, data_w, control_r, output_r, command_w):
            os.close(fd)
        raise SandboxError(f"cannot start {launch.argv[0]}: {error}", operation="sandbox.start") from error
    finally:
        for fd in (command_r, control_w, output_w, *launch.hand_over):
            os.close(fd)
    return Wires(
        command_w=command_w,
        data_w=data_w,
        data_r=data_r,
        control_r=control_r,
        output_r=output_r,
        data_fd=data_r,
        workdir=launch.workdir,
        find_supervisor=lambda: launch.find_supervisor(process.pid),
        process=process,
    )


def _started(launch: Launch, stdin: int, stdout: int, stderr: int, data_r: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        launch.argv,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        pass_fds=(data_r, *launch.hand_over),
        env=launch.env,
        cwd=launch.cwd,
        start_new_session=True,
        user=launch.identity,
        group=launch.identity,
        extra_groups=None if launch.identity is None else (),
    )
