"""Control groups: of both versions on a made-up tree, and real ones where this machine has any."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from rollserve.errors import SandboxError
from rollserve.sandbox import processes
from rollserve.sandbox.base import SandboxLimits
from rollserve.sandbox.cgroups import Cgroups, Enclosure, knobs

LIMITS = SandboxLimits(memory_mb=64, processes=10, cpus=0.5)


def real() -> Cgroups:
    cgroups = Cgroups()
    if not cgroups.limits:
        pytest.skip("no control group can be made here")
    return cgroups


def groups_of(sandbox_id: str) -> list[Path]:
    return list(Path("/sys/fs/cgroup").rglob(sandbox_id))


def _same(cgroups: Cgroups) -> Cgroups:
    return cgroups


def test_where_nothing_can_be_made_there_is_none(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/\n3:pids:/gone\n")
    for cgroups in (
        Cgroups(root=tmp_path / "nothing", own=own),
        Cgroups(root=tmp_path, own=tmp_path / "missing"),
        Cgroups(delegated=tmp_path / "nothing"),
    ):
        assert cgroups.limits == ()
        assert cgroups.open("a", LIMITS) is None
        enclosure = Enclosure(partial(_same, cgroups), "a", LIMITS)
        enclosure.admit(os.getpid())
        enclosure.end()
        assert cgroups.reap() == 0


def test_limits_are_written_as_each_version_wants_them() -> None:
    assert next(knobs("memory", 2, LIMITS)) == ("memory.max", str(64 << 20))
    assert next(knobs("memory", 1, LIMITS)) == ("memory.limit_in_bytes", str(64 << 20))
    assert list(knobs("pids", 2, LIMITS)) == [("pids.max", "10")]
    assert list(knobs("cpu", 2, LIMITS)) == [("cpu.max", "50000 100000")]
    assert list(knobs("cpu", 1, LIMITS)) == [
        ("cpu.cfs_period_us", "100000"),
        ("cpu.cfs_quota_us", "50000"),
    ]
    assert list(knobs("cpu", 2, SandboxLimits())) == []


def test_a_delegated_group_that_hands_nothing_down_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("hugetlb\n")
    (tmp_path / "cgroup.subtree_control").touch()
    assert Cgroups(delegated=tmp_path).limits == ()


def test_what_is_admitted_is_held_with_all_below_it_and_ends_with_the_group() -> None:
    cgroups = real()
    enclosure = Enclosure(lambda: cgroups, "rs-test-box", LIMITS)
    with subprocess.Popen(["sh", "-c", "sleep 300 & sleep 300 & wait"]) as process:
        while len(processes.children(process.pid)) < 2:
            time.sleep(0.01)
        enclosure.admit(process.pid)
        for folder in groups_of("rs-test-box"):
            held = {int(word) for word in (folder / "cgroup.procs").read_text().split()}
            assert held == {process.pid, *processes.children(process.pid)}
        enclosure.end()
        assert process.wait(10) != 0
    assert groups_of("rs-test-box") == []
    with pytest.raises(SandboxError, match="gone"):
        enclosure.admit(os.getpid())
    assert groups_of("rs-test-box") == []
    cgroups.close()


def test_memory_is_bounded_over_processes() -> None:
    cgroups = real()
    if "memory_mb" not in cgroups.limits:
        pytest.skip("no memory control group here")
    group = cgroups.open("rs-test-memory", LIMITS)
    assert group is not None
    fill = "held = b'x' * (30 << 20); print(len(held), flush=True)"
    code = f"import sys; sys.stdin.readline(); {fill}; sys.stdin.read()"
    with contextlib.ExitStack() as running:
        started = [
            running.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
            for _ in range(4)
        ]
        group.add([process.pid for process in started])
        for process in started:
            assert process.stdin is not None
            print(file=process.stdin, flush=True)
        # each holds what it has until all have answered or were ended
        said = [process.stdout.readline() for process in started if process.stdout is not None]
        group.close()
    assert said.count("31457280\n") < 4
    cgroups.close()


def test_groups_of_a_killed_worker_are_reaped() -> None:
    cgroups = real()
    code = """
import os, signal, subprocess
from rollserve.sandbox.base import SandboxLimits
from rollserve.sandbox.cgroups import Cgroups
group = Cgroups().open("rs-test-orphan", SandboxLimits())
left = subprocess.Popen(["sleep", "300"], stdout=subprocess.DEVNULL)
group.add([left.pid])
print(left.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    cgroups.reap()
    mine = cgroups.open("rs-test-mine", LIMITS)
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    left = int(done.stdout)
    assert groups_of("rs-test-orphan") != []
    places = [folder.parent for folder in groups_of("rs-test-orphan")]
    elsewhere = Cgroups(root=Path("/nowhere"))
    assert elsewhere.reap([*places, Path("/sys/fs/cgroup/unrelated"), Path("/tmp")]) == 1
    assert groups_of("rs-test-orphan") == []
    assert processes.state(left) in ("Z", None)
    assert cgroups.reap(places) == 0
    assert groups_of("rs-test-mine") != []
    assert mine is not None
    mine.close()
    cgroups.close()
