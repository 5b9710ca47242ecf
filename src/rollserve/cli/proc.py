"""CPU time and memory of a process tree, read from ``/proc`` (Linux)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Usage:
    """``cpu_s`` of the tree, its ended and reaped children included; ``rss_peak_mb`` is the sum of the
    living processes' own peaks."""

    cpu_s: float
    rss_peak_mb: float
    processes: int


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in task.read_text().split()]
        except OSError:
            continue  # the thread ended meanwhile
    return found


def _one(pid: int) -> tuple[float, float]:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    cpu_s = sum(int(value) for value in fields[11:15]) / _TICKS_PER_S
    status = Path(f"/proc/{pid}/status").read_text()
    peak = next((line for line in status.splitlines() if line.startswith("VmHWM:")), "VmHWM: 0 kB")
    return cpu_s, int(peak.split()[1]) / 1024


def tree_usage(pid: int) -> Usage:
    """Of ``pid`` and all that descends from it."""
    cpu_s, rss_mb, count = 0.0, 0.0, 0
    for current in _tree(pid):
        try:
            cpu, rss = _one(current)
        except OSError:
            continue  # it ended meanwhile: its parent has its time
        cpu_s, rss_mb, count = cpu_s + cpu, rss_mb + rss, count + 1
    return Usage(cpu_s, rss_mb, count)


def running(pid: int, module: str) -> list[int]:
    """Of ``pid`` and all that descends from it, the processes that were started as ``-m module``."""
    return [each for each in _tree(pid) if f"-m {module} " in _command(each)]


def rss_mb(pid: int) -> float:
    """Resident memory of one process now; 0 when it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES / (1 << 20)
    except OSError:
        return 0.0


def _tree(pid: int) -> Iterator[int]:
    todo = [pid]
    while todo:
        current = todo.pop()
        yield current
        with suppress(OSError):  # it ended meanwhile
            todo += _children(current)


def _command(pid: int) -> str:
    """The words it was started with, a blank after each."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
