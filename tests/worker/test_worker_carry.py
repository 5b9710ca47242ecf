"""Files on their way from a run sandbox to a fresh grading sandbox, in real sandboxes."""

from __future__ import annotations

import io
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollserve.errors import AgentFailure, InfrastructureFailure, SandboxError
from rollserve.rollouts.keepsakes import Carried, pack, unpack
from rollserve.rollouts.worker_ports import Bounds
from rollserve.sandbox.base import ExecResult, Runtime, Sandbox, SandboxSpec
from rollserve.sandbox.bubblewrap import BubblewrapRuntime
from rollserve.sandbox.process import ProcessRuntime
from rollserve.testing.fakes import FakeSandbox

RUNTIMES: tuple[type[BubblewrapRuntime] | type[ProcessRuntime], ...] = (BubblewrapRuntime, ProcessRuntime)
PATHS = ("/workspace",)


@pytest.fixture(params=RUNTIMES, ids=["bubblewrap", "process"])
async def runtime(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Runtime]:
    runtime = request.param(data_dir=tmp_path)
    report = runtime.report()
    if not report.usable:
        pytest.skip(report.detail)
    yield runtime
    await runtime.close()


@pytest.fixture
async def run(runtime: Runtime) -> Sandbox:
    return await runtime.create(SandboxSpec(files={"given": b"g"}), owner="run", ttl_s=120)


@pytest.fixture
async def fresh(runtime: Runtime) -> Sandbox:
    return await runtime.create(SandboxSpec(files={"given": b"fresh"}), owner="grade", ttl_s=120)


async def carry(run: Sandbox, *paths: str, log: list[str] | None = None, limit: int = 1 << 20) -> Carried:
    lines = [] if log is None else log
    return await pack(run, paths, name="a", bounds=Bounds(carry_bytes=limit), log=lines.append)


async def lay_down(fresh: Sandbox, carried: Carried, *paths: str) -> None:
    await unpack(fresh, carried, paths, name="a", timeout_s=60)


async def out(sandbox: Sandbox, command: str) -> str:
    result = await sandbox.exec(command)
    assert result.exit_code == 0, result.output
    return result.output.strip()


async def test_what_the_agent_left_is_there_as_it_was(run: Sandbox, fresh: Sandbox) -> None:
    await out(run, "echo '#!/bin/sh\necho hi' > tool; chmod 755 tool; ln -s tool link; mkdir -p 'a b/c'")
    await out(run, "printf '\\377\\000' > 'a b/c/bytes'; echo changed > given; cd 'a b'")
    await lay_down(fresh, await carry(run, *PATHS), *PATHS)
    assert await out(fresh, "cd \"$WORKSPACE\"; ./link; cat given; find . | sort | tr '\\n' ' '") == (
        "hi\nchanged\n. ./a b ./a b/c ./a b/c/bytes ./given ./link ./tool"
    )
    assert await fresh.read_file("a b/c/bytes") == b"\xff\x00"


async def test_only_what_was_asked_for_and_is_there(run: Sandbox, fresh: Sandbox) -> None:
    await out(run, "mkdir sub; echo 1 > sub/one; echo 2 > two")
    paths = ("sub", "missing", "/workspace/not/there")
    await lay_down(fresh, await carry(run, *paths), *paths)
    assert await out(fresh, 'cd "$WORKSPACE"; find . | sort | tr "\\n" " "') == ". ./given ./sub ./sub/one"


async def test_nothing_there_is_nothing_carried(run: Sandbox, fresh: Sandbox) -> None:
    carried = await carry(run, "missing")
    assert carried == Carried()
    await lay_down(fresh, carried, "missing")
    assert await out(fresh, 'cat "$WORKSPACE"/given') == "fresh"


async def test_places_outside_of_the_workspace(runtime: Runtime, run: Sandbox, fresh: Sandbox) -> None:
    if not runtime.report().isolated:
        pytest.skip("the root of this sandbox is the host's")
    await out(run, "mkdir -p /tmp/deep; echo x > /tmp/deep/file")
    paths = ("/tmp/deep", "/workspace")
    await lay_down(fresh, await carry(run, *paths), *paths)
    assert await out(fresh, "cat /tmp/deep/file /workspace/given") == "x\ng"


async def test_too_much_is_the_agents_fault(run: Sandbox) -> None:
    await out(run, "head -c 300000 /dev/zero > big")
    with pytest.raises(AgentFailure, match="over 200000 bytes"):
        await carry(run, *PATHS, limit=200_000)


async def test_what_can_not_be_read_is_left_out_and_said(run: Sandbox, fresh: Sandbox) -> None:
    unreadable = "echo s > secret; chmod 000 secret; echo o > open; if cat secret; then :; else echo no; fi"
    said = (await run.exec(unreadable)).output
    log: list[str] = []
    await lay_down(fresh, await carry(run, *PATHS, log=log), *PATHS)
    assert await out(fresh, 'cat "$WORKSPACE"/open') == "o"
    if said.endswith("no\n"):  # root reads everything
        assert "secret" in log[0]


async def test_the_root_can_not_be_carried(run: Sandbox) -> None:
    with pytest.raises(InfrastructureFailure, match="can't carry"):
        await carry(run, "/")


def archive(**members: bytes) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name.replace("__", "/"))
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return data.getvalue()


async def test_a_forged_archive_brings_nothing_else(run: Sandbox, fresh: Sandbox, tmp_path: Path) -> None:
    forged = archive(sub__good=b"1", other=b"2", **{"..__..__escaped": b"3", f"{tmp_path}/forged": b"4"})
    await out(fresh, 'cd "$WORKSPACE"; mkdir sub')
    await lay_down(fresh, Carried(workspace=forged), "sub")
    assert await out(fresh, 'cd "$WORKSPACE"; find . | sort | tr "\\n" " "') == ". ./given ./sub"
    assert not (tmp_path / "forged").exists()


async def test_what_is_no_archive_is_infrastructures(fresh: Sandbox) -> None:
    with pytest.raises(InfrastructureFailure, match="can't be unpacked"):
        await lay_down(fresh, Carried(workspace=b"garbage" * 1000), *PATHS)


async def test_a_sandbox_full_of_the_agents_processes_is_the_agents_fault() -> None:
    words = "bash: fork: Resource temporarily unavailable"
    full = FakeSandbox(lambda _: ExecResult(output=words, exit_code=254))
    with pytest.raises(AgentFailure, match="leaves no process"):
        await carry(full, *PATHS)
    broken = FakeSandbox(lambda _: ExecResult(output="who knows", exit_code=1))
    with pytest.raises(SandboxError):
        await carry(broken, *PATHS)
