"""What a task may name together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollserve.agent.harness.table import HARNESSES
from rollserve.build.catalogs import Catalogs, make_catalogs, make_hosts
from rollserve.build.images import image_settings
from rollserve.build.network import make_egress
from rollserve.config import (
    ApiSettings,
    ImagesSettings,
    NetworkSettings,
    SessionAddressSettings,
    Settings,
    WorkerSettings,
)
from rollserve.errors import ConfigError, InvalidInput
from rollserve.records.task import AgentSpec, GraderSpec, Task
from rollserve.sandbox.base import RuntimeReport
from rollserve.testing.fakes_sandbox import FakeRuntime
from rollserve.testing.journal import Hooks, Journal


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


@pytest.mark.parametrize("below", ["a/b", "a/b/c", "./a//b", "x/../a/b"])
async def test_a_file_that_is_to_be_a_folder_too_is_refused(catalogs: Catalogs, below: str) -> None:
    grader = GraderSpec(name="exact", options={"answer": "x"})
    task = Task(instruction="x", tools=[], grader=grader, files={"a": "1", below: "2"})
    with pytest.raises(InvalidInput, match="'a' is a file") as caught:
        await catalogs.check_task(task, "task")
    assert caught.value.field == f"task.files.{below}"
    await catalogs.check_task(task.model_copy(update={"files": {"a": "1", "ab": "2", "/a/b": "3"}}), "task")


def harness_task(**changes: Any) -> Task:
    grader = GraderSpec(name="exact", options={"answer": "x"})
    return Task(instruction="x", tools=[], grader=grader, agent=AgentSpec(name="pi"), **changes)


def in_sandboxes(catalogs: Catalogs) -> Catalogs:
    """Sandboxes that start from images of this machine."""
    return replace(catalogs, runtimes={"bubblewrap": FakeRuntime(Hooks(), Journal())})


async def test_a_harness_that_is_not_installed_is_refused(catalogs: Catalogs, tmp_path: Path) -> None:
    held, task = in_sandboxes(catalogs), harness_task(runtime="bubblewrap")
    with pytest.raises(InvalidInput, match="'pi' is not installed") as caught:
        await held.check_task(task, "task")
    assert caught.value.field == "task.agent.name"
    assert f"rollserve.agent.harness.install --into {tmp_path / 'harnesses'} pi" in str(caught.value.hint)
    program = tmp_path / "harnesses" / HARNESSES["pi"].folder / "bin" / "pi"
    program.parent.mkdir(parents=True)
    program.touch()
    await held.check_task(task, "task")


@pytest.mark.parametrize("changes", [{"image": "mine"}, {"prepare": ["true"]}, {"env": {"PATH": "/opt/bin"}}])
async def test_what_another_image_holds_is_for_the_attempt_to_see(
    catalogs: Catalogs, changes: dict[str, Any]
) -> None:
    await in_sandboxes(catalogs).check_task(harness_task(runtime="bubblewrap", **changes), "task")


async def test_what_is_mounted_needs_a_runtime_that_mounts(catalogs: Catalogs, tmp_path: Path) -> None:
    held = replace(catalogs, runtimes={"process": FakeRuntime(Hooks(), Journal())})
    program = tmp_path / "harnesses" / HARNESSES["pi"].folder / "bin" / "pi"
    program.parent.mkdir(parents=True)
    program.touch()
    with pytest.raises(InvalidInput, match="mounts nothing") as caught:
        await held.check_task(harness_task(runtime="process"), "task")
    assert caught.value.field == "task.runtime"


def elsewhere(catalogs: Catalogs, *, advertises: bool) -> Catalogs:
    """Sandboxes on other machines."""
    runtime = FakeRuntime(Hooks(), Journal())
    runtime.can = ("dial",)
    return replace(catalogs, runtimes={"remote": runtime}, advertises_sessions=advertises)


def command_task() -> Task:
    agent = AgentSpec(name="command", options={"command": "x"})
    return harness_task().model_copy(update={"agent": agent, "runtime": "remote"})


async def test_an_agent_inside_a_sandbox_elsewhere_needs_an_address(catalogs: Catalogs) -> None:
    with pytest.raises(InvalidInput, match="advertises no address") as caught:
        await elsewhere(catalogs, advertises=False).check_task(command_task(), "task")
    assert caught.value.field == "task.runtime"
    for setting in ("session_address.url", ".certificate_file", ".key_file"):
        assert setting in (caught.value.hint or "")
    await elsewhere(catalogs, advertises=True).check_task(command_task(), "task")


async def test_an_agent_in_the_worker_needs_none(catalogs: Catalogs) -> None:
    task = harness_task(runtime="remote").model_copy(update={"agent": AgentSpec(name="tool")})
    await elsewhere(catalogs, advertises=False).check_task(task, "task")


async def test_a_runtime_without_any_way_is_refused(catalogs: Catalogs) -> None:
    held = elsewhere(catalogs, advertises=True)
    runtime = FakeRuntime(Hooks(), Journal())
    runtime.can = ()
    with pytest.raises(InvalidInput, match="no agent inside reaches its session") as caught:
        await replace(held, runtimes={"remote": runtime}).check_task(command_task(), "task")
    assert caught.value.field == "task.runtime"


async def test_a_sandbox_elsewhere_mounts_no_harness_of_this_machine(
    catalogs: Catalogs, tmp_path: Path
) -> None:
    held = elsewhere(catalogs, advertises=True)
    await held.check_task(harness_task(runtime="remote"), "task")
    program = tmp_path / "harnesses" / HARNESSES["pi"].folder / "bin" / "pi"
    program.parent.mkdir(parents=True)
    program.touch()
    with pytest.raises(InvalidInput, match="mounts nothing") as caught:
        await held.check_task(harness_task(runtime="remote"), "task")
    assert "provide" in (caught.value.hint or "")


async def test_the_settings_say_whether_an_address_is_advertised(tmp_path: Path) -> None:
    for told in ({}, {"url": "https://127.0.0.1:{port}"}):
        settings = Settings(
            data_dir=tmp_path,
            workers=WorkerSettings(runtime="none"),
            session_address=SessionAddressSettings.model_validate(told),
        )
        hosts = make_hosts(settings)
        assert make_catalogs(settings, hosts).advertises_sessions is bool(told)
        await hosts.close()


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


class Isolating(FakeRuntime):
    """Keeps its sandboxes to a network."""

    def report(self) -> RuntimeReport:
        return RuntimeReport(name=self.name, usable=True, isolated=True, can=("listen",))


@pytest.mark.parametrize(
    ("may_ask", "network", "refused"),
    [
        ("none", {"allow": ["pypi.org"]}, "no network on this server"),
        ("none", "full", "no network on this server"),
        ("hosts", {"allow": ["pypi.org"]}, None),
        ("hosts", "full", "not all"),
        ("full", {"allow": ["pypi.org"]}, None),
        ("full", "full", None),
        ("none", "none", None),
    ],
)
async def test_a_network_is_what_the_operator_allows(
    catalogs: Catalogs, may_ask: str, network: object, refused: str | None
) -> None:
    held = replace(catalogs, runtimes={"none": Isolating(Hooks(), Journal())}, tasks_may_ask=may_ask)
    task = Task.model_validate({**needing().model_dump(), "network": network})
    if refused is None:
        await held.check_task(task, "task")
        return
    with pytest.raises(InvalidInput, match=refused) as caught:
        await held.check_task(task, "task")
    assert caught.value.field == "task.network"


async def test_a_runtime_that_isolates_nothing_keeps_nobody_to_a_network(catalogs: Catalogs) -> None:
    held = replace(catalogs, runtimes={"none": FakeRuntime(Hooks(), Journal())}, tasks_may_ask="full")
    with pytest.raises(InvalidInput, match="can't keep a sandbox to a network"):
        await held.check_task(Task.model_validate({**needing().model_dump(), "network": "full"}), "task")


async def test_a_task_has_no_network_unless_the_operator_says_so(tmp_path: Path) -> None:
    assert Settings(data_dir=tmp_path).network.tasks_may_ask == "none"
    assert needing().network == "none"


def test_what_is_never_open_can_not_be_opened(tmp_path: Path) -> None:
    for network in ("127.0.0.0/8", "169.254.0.0/16", "0.0.0.0/0", "8.8.8.0/24", "10.0.0.0/7", "::/0"):
        with pytest.raises(ConfigError, match="no private network"):
            make_egress(
                Settings(data_dir=tmp_path, network=NetworkSettings.model_validate({"reach": [network]}))
            )


def test_the_addresses_of_the_api_are_closed(tmp_path: Path) -> None:
    network = NetworkSettings.model_validate({"reach": ["10.0.0.0/8"], "deny": ["10.7.0.0/16"]})
    rules = make_egress(Settings(data_dir=tmp_path, api=ApiSettings(host="10.1.2.3"), network=network)).rules
    assert rules.fault("10.1.2.4") is None
    assert rules.fault("10.1.2.3") == rules.fault("10.7.1.1") == "closed by the operator"


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


def pictured(*pictures: dict[str, Any], **changes: Any) -> Task:
    grader = GraderSpec(name="exact", options={"answer": "x"})
    return Task.model_validate(
        {"instruction": "abc", "tools": [], "grader": grader, "pictures": pictures} | changes
    )


@pytest.mark.parametrize(
    ("task", "field", "why"),
    [
        (pictured({"url": "https://a.example/b.png"}, {"url": "data:image/png,x"}), "1.url", "base64"),
        (pictured({"url": "data:image/png;base64,!"}), "0.url", "not base64"),
        (pictured({"url": "data:image/png;base64,eA==", "at": 4}), "0.at", "behind the end"),
        (pictured({"url": f"https://{'a' * 9000}"}), "0.url", "more than 8192 characters"),
        (pictured(*[{"url": f"data:image/png;base64,{'A' * (3 << 20)}"}] * 3), "", "characters at most"),
        (pictured({"url": "https://a"}, agent={"name": "pi"}), "", "'pi' shows no pictures"),
        (pictured({"url": "https://a"}, agent={"name": "codex"}), "", "shows no"),
    ],
)
async def test_pictures_are_looked_at_before_anything_starts(
    task: Task, field: str, why: str, catalogs: Catalogs
) -> None:
    with pytest.raises(InvalidInput, match=why) as caught:
        await catalogs.check_task(task, "task")
    assert caught.value.field == f"task.pictures.{field}".rstrip(".")


async def test_a_task_may_show_pictures(catalogs: Catalogs) -> None:
    await catalogs.check_task(pictured({"url": "data:image/png;base64,eA==", "at": 3}), "task")
