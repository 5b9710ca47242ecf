"""A whole server without HTTP and without processes: the coordinator on a real store, beside workers
that only act. For tests of what is built on it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rollserve.backend.base import Backend
from rollserve.backend.control import Control
from rollserve.build.callbacks import CallbackPoster
from rollserve.config import Settings
from rollserve.gateway.samples import build_samples
from rollserve.records.control import GroupRule
from rollserve.records.policy import BackendSpec, PolicySpec
from rollserve.records.rollout import Group, Rollout, RolloutState
from rollserve.records.run import Run, RunSpec
from rollserve.records.task import GraderSpec, Task
from rollserve.rollouts.clock import Clock, SystemClock
from rollserve.rollouts.coordinator import Coordinator
from rollserve.rollouts.ports import Ports
from rollserve.store.sql import SqlStore
from rollserve.store.task_file import open_task_file
from rollserve.testing.fake_payloads import FakePayloads
from rollserve.testing.fakes_server import (
    FakeControls,
    FakeExecutor,
    check_function,
    check_task,
    check_tokenizer,
    keeps,
    next_tasks,
    open_backend,
    probe_backend,
    probe_template,
)
from rollserve.wire import GroupBody

OpenBackend = Callable[[BackendSpec, str], Backend]
OpenControl = Callable[[BackendSpec, str | None, str | None], Control]


@dataclass
class Room:
    """A coordinator on a real store, with workers that only act, and payloads in memory."""

    store: SqlStore
    executor: FakeExecutor
    payloads: FakePayloads
    core: Coordinator

    async def run(self, *, callback_secret: str | None = None, **settings: Any) -> Run:
        await self.core.policies.create(PolicySpec(name="pol", model="m", tokenizer="tiny"))
        return await self.core.runs.open(RunSpec(policy="pol", **settings), callback_secret=callback_secret)

    async def submit(
        self,
        run: Run,
        groups: int = 1,
        rollouts: int = 1,
        key: str | None = None,
        rule: GroupRule | None = None,
    ) -> list[Group]:
        bodies = [GroupBody(task=a_task(), num_rollouts=rollouts, rule=rule) for _ in range(groups)]
        return await self.core.groups.submit(run.id, bodies, key)

    async def rollout(self, group: Group) -> Rollout:
        return (await self.core.groups.rollouts_of(group.id))[0]

    async def until(self, met: Callable[[], Any], within_s: float = 20.0) -> None:
        """Until ``met`` (or what it returns, awaited) is true."""
        async with asyncio.timeout(within_s):
            while True:
                value = met()
                if asyncio.iscoroutine(value):
                    value = await value
                if value:
                    return
                await asyncio.sleep(0.002)

    async def ended(self, group: Group, state: RolloutState) -> Rollout:
        async def met() -> bool:
            return (await self.rollout(group)).state is state

        await self.until(met)
        return await self.rollout(group)

    async def started(self, count: int) -> None:
        """Until so many attempts have been sent to workers, all in all."""
        await self.until(lambda: len(self.executor.history) >= count)


def a_task(**changes: Any) -> Task:
    return Task.model_validate({"instruction": "act", "grader": GraderSpec(name="exact"), **changes})


class MakeRoom(Protocol):
    """A room in one folder; the second one finds what the first one stored."""

    def __call__(
        self,
        executor: FakeExecutor,
        *,
        payloads: FakePayloads | None = None,
        clock: Clock | None = None,
        settings: Settings | None = None,
        controls: OpenControl | None = None,
        open_backend: OpenBackend = open_backend,
    ) -> AbstractAsyncContextManager[Room]: ...


async def migrate_empty(path: Path) -> Path:
    """A database without rows, to start many rooms from."""
    store = SqlStore(f"sqlite:///{path}")
    await store.open()
    await store.close()
    return path


@asynccontextmanager
async def a_room(
    path: Path,
    executor: FakeExecutor,
    *,
    payloads: FakePayloads | None = None,
    clock: Clock | None = None,
    settings: Settings | None = None,
    empty: Path | None = None,
    controls: OpenControl | None = None,
    open_backend: OpenBackend = open_backend,
) -> AsyncIterator[Room]:
    """``empty`` is a database to start from where ``path`` has none (``migrate_empty``)."""
    clock = clock or SystemClock()
    database = path / "rollserve.db"
    if empty is not None and not database.exists():
        shutil.copyfile(empty, database)
    store = SqlStore(f"sqlite:///{database}", clock=clock.now)
    payloads = payloads or FakePayloads()
    settings = settings or Settings(data_dir=path)
    poster = CallbackPoster(settings.delivery.callback_networks)
    ports = Ports(
        store=store,
        payloads=payloads,
        executor=executor,
        settings=settings,
        check_task=check_task,
        probe_backend=probe_backend,
        open_backend=open_backend,
        open_control=controls or FakeControls(),
        check_tokenizer=check_tokenizer,
        probe_template=probe_template,
        build_samples=build_samples,
        open_tasks=partial(open_task_file, path),
        check_function=check_function,
        keeps=keeps,
        next_tasks=next_tasks,
        poster=poster,
        clock=clock,
        jitter=lambda: 1.0,
    )
    async with AsyncExitStack() as stack:
        await store.open()
        stack.push_async_callback(store.close)
        stack.push_async_callback(poster.close)
        core = Coordinator(ports)
        await core.start()
        stack.push_async_callback(core.stop, 0.0)
        yield Room(store, executor, payloads, core)
