"""Folders of living workers, and those left over."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rollserve.sandbox.removal import remove_tree
from rollserve.sandbox.worker_folder import WorkerFolder, left_over

_KILLED = """
import os, signal, sys
from pathlib import Path
from rollserve.sandbox.worker_folder import WorkerFolder
folder = WorkerFolder(Path(sys.argv[1]), prefix="p-")
(folder.path / "more").mkdir()
(folder.path / "more").chmod(0)
if len(sys.argv) > 2:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run(root: Path, *more: str) -> None:
    subprocess.run([sys.executable, "-c", _KILLED, str(root), *more], check=False)


def test_a_killed_workers_folder_is_left_over_and_a_living_ones_is_not(tmp_path: Path) -> None:
    living = WorkerFolder(tmp_path, prefix="p-")
    other = WorkerFolder(tmp_path, prefix="q-")
    run(tmp_path, "killed")
    with left_over(tmp_path, prefix="p-") as folders:
        assert len(folders) == 1
        assert folders[0] not in (living.path, other.path)
        with left_over(tmp_path, prefix="p-") as again:
            assert again == [], "it is locked"
        remove_tree(folders[0])
    assert sorted(tmp_path.iterdir()) == sorted([living.path, other.path])
    living.close()
    living.close()
    other.close()
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_ends_takes_its_folder_along(tmp_path: Path) -> None:
    run(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_over_where_nothing_is(tmp_path: Path) -> None:
    with left_over(tmp_path / "missing") as folders:
        assert folders == []
