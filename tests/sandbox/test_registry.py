"""Runtimes by name, and runtime ``none``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rollserve.errors import InvalidInput, SandboxError, TooLarge, UnknownName
from rollserve.sandbox.base import SandboxSpec
from rollserve.sandbox.registry import make_runtime, runtime_names


@pytest.mark.parametrize("name", runtime_names())
def test_every_runtime_is_made_by_its_name(name: str, tmp_path: Path) -> None:
    assert make_runtime(name, tmp_path).name == name


def test_unknown_runtime(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="did you mean 'bubblewrap'"):
        make_runtime("bublewrap", tmp_path)


def test_importing_the_registry_is_light() -> None:
    code = (
        "import sys, rollserve.sandbox.registry; print('subprocess' in sys.modules, 'tarfile' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "True" not in done.stdout.split()[1:]


async def test_none_holds_files_and_runs_nothing(tmp_path: Path) -> None:
    runtime = make_runtime("none", tmp_path)
    assert runtime.report().usable
    box = await runtime.create(SandboxSpec(files={"a": b"1"}), owner="test", ttl_s=60)
    assert await box.read_file("/workspace/a") == b"1"
    await box.write_file("b/c", b"12345")
    with pytest.raises(TooLarge):
        await box.read_file("b/c", limit_bytes=4)
    with pytest.raises(SandboxError, match="no sandbox"):
        await box.exec("true")
    with pytest.raises(SandboxError, match="no such file"):
        await box.read_file("missing")
    with pytest.raises(InvalidInput):
        await runtime.create(SandboxSpec(image="/some/image"), owner="test", ttl_s=60)
    await box.close()
    with pytest.raises(SandboxError, match="closed"):
        await box.read_file("a")
    assert await runtime.reap() == 0
    await runtime.close()
