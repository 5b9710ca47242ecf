"""A repository's fault is mended by an agent and graded by the repository's own tests, on every runtime."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from rollserve.sandbox.base import Runtime
from rollserve.sandbox.registry import make_runtime
from rollserve.testing.repository_task import DOCTORING, PLANS, policy
from rollserve.testing.scripted_server import serving
from tests.integration.repository import (
    EXAMPLE,
    has_git_and_python,
    make_git_root,
    played,
    repository_task,
    tar_of_root,
    workplace,
)
from tests.sandbox.containers.conftest import refusal

pytestmark = [
    pytest.mark.skipif(not has_git_and_python(), reason="this machine has no git, or no Python in /usr/bin"),
]

FOOLED = ("edits-the-tests", "adds-test-hooks", "poisons-the-environment", "plants-git-hooks")
"""Whose own run of the tests says OK."""


@pytest.fixture(scope="module")
def git_root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rollserve-root-") as name:
        os.chmod(name, 0o755)
        yield make_git_root(Path(name) / "root")


def must_work(runtime: Runtime, root: Path) -> None:
    report = runtime.report()
    if not report.usable:
        pytest.skip(f"{report.name} can't be used here: {report.detail}")
    if runtime.name in ("podman", "docker") and (said := refusal(runtime.name, root)):
        pytest.skip(f"{runtime.name} starts no container here: {said}")


async def plays_the_same(folder: Path, runtime: str, task: str, *, image: str = "host") -> None:
    made: Runtime | None = None
    if runtime == "remote":
        from rollserve.testing import swerex_server

        made = swerex_server.make_runtime(data_dir=folder)
    async with workplace(folder, runtime, made) as place:
        attempts, seen = await played(place, repository_task(task, image=image, runtime=runtime), list(PLANS))
    assert {plan: attempt.failure for plan, attempt in attempts.items()} == dict.fromkeys(PLANS)
    rewards = {plan: attempt.reward for plan, attempt in attempts.items()}
    assert rewards == {"mends": 1.0, "gives-up": 0.0, **dict.fromkeys(DOCTORING, 0.0)}
    said = {plan: seen[plan].rpartition("<tool_response>")[2] for plan in PLANS}
    assert [plan for plan in DOCTORING if "\nOK\n</tool" in said[plan]] == list(FOOLED), said
    assert "\nOK\n</tool" in said["mends"]
    assert "\nFAILED (failures=2)" in said["gives-up"]


@pytest.mark.userns
@pytest.mark.parametrize("image", ["host", "folder", "tar"])
async def test_bubblewrap(image: str, open_dir: Path, git_root: Path) -> None:
    must_work(make_runtime("bubblewrap", open_dir), git_root)
    if image != "host":
        image = str(git_root if image == "folder" else tar_of_root(git_root))
    await plays_the_same(open_dir, "bubblewrap", "task.json", image=image)


@pytest.mark.containers
@pytest.mark.parametrize("engine", ["podman", "docker"])
async def test_an_engine(engine: str, open_dir: Path, git_root: Path) -> None:
    must_work(make_runtime(engine, open_dir), git_root)
    must_work(make_runtime("bubblewrap", open_dir), git_root)  # which prepares images
    await plays_the_same(open_dir, engine, "task.json", image=str(git_root))


@pytest.mark.apptainer
async def test_apptainer(open_dir: Path, git_root: Path) -> None:
    must_work(make_runtime("apptainer", open_dir), git_root)
    await plays_the_same(open_dir, "apptainer", "task.json", image=str(tar_of_root(git_root)))


async def test_process(open_dir: Path) -> None:
    await plays_the_same(open_dir, "process", "task-without-prepare.json")


@pytest.mark.userns
@pytest.mark.slow
@pytest.mark.skipif(find_spec("swerex") is None, reason="SWE-ReX is not installed")
async def test_remote(open_dir: Path) -> None:
    await plays_the_same(open_dir, "remote", "task-without-prepare.json")


@pytest.mark.userns
async def test_as_its_readme_says(open_dir: Path) -> None:
    must_work(make_runtime("bubblewrap", open_dir), open_dir)
    async with serving(policy("mends")) as url:
        model = ("--backend", url, "--model", "scripted", "--tokenizer", "tiny")
        await rollserve_try(open_dir, *model, "--renderer-option", "enable_thinking=false")


async def rollserve_try(folder: Path, *model: str) -> None:
    command = (sys.executable, "-m", "rollserve", "try", str(EXAMPLE / "task.json"), *model)
    process = await asyncio.create_subprocess_exec(*command, cwd=folder, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert process.returncode == 0, out
    assert b"completed: reward 1.0" in out
    assert (folder / ".rollserve" / "images").is_dir()  # for the next try


def test_the_tasks_are_those_of_the_project(tmp_path: Path) -> None:
    subprocess.run([sys.executable, EXAMPLE / "make.py", tmp_path], check=True)
    for path in tmp_path.iterdir():
        assert path.read_text() == (EXAMPLE / path.name).read_text(), "run make.py again"
    assert len(list(tmp_path.iterdir())) == 3
