"""Run as a program of its own, with the standard library alone: ends what a command started when it is gone.

A command that is killed can't stop its processes. So it starts this one first, holds the other end of its
standard input, and marks what it starts (``OWNER`` in the environment, which grandchildren inherit, also
those with a session of their own). When the input ends the command has ended: what bears the mark gets a
SIGTERM, and after the grace a SIGKILL. The mark is random, so nobody else's process bears it, and a process
id that was given again is no danger. Linux; elsewhere it finds nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import time

OWNER = "_ROLLSERVE_STARTED_BY"
GRACE_S = 10.0
_KILLED_WITHIN_S = 10.0
"""After that a process hangs in the kernel, and nobody can end it."""

_LOOK_EVERY_S = 0.05


def marked(mark: str) -> list[int]:
    """The living processes of this user that bear the mark, but this one."""
    wanted, found = f"{OWNER}={mark}".encode(), []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/environ", "rb") as environ:
                    if wanted in environ.read().split(b"\0"):
                        found.append(int(name))
            except OSError:
                continue  # it ended meanwhile, or is another user's; a dead one shows no environment
    return found


def end_all(mark: str, grace_s: float) -> None:
    """Each is asked once, then killed; until none is left at two looks (one that is just being started has
    the mark in a moment), or what is left can't be killed."""
    asked: set[int] = set()
    deadline = time.monotonic() + grace_s
    empty_looks = 0
    while empty_looks < 2 and time.monotonic() < deadline + _KILLED_WITHIN_S:
        left, late = marked(mark), time.monotonic() >= deadline
        empty_looks = 0 if left else empty_looks + 1
        for pid in left:
            if late or pid not in asked:
                asked.add(pid)
                _send(pid, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(_LOOK_EVERY_S)


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def main(mark: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the command
    while os.read(sys.stdin.fileno(), 1):
        continue
    end_all(mark, GRACE_S)


if __name__ == "__main__":
    main(sys.argv[1])
