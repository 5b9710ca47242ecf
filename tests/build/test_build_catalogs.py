"""What a task may name together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from rollserve.build.catalogs import Catalogs, make_catalogs, make_hosts
from rollserve.build.images import image_settings
from rollserve.config import ImagesSettings, Settings, WorkerSettings
from rollserve.errors import InvalidInput
from rollserve.records.task import AgentSpec, GraderSpec, Task
from rollserve.testing.fakes_worker import FakeRuntime, Hooks, Journal


@pytest.fixture
async def catalogs(tmp_path: Path) -> AsyncIterator[Catalogs]:
    settings = Settings(data_dir=tmp_path, workers=WorkerSettings(runtime="none"))
    hosts = make_hosts(settings)
    yield make_catalogs(settings, hosts)
    await hosts.close()


@pytest.mark.parametrize(("agent", "options"), [("command", {"command": "x"}), ("pi", {})])
async def test_an_agent_that_acts_inside_needs_a_sandbox(
    catalogs: Catalogs, agent: str, options: dict[str, str]
) -> None:
    task = Task(
        instruction="x",
        agent=AgentSpec(name=agent, options=options),
        tools=[],
        grader=GraderSpec(name="exact", options={"answer": "x"}),
    )
    with pytest.raises(InvalidInput) as caught:
        await catalogs.check_task(task, "task")
    assert caught.value.field == "task.agent.name"


def needing(*limits: str) -> Task:
    return Task.model_validate(
        {
            "instruction": "x",
            "tools": [],
            "grader": {"name": "exact", "options": {"answer": "x"}},
            "limits": {"require": limits},
        }
    )


async def test_a_bound_that_can_not_be_held_here_is_refused(catalogs: Catalogs) -> None:
    await catalogs.check_task(needing(), "task")
    with pytest.raises(InvalidInput, match="memory_mb") as caught:
        await catalogs.check_task(needing("memory_mb"), "task")
    assert caught.value.field == "task.limits.require"
    await replace(catalogs, allow_unheld_limits=True).check_task(needing("memory_mb"), "task")


async def test_a_bound_that_is_held_is_not(catalogs: Catalogs, tmp_path: Path) -> None:
    runtime = FakeRuntime(Hooks(), Journal())
    runtime.enforces = ("memory_mb", "disk_mb")
    held = replace(catalogs, runtimes={"none": runtime})
    await held.check_task(needing("memory_mb", "disk_mb"), "task")
    with pytest.raises(InvalidInput, match="can't hold cpus for"):
        await held.check_task(needing("memory_mb", "cpus"), "task")


async def test_only_a_runtime_that_can_prepares(catalogs: Catalogs) -> None:
    grader = GraderSpec(name="exact", options={"answer": "x"})
    task = Task(instruction="x", prepare=["true"], tools=[], grader=grader)
    with pytest.raises(InvalidInput, match="prepares no images") as caught:
        await catalogs.check_task(task, "task")
    assert caught.value.field == "task.prepare"


async def test_an_image_is_checked_before_anything_is_started(catalogs: Catalogs) -> None:
    if "bubblewrap" not in catalogs.runtimes:
        pytest.skip("bubblewrap can't be used here")
    grader = GraderSpec(name="exact", options={"answer": "x"})
    for image in ("not-there", "/no/such.tar", "docker://BAD NAME"):
        task = Task(instruction="x", image=image, runtime="bubblewrap", tools=[], grader=grader)
        with pytest.raises(InvalidInput) as caught:
            await catalogs.check_task(task, "task")
        assert caught.value.field == "task.image"


def test_images_as_the_settings_have_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    images = ImagesSettings(max_gb=1.5, insecure_registries=["plain:5000"], prepare_s=5)
    made = image_settings(Settings(data_dir=tmp_path, images=images))
    assert (made.folder, made.max_bytes, made.prepare_s) == (tmp_path / "images", 1_500_000_000, 5)
    assert made.access.auth_file == tmp_path / "docker" / "config.json"
    assert made.access.insecure == ("plain:5000",)
    images = ImagesSettings(dir=tmp_path / "shared", auth_file=tmp_path / "auth.json")
    made = image_settings(Settings(data_dir=tmp_path, images=images))
    assert (made.folder, made.access.auth_file) == (tmp_path / "shared", tmp_path / "auth.json")
