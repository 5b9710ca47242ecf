"""What is read of processes from ``/proc``."""

from __future__ import annotations

import os
import subprocess
import sys

from rollserve.cli.proc import rss_mb, running, tree_usage


def test_a_child_is_found_by_its_module_and_weighed() -> None:
    command = [sys.executable, "-m", "asyncio"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stderr is not None
        assert child.stderr.readline()  # its greeting: it runs
        assert running(os.getpid(), "asyncio") == [child.pid]
        assert running(os.getpid(), "async") == []
        assert rss_mb(child.pid) > 1
        assert tree_usage(child.pid).processes == 1
        child.kill()
    assert running(os.getpid(), "asyncio") == []
    assert rss_mb(child.pid) == 0.0
