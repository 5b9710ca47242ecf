"""Looking at and stopping processes through ``/proc`` and process descriptors.

Everything here is Linux; callers check ``supported()`` where they can do without.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable

_FREEZE_ROUNDS = 64
_KILL_PAUSE_S = 0.002


def supported() -> bool:
    return sys.platform == "linux" and hasattr(os, "pidfd_open") and bool(_stat_fields(os.getpid()))


def now_ticks() -> int:
    """The present on the clock that ``start_ticks`` uses, rounded down."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def _read(path: str) -> bytes:
    """A file below ``/proc``: those never wait, and being marked so lets a loop's watchdog know."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(fd, 65536):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def _stat_fields(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` after the command name; empty when the process is gone."""
    try:
        return _read(f"/proc/{pid}/stat").decode("ascii", "replace").rpartition(")")[2].split()
    except OSError:
        return []


def state(pid: int) -> str | None:
    """One letter (``R``, ``S``, ``T``, ``Z``, …), ``None`` when the process is gone."""
    fields = _stat_fields(pid)
    return fields[0] if fields else None


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; with the pid it names a process for good."""
    fields = _stat_fields(pid)
    return int(fields[19]) if len(fields) > 19 else None


def children(pid: int) -> list[int]:
    """Direct children; those of other threads are not looked for."""
    try:
        return [int(word) for word in _read(f"/proc/{pid}/task/{pid}/children").split()]
    except FileNotFoundError:
        return _children_by_scan(pid) if state(pid) else []
    except OSError:
        return []


def _children_by_scan(pid: int) -> list[int]:
    """For kernels without ``CONFIG_PROC_CHILDREN``."""
    found = []
    for other in all_pids():
        fields = _stat_fields(other)
        if len(fields) > 1 and int(fields[1]) == pid:
            found.append(other)
    return found


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def innermost_pid(pid: int) -> int | None:
    """The pid that the process sees itself under in its own pid namespace."""
    try:
        lines = _read(f"/proc/{pid}/status").splitlines()
    except OSError:
        return None
    found = [int(line.split()[-1]) for line in lines if line.startswith(b"NSpid:")]
    return found[0] if found else pid


def send_signal(pid: int, number: int) -> None:
    """Signal a process; one that is gone, or became another user's, is left to who confirms the end."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def descendants(root: int, *, since_ticks: int) -> list[int]:
    """Descendants of ``root`` started at ``since_ticks`` or later. Older children (background jobs of
    earlier commands) are skipped with all that hangs below them."""
    found: list[int] = []
    open_pids = [root]
    while open_pids:
        for child in children(open_pids.pop()):
            started = start_ticks(child)
            if started is not None and started >= since_ticks:
                found.append(child)
                open_pids.append(child)
    return found


def is_below(pid: int, root: int) -> bool:
    """Whether ``root`` is ``pid``, or an ancestor of it as things stand."""
    while pid > 1 and pid != root:
        fields = _stat_fields(pid)
        pid = int(fields[1]) if len(fields) > 1 else 0
    return pid == root


def kill_tree(root: int, *, since_ticks: int) -> set[int]:
    """Kill ``root`` and its descendants since ``since_ticks``; returns them all.

    All are stopped before any is killed: a stopped process can't fork past the walk, and a stopped
    shell can't go on to its next command when the present one dies.
    """
    send_signal(root, signal.SIGSTOP)
    stopped: set[int] = set()
    for _ in range(_FREEZE_ROUNDS):
        fresh = set(descendants(root, since_ticks=since_ticks)) - stopped
        if not fresh:
            break
        for pid in fresh:
            send_signal(pid, signal.SIGSTOP)
        stopped |= fresh
    for pid in stopped:
        send_signal(pid, signal.SIGKILL)
    send_signal(root, signal.SIGKILL)
    return stopped | {root}


def kill_all(find: Callable[[], Iterable[int]], *, within_s: float) -> list[int]:
    """Kill what ``find`` finds until it finds nothing more and all it found are gone, all stopped before any
    is killed; blocking. A walk down the tree misses who changes parents meanwhile, as the children of those
    do who were killed first. Returns what is alive after ``within_s`` seconds all the same."""
    deadline = time.monotonic() + within_s
    known: dict[int, int | None] = {}
    while found := _alive(known, find()):
        if time.monotonic() > deadline:
            return found
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in found:
                send_signal(pid, number)
        time.sleep(_KILL_PAUSE_S)
    return []


def _alive(known: dict[int, int | None], found: Iterable[int]) -> list[int]:
    """Of ``known`` processes (with their starts), to which those ``found`` are added."""
    known.update({pid: start_ticks(pid) for pid in found})
    return [
        pid
        for pid, ticks in known.items()
        if state(pid) not in ("Z", "X", None) and start_ticks(pid) == ticks
    ]


def pids_with_environment(entry: bytes) -> list[int]:
    """Processes whose initial environment holds ``entry`` (``NAME=value``), as far as readable."""
    return [pid for pid in all_pids() if has_environment(pid, entry)]


def has_environment(pid: int, entry: bytes) -> bool:
    try:
        return entry in _read(f"/proc/{pid}/environ").split(b"\0")
    except OSError:
        return False


def pids_of_session(session: int) -> list[int]:
    found = []
    for pid in all_pids():
        fields = _stat_fields(pid)
        if len(fields) > 3 and int(fields[3]) == session:
            found.append(pid)
    return found


class ProcessWatch:
    """Process descriptors of some processes: signal them without a pid-reuse race, await their end."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._fds: dict[int, int] = {}
        for pid in pids:
            try:
                self._fds[pid] = os.pidfd_open(pid)
            except ProcessLookupError:
                continue

    def kill(self) -> None:
        for fd in self._fds.values():
            try:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            except ProcessLookupError:
                continue

    async def gone(self, *, timeout_s: float) -> bool:
        """True when all have ended within the time; a zombie counts as ended."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[None]] = []
        for fd in self._fds.values():
            future: asyncio.Future[None] = loop.create_future()
            loop.add_reader(fd, _ended, loop, fd, future)
            futures.append(future)
        try:
            if not futures:
                return True
            _, waiting = await asyncio.wait(futures, timeout=timeout_s)
            return not waiting
        finally:
            for fd in self._fds.values():
                loop.remove_reader(fd)

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])


def _ended(loop: asyncio.AbstractEventLoop, fd: int, future: asyncio.Future[None]) -> None:
    loop.remove_reader(fd)
    if not future.done():
        future.set_result(None)
