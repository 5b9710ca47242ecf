"""Whether a policy takes a task's pictures is asked of the store once, however many tasks there are."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from rollserve.errors import InvalidInput
from rollserve.records.control import TaskSource
from rollserve.records.policy import Backend, BackendKind, BackendSpec, Modality, Policy, PolicySpec
from rollserve.records.run import RunSpec
from rollserve.records.task import Task, TaskPicture
from rollserve.rollouts.bell import Bell
from rollserve.rollouts.groups import Groups
from rollserve.rollouts.sources import Sources
from rollserve.store.sql import SqlStore
from rollserve.store.values import Page
from rollserve.testing.server_room import Room, a_task
from rollserve.wire import GroupBody

PICTURES = [TaskPicture(url="https://pictures.invalid/a.png")]
PICTURED = a_task(pictures=PICTURES)


class Counted(SqlStore):
    """``reads``: how often the policy and its backends were asked for."""

    reads = (0, 0)

    async def get_policy(self, name: str) -> Policy:
        self.reads = (self.reads[0] + 1, self.reads[1])
        return await super().get_policy(name)

    async def list_backends(
        self, policy: str | None = None, *, cursor: str | None = None, limit: int = 100
    ) -> Page[Backend]:
        self.reads = (self.reads[0], self.reads[1] + 1)
        return await super().list_backends(policy, cursor=cursor, limit=limit)


@pytest.fixture
async def store(room: Room) -> AsyncIterator[Counted]:
    """Of the same database, for what is looked at."""
    store = Counted(room.store._url)
    await store.open()
    yield store
    await store.close()


async def chat_policy(room: Room, *accepts: Modality) -> RunSpec:
    await room.core.policies.create(PolicySpec(name="pol", model="m", tokenizer="tiny", interface="chat"))
    backend = BackendSpec(url="http://b:1", kind=BackendKind.CHAT, accepts=list(accepts))
    await room.core.policies.register("pol", backend)
    return RunSpec(policy="pol")


def groups_over(room: Room, store: Counted) -> Groups:
    core = room.core
    ports = replace(core._ports, store=store)
    shared = core._shared
    return Groups(
        ports,
        shared.specs,
        core.groups._canceller,
        core.tally,
        core._templates,
        queued=Bell(),
        happened=Bell(),
    )


def bodies(*tasks: Task) -> list[GroupBody]:
    return [GroupBody(task=task, num_rollouts=1) for task in tasks]


async def test_a_submit_asks_once(room: Room, store: Counted) -> None:
    run = await room.core.runs.open(await chat_policy(room, "text", "image"))
    submitted = await groups_over(room, store).submit(run.id, bodies(*[PICTURED] * 20))
    assert (len(submitted), store.reads) == (20, (1, 1))


async def test_without_pictures_nothing_is_asked(room: Room, store: Counted) -> None:
    run = await room.core.runs.open(await chat_policy(room, "text"))
    submitted = await groups_over(room, store).submit(run.id, bodies(*[a_task()] * 3))
    assert (len(submitted), store.reads) == (3, (0, 0))


async def test_the_first_that_nobody_could_see_is_named(room: Room, store: Counted) -> None:
    run = await room.core.runs.open(await chat_policy(room, "text"))
    with pytest.raises(InvalidInput, match="policy 'pol' takes no images") as refused:
        await groups_over(room, store).submit(run.id, bodies(a_task(), a_task(), PICTURED, PICTURED))
    assert refused.value.field == "groups.2.task.pictures"


async def test_the_tasks_of_a_source_ask_once(room: Room, store: Counted) -> None:
    spec = await chat_policy(room, "text", "image")
    core, shared = room.core, room.core._shared
    sources = Sources(
        replace(core._ports, store=store), shared.specs, core._behind.ends, core.tally, wake=Bell()
    )
    source = TaskSource(tasks=(PICTURED,) * 20, num_rollouts=1)
    status = await sources.opened(spec.model_copy(update={"source": source}))
    assert status is not None
    assert (status.lines, store.reads) == (20, (1, 1))
