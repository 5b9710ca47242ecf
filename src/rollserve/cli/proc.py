"""CPU time and memory of a process tree, read from ``/proc`` (Linux)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


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
    todo = [pid]
    while todo:
        current = todo.pop()
        try:
            cpu, rss = _one(current)
            todo += _children(current)
        except OSError:
            continue  # it ended meanwhile: its parent has its time
        cpu_s, rss_mb, count = cpu_s + cpu, rss_mb + rss, count + 1
    return Usage(cpu_s, rss_mb, count)
