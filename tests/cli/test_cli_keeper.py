"""What a command started ends with it: when it is killed, when its terminal is closed, and when it stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollserve.cli.keeper import OWNER, end_all, marked
from rollserve.cli.processes import Processes

STARTER = """
import sys, time
from pathlib import Path
from rollserve import stopping
from rollserve.cli.processes import Processes

stopping.end_as_interrupted()
processes = Processes(Path(sys.argv[1]))
try:
    processes.start("parent", [sys.executable, "-c", sys.argv[2], sys.argv[1]])
    while not Path(sys.argv[1], "pids").exists():
        time.sleep(0.01)
    print("up", flush=True)
    time.sleep(300)
finally:
    processes.stop()
"""

PARENT = """
import os, subprocess, sys, time
from pathlib import Path

child = subprocess.Popen(["sleep", "300"], start_new_session=True)  # its own session: no group reaches it
Path(sys.argv[1], "new").write_text(f"{os.getpid()} {child.pid}")
os.rename(Path(sys.argv[1], "new"), Path(sys.argv[1], "pids"))
time.sleep(300)
"""


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_gone(pids: list[int]) -> list[int]:
    deadline = time.monotonic() + 30
    while (left := [pid for pid in pids if lives(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def started(folder: Path, sent: signal.Signals) -> tuple[int, list[int]]:
    """Exit code of a command that got ``sent``, and the processes that it had started."""
    command = [sys.executable, "-c", STARTER, str(folder), PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == b"up\n"
        starter.send_signal(sent)
        code = starter.wait(60)
    return code, [int(pid) for pid in (folder / "pids").read_text().split()]


@pytest.fixture
def heard_hangup() -> Iterator[None]:
    """Also where the tests themselves were started to ignore it."""
    kept = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, kept)


@pytest.mark.usefixtures("heard_hangup")
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGHUP, signal.SIGTERM])
def test_nothing_outlives_a_command_however_it_ends(tmp_path: Path, sent: signal.Signals) -> None:
    code, pids = started(tmp_path, sent)
    assert code != 0
    assert wait_gone(pids) == []


def test_a_stop_leaves_no_grandchild_with_a_session_of_its_own(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    try:
        processes.start("parent", [sys.executable, "-c", PARENT, str(tmp_path)])
        deadline = time.monotonic() + 30
        while not (tmp_path / "pids").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        processes.stop()
    assert [pid for pid in map(int, (tmp_path / "pids").read_text().split()) if lives(pid)] == []


def test_what_does_not_listen_is_killed() -> None:
    deaf = "import signal as s; s.signal(s.SIGTERM, s.SIG_IGN); print('up', flush=True); s.pause()"
    command, env = [sys.executable, "-c", deaf], {**os.environ, OWNER: "deaf"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        end_all("deaf", grace_s=0.1)
        assert process.wait(10) == -signal.SIGKILL


def test_only_what_bears_the_mark_is_found() -> None:
    with (
        subprocess.Popen(["sleep", "300"], env={**os.environ, OWNER: "mine"}) as mine,
        subprocess.Popen(["sleep", "300"], env={**os.environ, OWNER: "mine too"}) as other,
    ):
        try:
            assert marked("mine") == [mine.pid]
        finally:
            mine.kill()
            other.kill()


def test_who_is_to_outlive_its_terminal_does() -> None:
    """As ``nohup`` starts it."""
    code = "from rollserve import stopping; print([each.name for each in stopping.asked_by()])"
    for before, wanted in ((signal.SIG_IGN, "['SIGTERM']"), (signal.SIG_DFL, "['SIGTERM', 'SIGHUP']")):
        kept = signal.signal(signal.SIGHUP, before)
        try:
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        finally:
            signal.signal(signal.SIGHUP, kept)
        assert done.stdout.strip() == wanted
