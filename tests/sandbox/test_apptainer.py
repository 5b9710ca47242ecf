"""Runtime ``apptainer``: the conformance suite where Apptainer is, and what is its own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from rollserve.errors import InvalidInput, SandboxError
from rollserve.sandbox.apptainer import ApptainerRuntime, ApptainerSettings
from rollserve.sandbox.base import SandboxSpec
from rollserve.testing.image_files import Member, folder, make_image, make_root, small_root, tar_of
from rollserve.testing.runtime_conformance import RuntimeConformance

pytestmark = [pytest.mark.userns, pytest.mark.apptainer]


@pytest.fixture(scope="module")
def plain_root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rollserve-root-") as name:
        os.chmod(name, 0o755)
        yield make_root(Path(name) / "root")


class TestApptainerRuntime(RuntimeConformance):
    factory = "rollserve.sandbox.apptainer:ApptainerRuntime"
    root: ClassVar[str]
    many = 16

    def image_reference(self) -> str:
        return self.root

    @pytest.fixture(autouse=True)
    def _look(self, plain_root: Path) -> None:
        type(self).root = str(plain_root)


@pytest.fixture
async def runtime(open_dir: Path) -> AsyncIterator[ApptainerRuntime]:
    runtime = ApptainerRuntime(data_dir=open_dir / "data")
    (open_dir / "data").mkdir()
    report = runtime.report()
    if not report.usable:
        pytest.skip(f"apptainer can't be used here: {report.detail}")
    yield runtime
    await runtime.close()


async def test_layers_of_an_image_are_one_folder(runtime: ApptainerRuntime, open_dir: Path) -> None:
    base = tar_of(
        [*small_root(("sh", "cat", "ls", "mkdir", "rm", "head")), Member("etc/old", b"old"), folder("data"),
         Member("data/x", b"x")]
    )  # fmt: skip
    change = tar_of(
        [Member("etc/.wh.old"), folder("data"), Member("data/.wh..wh..opq"), Member("data/y", b"y")]
    )
    work = {"Env": ["PATH=/bin", "WHO=image"], "WorkingDir": "/srv/app"}
    path = make_image([base, change], settings=work).write_archive(open_dir / "i.tar")
    spec = SandboxSpec(image=str(path), env={"TOKEN": "x"}, files={"note": b"hello"})
    box = await runtime.create(spec, owner="a/1", ttl_s=60)
    seen = await box.exec(
        "ls /etc/old 2>/dev/null; ls /data; echo $PWD $WHO $PATH $HOME $WORKSPACE $TOKEN; cat note"
    )
    assert " ".join(seen.output.split()) == "y /srv/app image /bin /root /srv/app x hello"
    assert (await box.exec("rm /data/y && mkdir /data/new && rm -r /data/new && ls /data")).output == ""
    again = await runtime.create(spec, owner="a/1", ttl_s=60)
    assert (await again.exec("ls /data")).output == "y\n"


async def test_prepare_steps(runtime: ApptainerRuntime, open_dir: Path) -> None:
    path = open_dir / "root.tar"
    path.write_bytes(tar_of(small_root(("sh", "cat", "head", "mkdir", "mv", "ls"))))
    spec = SandboxSpec(image=str(path), prepare=("echo made > made",))
    try:
        box = await runtime.create(spec, owner="a/1", ttl_s=60)
    except SandboxError as error:
        pytest.skip(f"bubblewrap, which prepares images, can't be used here: {error}")
    assert (await box.exec("cat made")).output == "made\n"


async def test_what_was_written_is_gone_with_the_sandbox(
    runtime: ApptainerRuntime, plain_root: Path, open_dir: Path
) -> None:
    box = await runtime.create(SandboxSpec(image=str(plain_root)), owner="a/1", ttl_s=60)
    await box.exec("mkdir -p a/b; touch a/b/c; chmod 000 a/b a")
    workers = open_dir / "data" / "apptainer" / "workers"
    assert [place.name for place in workers.glob("*/apptainer-*")] == [box.id]
    await box.close()
    assert not list(workers.glob("*/apptainer-*"))


def test_the_hosts_own_files_are_no_image(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no image 'host'"):
        ApptainerRuntime(data_dir=tmp_path).check_image("host")


async def test_where_it_is_not(tmp_path: Path, plain_root: Path) -> None:
    settings = ApptainerSettings(command=("/no/such/apptainer",))
    runtime = ApptainerRuntime(data_dir=tmp_path, apptainer=settings)
    assert "/no/such/apptainer" in runtime.report().detail
    with pytest.raises(SandboxError, match="/no/such/apptainer"):
        await runtime.create(SandboxSpec(image=str(plain_root)), owner="a/1", ttl_s=60)
    assert await runtime.reap() == 0
    await runtime.close()


async def test_one_that_does_not_work_is_reported(tmp_path: Path) -> None:
    report = ApptainerRuntime(
        data_dir=tmp_path, apptainer=ApptainerSettings(command=("/bin/false",))
    ).report()
    assert not report.usable
    assert report.remedy
