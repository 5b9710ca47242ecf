"""Runtime ``remote``: the conformance suite against SWE-ReX's own server, and what is its own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollserve.errors import InvalidInput, SandboxError
from rollserve.sandbox.base import SandboxSpec
from rollserve.sandbox.remote.swerex import RemoteSettings, SwerexRuntime
from rollserve.testing.runtime_conformance import RuntimeConformance

pytest.importorskip("swerex")

from rollserve.testing.swerex_server import ServerDeployment, make_runtime

pytestmark = [pytest.mark.userns, pytest.mark.slow]


class TestSwerexRuntime(RuntimeConformance):
    factory = "rollserve.testing.swerex_server:make_runtime"
    many = 2

    async def test_reap_after_a_killed_worker(self, tmp_path: Path) -> None:
        """SWE-ReX lists no machines: their provider's own time-out ends them."""
        assert await make_runtime(data_dir=tmp_path).reap() == 0


class Failing(ServerDeployment):
    """One whose start fails after the machine was made."""

    made: list[Failing] = []

    async def start(self, *args: Any, **kwargs: Any) -> None:
        self.made.append(self)
        await super().start()
        raise RuntimeError("no more machines for you")


async def test_a_start_that_fails_is_stopped(tmp_path: Path) -> None:
    runtime = SwerexRuntime(data_dir=tmp_path, remote=RemoteSettings(make=lambda image: Failing()))
    with pytest.raises(SandboxError, match="no more machines"):
        await runtime.create(SandboxSpec(), owner="a/1", ttl_s=60)
    assert Failing.made.pop()._process is None
    await runtime.close()


async def test_a_start_that_is_given_up_is_stopped(tmp_path: Path) -> None:
    made: list[ServerDeployment] = []

    def make(image: str) -> ServerDeployment:
        made.append(ServerDeployment())
        return made[-1]

    runtime = SwerexRuntime(data_dir=tmp_path, remote=RemoteSettings(make=make))
    starting = asyncio.create_task(runtime.create(SandboxSpec(), owner="a/1", ttl_s=60))
    while not made or made[0]._process is None:
        await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert made[0]._process is None
    await runtime.close()


def test_images_are_those_of_a_registry(tmp_path: Path) -> None:
    settings = RemoteSettings(deployment={"type": "modal", "image": "python:3.11"})
    runtime = SwerexRuntime(data_dir=tmp_path, remote=settings)
    runtime.check_image("docker://registry.example.org/team/tool:v1")
    runtime.check_image("host")
    for image in ("/a/folder", "name"):
        with pytest.raises(InvalidInput):
            runtime.check_image(image)


async def test_what_it_has_not_is_refused(tmp_path: Path) -> None:
    runtime = make_runtime(data_dir=tmp_path)
    for spec in (SandboxSpec(prepare=("true",)), SandboxSpec(sockets={"/tmp/s": "/tmp/s"})):
        with pytest.raises(InvalidInput):
            await runtime.create(spec, owner="a/1", ttl_s=60)


async def test_without_a_deployment(tmp_path: Path) -> None:
    runtime = SwerexRuntime(data_dir=tmp_path)
    assert not runtime.report().usable
    with pytest.raises(SandboxError, match="no deployment"):
        await runtime.create(SandboxSpec(), owner="a/1", ttl_s=60)
