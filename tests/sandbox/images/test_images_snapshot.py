"""Snapshots as images of the cache: what of an image is changed, deleted or hidden; and their place there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollserve.errors import InvalidInput, SandboxError
from rollserve.sandbox import copy_upper
from rollserve.sandbox.base import SandboxSpec
from rollserve.sandbox.box import ShellSandbox
from rollserve.sandbox.bubblewrap import BubblewrapRuntime
from rollserve.sandbox.images.base import Job
from rollserve.sandbox.images.shelf import ImageSettings
from rollserve.testing.image_files import Member, folder, make_image, small_root, tar_of

pytestmark = pytest.mark.userns

PROGRAMS = ("sh", "cat", "ls", "mkdir", "rm", "sleep", "id", "mkfifo", "ln", "mv", "chmod", "stat")


@pytest.fixture(scope="module")
def base() -> bytes:
    members = [Member("etc/old", b"old"), folder("data"), Member("data/x", b"x"), Member("data/y", b"y")]
    return tar_of([*small_root(PROGRAMS), *members, folder("tmp"), Member("tmp/of-the-image", b"")])


@pytest.fixture
async def runtime(open_dir: Path) -> AsyncIterator[BubblewrapRuntime]:
    runtime = BubblewrapRuntime(data_dir=open_dir, images=ImageSettings(folder=open_dir / "images"))
    report = runtime.report()
    if "snapshot" not in report.can:
        pytest.skip(f"there are no snapshots here: {report.detail}")
    yield runtime
    await runtime.close()


async def start(runtime: BubblewrapRuntime, image: str = "host", snapshot: str = "") -> ShellSandbox:
    return await runtime.create(SandboxSpec(image=image, snapshot=snapshot), owner="test", ttl_s=120)


async def said(runtime: BubblewrapRuntime, snapshot: str, command: str) -> str:
    box = await start(runtime, snapshot=snapshot)
    output = (await box.exec(command)).output
    await box.close()
    return output


@pytest.fixture
def image(open_dir: Path, base: bytes) -> str:
    settings = {"Env": ["WHO=image"], "WorkingDir": "/srv/app"}
    return str(make_image([base], settings=settings).write_archive(open_dir / "i.tar"))


async def test_changes_of_an_image_are_kept_as_they_are(runtime: BubblewrapRuntime, image: str) -> None:
    box = await start(runtime, image)
    changed = await box.exec(
        "rm /etc/old; rm -r /data; mkdir /data; echo z > /data/z; "
        "mkdir /new; echo n > /new/n; chmod 4711 /new/n; "
        "ls /tmp; echo t > /tmp/t; echo w > w; echo ws > /workspace/ws; ln -s /new/n link; mkfifo pipe; id -u"
    )
    assert changed.output == "home\n0\n"
    snapshot = await box.snapshot()
    await box.exec("rm -r /new; echo later > /data/later")
    looks = "ls /data /etc /tmp .; cat /new/n w /workspace/ws link; "
    looks += "echo $WHO $PWD; id -u; stat -c %a /new/n /tmp"
    assert (await said(runtime, snapshot, looks)).split() == [
        *(".:", "link", "w", "/data:", "z", "/etc:", "passwd", "/tmp:", "home", "t"),
        *("n", "w", "ws", "n", "image", "/srv/app", "0", "711", "1777"),
    ]


async def test_the_writable_layer_is_not_seen_inside(runtime: BubblewrapRuntime, image: str) -> None:
    for name in ("host", image):
        box = await start(runtime, name)
        assert "upper0" not in (await box.exec("ls /proc; cat /proc/self/status")).output
        assert (await box.exec("ls -d /proc/1/root/proc/upper0")).exit_code != 0


async def test_a_snapshot_is_an_image_of_the_cache(runtime: BubblewrapRuntime, image: str) -> None:
    box = await start(runtime, image)
    await box.exec("echo kept > f")
    snapshot = await box.snapshot()
    store = runtime.images.store
    (found,) = (one for one, _ in store.images() if one.id == snapshot)
    assert found.source == f"snapshot of {image}"
    assert 0 < found.layers[-1].size_bytes < 1 << 20
    runtime.check_image(snapshot)
    again = await start(runtime, snapshot)
    assert (await again.exec("cat f")).output == "kept\n"
    await asyncio.to_thread(store.prune, 0, Job())
    assert store.get(snapshot) is not None, "it is in use"
    await box.close()
    await again.close()
    await asyncio.to_thread(store.prune, 0, Job())
    assert store.get(snapshot) is None
    with pytest.raises(InvalidInput):
        await start(runtime, snapshot=snapshot)


async def test_a_snapshot_that_fails_or_is_cancelled_leaves_nothing(
    runtime: BubblewrapRuntime, image: str
) -> None:
    box = await start(runtime, image)
    deep = "/".join(["d"] * (copy_upper.MOST_DEPTH + 2))
    await box.exec(f"mkdir -p {deep}")
    with pytest.raises(SandboxError, match="nested too deeply"):
        await box.snapshot()
    await box.exec("rm -r d")
    snapping = asyncio.create_task(box.snapshot())
    await asyncio.sleep(0.01)
    snapping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await snapping
    root = runtime.images.store.root
    assert list((root / "tmp").iterdir()) == []
    assert (await box.exec("echo on")).output == "on\n"
    assert (await said(runtime, await box.snapshot(), "echo forked")) == "forked\n"


async def test_forks_of_forks_end_with_a_word(runtime: BubblewrapRuntime) -> None:
    """Over the host, layers can't be merged: an overlay takes only so many."""
    box = await start(runtime)
    with pytest.raises(SandboxError, match="layers upon each other are too many"):
        for number in range(60):
            await box.exec(f"echo {number} > f")
            snapshot = await box.snapshot()
            await box.close()
            box = await start(runtime, snapshot=snapshot)
    assert (await box.exec("cat f")).output.strip().isdigit()
    assert number > 10


async def test_over_an_image_layers_are_merged(runtime: BubblewrapRuntime, image: str) -> None:
    box = await start(runtime, image)
    for number in range(40):
        await box.exec(f"rm -f f{number - 1}; echo {number} > f{number}; echo {number} > /tmp/t")
        snapshot = await box.snapshot()
        await box.close()
        box = await start(runtime, snapshot=snapshot)
    assert (await box.exec("ls . /tmp; cat f39 /tmp/t")).output.split() == [
        *(".:", "f39", "/tmp:", "home", "t", "39", "39"),
    ]
