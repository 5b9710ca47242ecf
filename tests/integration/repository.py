"""The example's repository task, played in this process on any runtime; and an image with git and Python."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import tarfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from rollserve.build.probes import probe
from rollserve.build.worker import Workplace, open_workplace
from rollserve.config import Settings, WorkerSettings
from rollserve.executor.base import PolicyView, StartAttempt
from rollserve.records.policy import (
    Backend,
    BackendKind,
    BackendSpec,
    Policy,
    PolicySpec,
    RendererSpec,
)
from rollserve.records.rollout import Attempt
from rollserve.records.run import RunSpec
from rollserve.records.task import Task
from rollserve.rollouts.attempt import AttemptRunner
from rollserve.rollouts.policies import backend_json
from rollserve.rollouts.stages import StagePools, StageSlots
from rollserve.sandbox.base import Runtime
from rollserve.testing.attempt_bench import AttemptBench
from rollserve.testing.image_files import ROOT_PROGRAMS, make_root, small_root
from rollserve.testing.repository_task import policy
from rollserve.testing.scripted_server import ScriptedApp, serving
from rollserve.tiny_tokenizer import TinyTokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "repository-task"
PYTHON = Path("/usr/bin/python3")
"""The machine's own: one of another folder is not in the image ``host``."""

_LEFT_OUT = ("dist-packages", "test", "idlelib", "ensurepip", "tkinter", "lib2to3", "config-*", "pydoc_data")


def repository_task(name: str = "task.json", **changes: object) -> Task:
    return Task.model_validate_json((EXAMPLE / name).read_text()).model_copy(update=changes)


def make_git_root(root: Path) -> Path:
    """A folder as an image, of this machine's git, Python and small tools."""
    make_root(root, (*ROOT_PROGRAMS, "cp", "git"))
    python = PYTHON.resolve()
    library = Path("/usr/lib") / python.name
    shutil.copytree(
        library, root / library.relative_to("/"), ignore=shutil.ignore_patterns(*_LEFT_OUT), symlinks=False
    )
    for member in small_root([str(python)]):
        place = root / member.name.removeprefix("bin/").lstrip("/")
        if member.data and not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(member.data)
            place.chmod(member.mode)
    (root / "usr/bin/python3").symlink_to(python.name)
    return root


def tar_of_root(root: Path) -> Path:
    archive = root.with_suffix(".tar")
    with tarfile.open(archive, "w") as out:
        out.add(root, ".")
    return archive


@asynccontextmanager
async def workplace(folder: Path, runtime: str, made: Runtime | None = None) -> AsyncIterator[Workplace]:
    """With the runtime of that name, or the one that was ``made``."""
    workers = WorkerSettings(runtimes=[runtime], allow_unsafe_runtime=True, spare_sandboxes=0)
    settings = Settings(data_dir=folder, workers=workers)
    async with open_workplace(settings, tell=lambda message: None) as place:
        if made is None:
            yield place
            return
        runtimes = {**place.ports.runtimes, runtime: made}
        try:
            yield dataclasses.replace(place, ports=dataclasses.replace(place.ports, runtimes=runtimes))
        finally:
            await made.close()


async def _view(name: str, url: str) -> PolicyView:
    renderer = RendererSpec(name="qwen3", options={"enable_thinking": False})
    spec = PolicySpec(name=name, model="scripted", tokenizer="tiny", renderer=renderer)
    at = BackendSpec(url=url, kind=BackendKind.VLLM)
    backend = Backend(id=f"be-{name}", policy=name, spec=at, info=await probe(at, "scripted"))
    return PolicyView(
        revision=time.time_ns(),
        policy_json=Policy(spec=spec).model_dump_json().encode(),
        backends_json=[backend_json(backend)],
    )


def _runner(place: Workplace, task: Task, plan: str, pools: StagePools) -> AttemptRunner:
    start = StartAttempt(
        attempt_id=plan,
        rollout_id=f"rol-{plan}",
        group_id="group",
        run_id="run",
        index=0,
        epoch=1,
        run_json=RunSpec(policy=plan).model_dump_json().encode(),
        task_json=task.model_dump_json().encode(),
    )
    segment = place.ports.payloads.open_segment(start.run_id, start.attempt_id)
    observer = AttemptBench()
    return AttemptRunner(start, segment, worker_id="w", ports=place.ports, pools=pools, observer=observer)


async def played(
    place: Workplace, task: Task, plans: Sequence[str]
) -> tuple[Mapping[str, Attempt], Mapping[str, str]]:
    """An attempt by each plan, and the last prompt of each: what its agent saw."""
    pools = StagePools(StageSlots(init=4, ready=4, run=4, grade=4))
    apps: dict[str, ScriptedApp] = {plan: policy(plan) for plan in plans}
    async with AsyncExitStack() as stack:
        for plan, app in apps.items():
            url = await stack.enter_async_context(serving(app))
            place.gateway.update_policy(await _view(plan, url))
        runners = [_runner(place, task, plan, pools) for plan in plans]
        attempts = await asyncio.gather(*(runner.run() for runner in runners))
    seen = {plan: TinyTokenizer().decode(list(app.engine.seen[-1].token_ids)) for plan, app in apps.items()}
    assert all(attempt is not None for attempt in attempts)
    return {plan: attempt for plan, attempt in zip(plans, attempts, strict=True) if attempt}, seen


def has_git_and_python() -> bool:
    return PYTHON.exists() and shutil.which("git", path="/usr/bin:/bin") is not None
