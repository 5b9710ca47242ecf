"""Programs beside the shell: what is opened of a sandbox is pipes alone, and a lost start is an error."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollserve.errors import SandboxError
from rollserve.sandbox.base import Sandbox, SandboxSpec
from rollserve.sandbox.process import ProcessRuntime
from rollserve.sandbox.program import READ, WRITE, open_end
from rollserve.testing.runtime_probes import open_descriptors


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Sandbox]:
    runtime = ProcessRuntime(data_dir=tmp_path)
    yield await runtime.create(SandboxSpec(), owner="test", ttl_s=100)
    await runtime.close()


def test_nothing_but_a_pipe_is_opened(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"kept")
    opened = [os.open(file, os.O_RDONLY), os.open("/dev/null", os.O_RDWR)]
    before = open_descriptors()
    for fd in (*opened, 9999):
        with pytest.raises(OSError):
            open_end(os.getpid(), fd, WRITE)
    assert open_descriptors() == before
    for fd in opened:
        os.close(fd)
    assert file.read_bytes() == b"kept"


def test_the_other_end_of_a_pipe() -> None:
    reading, writing = os.pipe()
    other = open_end(os.getpid(), reading, WRITE)
    os.write(other, b"through")
    assert os.read(reading, 100) == b"through"
    again = open_end(os.getpid(), writing, READ)
    os.write(writing, b"back")
    assert os.read(again, 100) == b"back"
    for fd in (reading, writing, other, again):
        os.close(fd)


@pytest.mark.parametrize("damage", ["sh() { exit 3; }; exec() { exit 3; }", "ulimit -n 8", "PATH=", "set -e"])
async def test_a_damaged_shell_starts_programs_or_says_so(box: Sandbox, damage: str) -> None:
    await box.exec(damage)
    before = open_descriptors()
    try:
        program = await box.spawn("echo on", on_errors=lambda data: None)
    except SandboxError:
        pass
    else:
        assert await program.read() in (b"on\n", b"")
        await program.kill()
    assert open_descriptors() == before
    assert "on" in (await box.exec("echo on")).output


async def test_an_image_that_lies_about_its_pid(box: Sandbox) -> None:
    """The announcement is the sandbox's word: one that names another process finds no mark there."""
    forged = "printf() { builtin printf '\\000%s 0 1\\000' \"$2\"; }; export -f printf"
    await box.exec(forged)
    program = await box.spawn("exec cat", on_errors=lambda data: None)
    await program.write(b"on")
    assert await program.read() == b"on"
    await program.kill()
