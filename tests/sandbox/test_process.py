"""Runtime ``process``: the conformance suite, and what is its own."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from rollserve.errors import InvalidInput
from rollserve.sandbox.base import SandboxSpec
from rollserve.sandbox.process import ProcessRuntime
from rollserve.testing.runtime_conformance import RuntimeConformance


class TestProcessRuntime(RuntimeConformance):
    factory = "rollserve.sandbox.process:ProcessRuntime"


async def test_says_that_it_is_unsafe(tmp_path: Path) -> None:
    report = ProcessRuntime(data_dir=tmp_path).report()
    assert not report.isolated
    assert "UNSAFE" in report.detail


async def test_folder_is_removed_whatever_its_modes(tmp_path: Path) -> None:
    runtime = ProcessRuntime(data_dir=tmp_path)
    box = await runtime.create(SandboxSpec(), owner="test", ttl_s=60)
    await box.exec("mkdir -p a/b; touch a/b/c; chmod 000 a/b a")
    await runtime.close()
    assert list((tmp_path / "process").iterdir()) == []


async def test_a_living_worker_is_not_reaped(tmp_path: Path) -> None:
    first, second = ProcessRuntime(data_dir=tmp_path), ProcessRuntime(data_dir=tmp_path)
    box = await first.create(SandboxSpec(), owner="test", ttl_s=60)
    assert await second.reap() == 0
    assert (await box.exec("echo on")).output == "on\n"
    await first.close()
    await second.close()


async def test_sockets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="sockets"):
        await ProcessRuntime(data_dir=tmp_path).create(
            SandboxSpec(sockets={"/tmp/s": "/tmp/s"}), owner="test", ttl_s=60
        )


async def test_plain_sh_where_there_is_no_bash(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "sleep", "cat"):
        found = shutil.which(name)
        assert found is not None
        (programs / name).symlink_to(found)
    runtime = ProcessRuntime(data_dir=tmp_path, path=str(programs))
    box = await runtime.create(SandboxSpec(files={"f": b"\0x"}), owner="test", ttl_s=60)
    assert (await box.exec("echo \"[${BASH_VERSION-}]\"; cat f; export A='x y'; false")).output == "[]\n\0x"
    assert (await box.exec("echo $?; exit 3")).exit_code == 3
    assert (await box.exec("echo $A")).output == "x y\n"
    assert not (await box.exec("echo 'open", timeout_s=30)).timed_out
    assert (await box.exec("sleep 30; echo never", timeout_s=0.2)).timed_out
    big = bytes(range(256)) * 4096
    await box.write_file("g", big)
    assert await box.read_file("g") == big
    await asyncio.gather(box.exec("true"), box.exec("true"))
    await runtime.close()
