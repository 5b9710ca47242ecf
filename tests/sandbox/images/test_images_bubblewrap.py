"""Sandboxes that start from images of the cache."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollserve.errors import InvalidInput, SandboxError
from rollserve.sandbox.base import SandboxSpec
from rollserve.sandbox.box import ShellSandbox
from rollserve.sandbox.bubblewrap import BubblewrapRuntime
from rollserve.sandbox.images.base import Job
from rollserve.sandbox.images.build import BuildPlan
from rollserve.sandbox.images.shelf import ImageSettings
from rollserve.testing.image_files import Member, folder, make_image, small_root, symlink, tar_of

pytestmark = pytest.mark.userns

PROGRAMS = ("sh", "cat", "ls", "head", "mkdir", "rm", "sleep", "id", "env", "cp")


@pytest.fixture(scope="module")
def base() -> bytes:
    return tar_of([*small_root(PROGRAMS), Member("etc/old", b"old"), folder("data"), Member("data/x", b"x")])


@pytest.fixture
def settings(open_dir: Path) -> ImageSettings:
    return ImageSettings(folder=open_dir / "images", prepare_s=30)


def usable(data_dir: Path, settings: ImageSettings) -> BubblewrapRuntime:
    """Where there is none, the test is skipped and says why."""
    runtime = BubblewrapRuntime(data_dir=data_dir, images=settings)
    report = runtime.report()
    if not report.usable:
        pytest.skip(f"bubblewrap can't be used here: {report.detail}")
    return runtime


@pytest.fixture
async def runtime(open_dir: Path, settings: ImageSettings) -> AsyncIterator[BubblewrapRuntime]:
    runtime = usable(open_dir, settings)
    yield runtime
    await runtime.close()


async def start(runtime: BubblewrapRuntime, image: str, *prepare: str, **files: bytes) -> ShellSandbox:
    return await runtime.create(
        SandboxSpec(image=image, prepare=prepare, files=files), owner="test", ttl_s=120
    )


async def said(runtime: BubblewrapRuntime, image: str, command: str, *prepare: str) -> str:
    box = await start(runtime, image, *prepare)
    try:
        return (await box.exec(command)).output
    finally:
        await box.close()


async def test_an_image_with_all_its_settings(
    runtime: BubblewrapRuntime, open_dir: Path, base: bytes
) -> None:
    change = tar_of(
        [Member("etc/.wh.old"), folder("data"), Member("data/.wh..wh..opq"), Member("data/y", b"y")]
    )
    work = {"Env": ["PATH=/bin", "WHO=image"], "WorkingDir": "/srv/app", "User": "builder"}
    path = make_image([base, change], settings=work).write_archive(open_dir / "i.tar")
    runtime.check_image(str(path))
    box = await start(runtime, str(path), note=b"hello")
    seen = await box.exec("ls /etc /data; echo $PWD $WHO $PATH $HOME $WORKSPACE; id -u; id -g; cat note")
    lines = " ".join(seen.output.split())
    assert lines == "/data: y /etc: passwd /srv/app image /bin /root /srv/app 1000 1000 hello"
    assert (await box.exec("echo changed > /etc/passwd; mkdir /new; rm /data/y; ls /data")).output == ""
    assert await box.read_file("note") == b"hello"
    again = await start(runtime, str(path))
    assert (await again.exec("ls /data / | cat; cat /etc/passwd")).output.startswith("/:\nbin\n")
    assert "new" not in (await again.exec("ls /")).output
    await box.close()
    await again.close()


async def test_the_user_is_root_where_none_is_named(
    runtime: BubblewrapRuntime, open_dir: Path, base: bytes
) -> None:
    path = make_image([base], compression="zstd").write_layout(open_dir / "layout")
    assert await said(runtime, str(path), "id -u; pwd; echo $HOME; echo x > /etc/n; cat /etc/n") == (
        "0\n/workspace\n/root\nx\n"
    )


async def test_a_root_file_system(runtime: BubblewrapRuntime, open_dir: Path, base: bytes) -> None:
    (open_dir / "root.tar").write_bytes(base)
    assert await said(runtime, str(open_dir / "root.tar"), "cat /etc/old; id -u") == "old0\n"


async def test_what_an_image_has_in_the_workspace_is_there(
    runtime: BubblewrapRuntime, open_dir: Path, base: bytes
) -> None:
    layer = tar_of([folder("workspace"), Member("workspace/kept", b"k")])
    path = make_image([base, layer]).write_archive(open_dir / "i.tar")
    assert await said(runtime, str(path), "echo more >> kept; cat kept") == "kmore\n"


@pytest.mark.parametrize(
    ("members", "config", "why"),
    [
        ([symlink("proc", "/etc")], {}, "/proc is no folder"),
        ([symlink("workspace", "/oldroot/tmp")], {}, "/workspace is no folder"),
        ([], {"WorkingDir": "/etc/passwd"}, "working directory"),
        ([symlink("a", "b"), symlink("b", "a")], {"WorkingDir": "/a"}, "too many symbolic links"),
        ([], {"User": "nobody-here"}, "no user 'nobody-here'"),
        ([], {"User": "0:no-group"}, "no group 'no-group'"),
        ([Member("bin/.wh.sh")], {}, "no /bin/sh"),
    ],
)
async def test_images_that_cannot_be_started(
    runtime: BubblewrapRuntime,
    open_dir: Path,
    base: bytes,
    members: list[Member],
    config: dict[str, str],
    why: str,
) -> None:
    path = make_image([base, tar_of(members)], settings=config).write_archive(open_dir / "i.tar")
    with pytest.raises(SandboxError, match=why):
        await start(runtime, str(path))
    assert os.listdir(runtime.images.store.root / "tmp") == []


async def test_a_working_directory_behind_a_link_stays_inside(
    runtime: BubblewrapRuntime, open_dir: Path, base: bytes
) -> None:
    (open_dir / "target").mkdir(mode=0o777)
    (open_dir / "target").chmod(0o777)
    layer = tar_of([symlink("srv", str(open_dir / "target"))])
    made = make_image([base, layer], settings={"WorkingDir": "/srv/deep"})
    path = made.write_archive(open_dir / "i.tar")
    assert await said(runtime, str(path), "pwd") == f"{open_dir}/target/deep\n"
    assert os.listdir(open_dir / "target") == []


async def test_what_is_in_use_is_not_pruned(runtime: BubblewrapRuntime, open_dir: Path, base: bytes) -> None:
    path = make_image([base]).write_archive(open_dir / "i.tar")
    store = runtime.images.store
    box, other = await start(runtime, str(path)), await start(runtime, str(path))
    await other.close()
    assert await asyncio.to_thread(store.prune, 0, Job()) == 0
    assert (await box.exec("cat /etc/old")).output == "old"
    await box.close()
    assert await asyncio.to_thread(store.prune, 0, Job()) == 1
    assert os.listdir(store.root / "layers") == []
    assert await said(runtime, str(path), "cat /etc/old") == "old"  # it comes back by itself


async def test_many_at_once_unpack_once(runtime: BubblewrapRuntime, open_dir: Path, base: bytes) -> None:
    path = make_image([base]).write_archive(open_dir / "i.tar")
    outputs = await asyncio.gather(*(said(runtime, str(path), "cat /etc/old") for _ in range(8)))
    assert outputs == ["old"] * 8
    assert len(os.listdir(runtime.images.store.root / "layers")) == 1


async def test_a_cancelled_start_leaves_the_making_to_the_next(
    runtime: BubblewrapRuntime, open_dir: Path, base: bytes
) -> None:
    path = make_image([base]).write_archive(open_dir / "i.tar")
    starting = asyncio.create_task(start(runtime, str(path), "sleep 0.5"))
    await asyncio.sleep(0.2)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert await said(runtime, str(path), "cat /etc/old", "sleep 0.5") == "old"
    assert len(runtime.images.store.images()) == 2


async def test_closing_stops_what_is_made(open_dir: Path, settings: ImageSettings, base: bytes) -> None:
    runtime = usable(open_dir, settings)
    path = make_image([base]).write_archive(open_dir / "i.tar")
    starting = asyncio.create_task(start(runtime, str(path), "sleep 1000"))
    await asyncio.sleep(1)
    await runtime.close()
    with pytest.raises((SandboxError, asyncio.CancelledError)):
        await starting
    assert os.listdir(runtime.images.store.root / "tmp") == []


# -- prepare -----------------------------------------------------------------------------------


async def test_prepare_steps_run_once(runtime: BubblewrapRuntime, open_dir: Path, base: bytes) -> None:
    path = make_image([base], settings={"Env": ["WHO=image"]}).write_archive(open_dir / "i.tar")
    steps = ("echo $WHO > /etc/made; rm /etc/old; rm -r /data; mkdir /data", "mkdir deep; echo 1 > deep/one")
    look = "cat /etc/made deep/one; ls /etc /data | cat; pwd"
    for _ in range(2):
        seen = await said(runtime, str(path), look, *steps)
        assert " ".join(seen.split()) == "image 1 /data: /etc: made passwd /workspace"
    assert await said(runtime, str(path), "cat /etc/old") == "old"
    assert len(runtime.images.store.images()) == 2
    other = BubblewrapRuntime(data_dir=open_dir, images=ImageSettings(folder=open_dir / "images"))
    assert (await said(other, str(path), look, *steps)).startswith("image\n1\n")
    await other.close()
    assert len(runtime.images.store.images()) == 2


async def test_prepare_has_no_network(runtime: BubblewrapRuntime, open_dir: Path, base: bytes) -> None:
    path = make_image([base]).write_archive(open_dir / "i.tar")
    seen = await said(runtime, str(path), "cat net", "cat /proc/net/dev > net")
    assert [line.split(":")[0].strip() for line in seen.splitlines()[2:]] == ["lo"]


async def test_a_failing_step_shows_what_it_said(
    runtime: BubblewrapRuntime, open_dir: Path, base: bytes
) -> None:
    path = make_image([base]).write_archive(open_dir / "i.tar")
    with pytest.raises(SandboxError) as caught:
        await start(runtime, str(path), "echo fine", "echo to no avail >&2; exit 3")
    text = str(caught.value)
    assert "prepare step 2 of 2 (echo to no avail >&2; exit 3) ended with code 3:\nto no avail" in text
    assert os.listdir(runtime.images.store.root / "tmp") == []
    assert len(runtime.images.store.images()) == 1


async def test_a_hanging_step_ends(open_dir: Path, base: bytes) -> None:
    settings = ImageSettings(folder=open_dir / "images", prepare_s=1)
    runtime = usable(open_dir, settings)
    path = make_image([base]).write_archive(open_dir / "i.tar")
    with pytest.raises(SandboxError, match="was not done in 1 s:\nwaiting"):
        await start(runtime, str(path), "echo waiting; sleep 1000")
    assert os.listdir(runtime.images.store.root / "tmp") == []
    await runtime.close()


async def test_prepared_host(runtime: BubblewrapRuntime) -> None:
    steps = ("echo here > here",)
    box = await start(runtime, "host", *steps)
    seen = await box.exec("cat here; echo more >> here; pwd")
    await box.close()
    assert seen.output == "here\n/workspace\n"
    assert await said(runtime, "host", "cat here", *steps) == "here\n"


# -- recipes -----------------------------------------------------------------------------------


async def test_a_recipe_is_built_and_started(runtime: BubblewrapRuntime, open_dir: Path, base: bytes) -> None:
    (open_dir / "root.tar").write_bytes(base)
    recipe = open_dir / "Dockerfile"
    (open_dir / "app").mkdir()
    (open_dir / "app" / "run").write_text("echo $WHO")
    (open_dir / ".dockerignore").write_text("*.tar\nimages\n")
    recipe.write_text(
        f"FROM {open_dir}/root.tar\nARG WHO=nobody\nENV WHO=${{WHO}} PATH=/bin\nWORKDIR /srv\n"
        "RUN pwd > where && cat where\nCOPY app /srv/app\nRUN cp app/run copied && echo $WHO > who\n"
    )
    assert await said(runtime, str(recipe), "cat where who; sh copied; pwd; ls") == (
        "/srv\nnobody\nnobody\n/srv\napp\ncopied\nwhere\nwho\n"
    )
    plan = BuildPlan(recipe, arguments={"WHO": "me"})
    heard: list[str] = []
    image = await runtime.images.build(plan, Job(report=lambda what, done, total: heard.append(what)))
    assert "step 1 of 3 (line 5): /srv" in heard
    assert await said(runtime, f"sha256:{image.id[:12]}", "cat who") == "me\n"
    heard.clear()
    again = await runtime.images.build(plan, Job(report=lambda what, done, total: heard.append(what)))
    assert again == image
    assert not any("line 5): " in what for what in heard)


async def test_steps_before_a_change_are_kept(
    runtime: BubblewrapRuntime, open_dir: Path, base: bytes
) -> None:
    (open_dir / "root.tar").write_bytes(base)
    recipe = open_dir / "Dockerfile"
    layers = runtime.images.store.root / "layers"
    recipe.write_text(f"FROM {open_dir}/root.tar\nRUN echo 1 > /one\nRUN echo 2 > /two\n")
    await runtime.images.build(BuildPlan(recipe), Job())
    before = set(os.listdir(layers))
    recipe.write_text(f"FROM {open_dir}/root.tar\nRUN echo 1 > /one\nRUN echo 3 > /two\n")
    await runtime.images.build(BuildPlan(recipe), Job())
    assert len(set(os.listdir(layers)) - before) == 1


async def test_a_failing_run_names_its_line(runtime: BubblewrapRuntime, open_dir: Path, base: bytes) -> None:
    (open_dir / "root.tar").write_bytes(base)
    recipe = open_dir / "Dockerfile"
    recipe.write_text(f"FROM {open_dir}/root.tar\n\nRUN echo no luck; exit 4\n")
    with pytest.raises(SandboxError, match=r"line 3: RUN .* ended with code 4:\nno luck"):
        await runtime.images.build(BuildPlan(recipe), Job())
    recipe.write_text("FROM scratch\nVOLUME /x\n")
    with pytest.raises(InvalidInput, match="line 2: VOLUME"):
        runtime.check_image(str(recipe))


async def test_from_scratch(runtime: BubblewrapRuntime, open_dir: Path) -> None:
    root = open_dir / "root"
    for member in small_root(("sh", "cat")):
        place = root / member.name
        place.parent.mkdir(parents=True, exist_ok=True)
        if member.mode == 0o755 and not member.data:
            place.mkdir(exist_ok=True)
        else:
            place.write_bytes(member.data)
            place.chmod(member.mode)
    recipe = open_dir / "Dockerfile"
    recipe.write_text("FROM scratch\nCOPY root/ /\nENV PATH=/bin\nRUN echo built > /built\n")
    assert await said(runtime, str(recipe), "cat /built") == "built\n"


async def test_names_that_are_not_there(runtime: BubblewrapRuntime, open_dir: Path) -> None:
    for text in ("nothing", "sha256:" + "0" * 64, str(open_dir / "missing.tar"), "python 3"):
        with pytest.raises(InvalidInput) as caught:
            runtime.check_image(text)
        assert caught.value.field == "image"
    runtime.check_image("docker://example.org/a/b:c")
