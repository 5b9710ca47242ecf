"""Runtimes ``podman`` and ``docker``: the conformance suite where an engine is, and what is their own."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar

import pytest

from rollserve.errors import InvalidInput, SandboxError
from rollserve.sandbox.base import SandboxLimits, SandboxSpec
from rollserve.sandbox.containers.arguments import LABEL, MarkOf
from rollserve.sandbox.containers.runtime import (
    DEFAULTS,
    ContainerRuntime,
    ContainerSettings,
    DockerRuntime,
    PodmanRuntime,
)
from rollserve.testing.runtime_conformance import RuntimeConformance

pytestmark = pytest.mark.containers


class _EngineConformance(RuntimeConformance):
    engine: ClassVar[str]
    root: ClassVar[str]
    many = 12

    def image_reference(self) -> str:
        return self.root

    @pytest.fixture(autouse=True)
    def _look(self, small_root: Path, refusals: dict[str, str]) -> None:
        if refusals[self.engine]:
            pytest.skip(f"{self.engine} starts no container here: {refusals[self.engine]}")
        type(self).root = str(small_root)


class TestPodmanRuntime(_EngineConformance):
    factory = "rollserve.sandbox.containers.runtime:PodmanRuntime"
    engine = "podman"


class TestDockerRuntime(_EngineConformance):
    factory = "rollserve.sandbox.containers.runtime:DockerRuntime"
    engine = "docker"


@pytest.fixture(params=[PodmanRuntime, DockerRuntime], ids=["podman", "docker"])
async def runtime(
    request: pytest.FixtureRequest, open_dir: Path, refusals: dict[str, str]
) -> AsyncIterator[ContainerRuntime]:
    kind: type[ContainerRuntime] = request.param
    if refusals[kind.name]:
        pytest.skip(f"{kind.name} starts no container here: {refusals[kind.name]}")
    runtime = kind(data_dir=open_dir)
    yield runtime
    await runtime.close()


def engine(runtime: ContainerRuntime, *arguments: str) -> list[str]:
    """What the engine says, in words."""
    line = [runtime.name, *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=True).stdout.split()


def containers(runtime: ContainerRuntime, sandbox_id: str) -> list[str]:
    """Those that the engine lists under that name."""
    return engine(runtime, "ps", "--all", "--quiet", "--filter", f"name={sandbox_id}")


def plant(runtime: ContainerRuntime, name: str, marks: MarkOf, plain: tuple[str, ...]) -> None:
    """A container as an engine makes it whose client has given up."""
    engine(runtime, "run", "--detach", "--name", name, *marks.arguments(name), *plain, "sleep", "300")


async def test_what_nobody_holds_is_removed(
    runtime: ContainerRuntime, small_root: Path, open_dir: Path, plain: tuple[str, ...]
) -> None:
    box = await runtime.create(SandboxSpec(image=str(small_root)), owner="a/1", ttl_s=60)
    own_home = next((open_dir / runtime.name / "workers").iterdir())
    root, soon, past = open_dir / runtime.name, time.time() + 600, time.time() - 600
    elsewhere, mark = open_dir / "another-server", secrets.token_hex(4)
    planted = {
        f"given-up-{mark}": MarkOf(own_home, root, "a/2", soon),
        f"of-the-dead-{mark}": MarkOf(root / "workers" / "gone", root, "a/3", soon),
        f"past-{mark}": MarkOf(elsewhere / "workers" / "w", elsewhere, "b/1", past),
        f"of-others-{mark}": MarkOf(elsewhere / "workers" / "w", elsewhere, "b/2", soon),
    }
    try:
        for name, marks in planted.items():
            plant(runtime, name, marks, plain)
        assert await runtime.reap() == 3
        assert [bool(containers(runtime, name)) for name in planted] == [False, False, False, True]
        assert (await box.exec("echo on")).output == "on\n"
        assert await runtime.reap() == 0
    finally:
        left = set(engine(runtime, "ps", "--all", "--format", "{{.Names}}"))
        engine(runtime, "rm", "--force", *planted.keys() & left)


async def test_close_removes_the_container(runtime: ContainerRuntime, small_root: Path) -> None:
    box = await runtime.create(SandboxSpec(image=str(small_root)), owner="a/1", ttl_s=60)
    assert containers(runtime, box.id)
    await box.close()
    assert not containers(runtime, box.id)


async def test_a_start_that_is_given_up_leaves_no_container(
    runtime: ContainerRuntime, small_root: Path
) -> None:
    spec = SandboxSpec(image=str(small_root))
    await (await runtime.create(spec, owner="a/1", ttl_s=60)).close()
    for delay_s in (0.05, 0.1, 0.2):
        starting = asyncio.create_task(runtime.create(spec, owner="a/1", ttl_s=60))
        await asyncio.sleep(delay_s)
        starting.cancel()
        try:
            await (await starting).close()
        except asyncio.CancelledError:
            pass
    assert not containers(runtime, f"{runtime.name}-")


async def test_a_killed_container_is_noticed(runtime: ContainerRuntime, small_root: Path) -> None:
    box = await runtime.create(SandboxSpec(image=str(small_root)), owner="a/1", ttl_s=60)
    running = asyncio.create_task(box.exec("sleep 60"))
    await asyncio.sleep(0.1)
    engine(runtime, "kill", box.id)
    with pytest.raises(SandboxError, match="gone"):
        await running
    await box.close()


async def test_read_only_has_one_bound_for_what_is_written(
    runtime: ContainerRuntime, small_root: Path, tmp_path: Path
) -> None:
    settings = ContainerSettings(commands=DEFAULTS.commands, read_only=True)
    bounded = type(runtime)(data_dir=tmp_path, containers=settings)
    assert "disk_mb" in bounded.report().enforces
    limits = SandboxLimits(disk_mb=32)
    box = await bounded.create(SandboxSpec(image=str(small_root), limits=limits), owner="a/1", ttl_s=60)
    for place in ("/workspace/big", "/tmp/big", "/dev/shm/big", "/etc/big", "/big"):
        assert (await box.exec(f"head -c 33000000 /dev/zero > {place}")).exit_code != 0, place
        await box.exec(f"rm -f {place}")
    assert (await box.exec("echo x > f; cat f")).output == "x\n"
    await bounded.close()


async def test_prepare_steps_are_a_layer_of_the_image(runtime: ContainerRuntime, small_root: Path) -> None:
    spec = SandboxSpec(image=str(small_root), prepare=("echo made > made; rm -f /etc/motd",))
    try:
        box = await runtime.create(spec, owner="a/1", ttl_s=60)
    except SandboxError as error:
        pytest.skip(f"bubblewrap, which prepares images, can't be used here: {error}")
    assert (await box.exec("cat made; ls /etc/motd /etc/passwd 2>/dev/null")).output == "made\n/etc/passwd\n"


def test_the_hosts_own_files_are_no_image(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no image 'host'"):
        PodmanRuntime(data_dir=tmp_path).check_image("host")


async def test_an_engine_that_is_not_there(tmp_path: Path, small_root: Path) -> None:
    settings = ContainerSettings(commands={"podman": ("/no/such/podman",)})
    runtime = PodmanRuntime(data_dir=tmp_path, containers=settings)
    report = runtime.report()
    assert not report.usable
    assert "/no/such/podman" in report.detail
    with pytest.raises(SandboxError, match="/no/such/podman"):
        await runtime.create(SandboxSpec(image=str(small_root)), owner="a/1", ttl_s=60)
    assert await runtime.reap() == 0
    await runtime.close()


def test_labels_that_are_not_ours() -> None:
    assert MarkOf.read({LABEL: "x"}) is None
