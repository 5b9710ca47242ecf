"""Curricula: the tasks that come next are chosen by a function, from how the last ones went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollserve.errors import InvalidInput
from rollserve.executor.base import StartAttempt
from rollserve.records.control import TaskSource
from rollserve.records.run import RunSpec, SourceState
from rollserve.testing.server_room import MakeRoom, Room, a_task

from .test_server_sources import make, number_of, source_of, take_all, task, write


def curriculum(name: str, **settings: Any) -> TaskSource:
    return TaskSource(curriculum=f"filters:{name}", num_rollouts=2, in_flight=4, **settings)


def solved(_: StartAttempt) -> float:
    return 1.0


async def failed(room: Room, source: TaskSource) -> str:
    run = await room.run(source=source)

    async def over() -> bool:
        return (await source_of(room, run)).state is SourceState.FAILED

    await room.until(over)
    return (await source_of(room, run)).detail


async def test_it_chooses_among_the_lines(make_room: MakeRoom, tmp_path: Path) -> None:
    path = write(tmp_path, [task(n) for n in range(9)])
    executor, payloads = make(solved)
    async with make_room(executor, payloads=payloads) as room:
        run = await room.run(source=curriculum("in_order", path=path))
        assert await take_all(room, run) == list(range(9))
        source = await source_of(room, run)
        assert (source.state, source.position, source.lines) == (SourceState.ENDED, 9, 9)


async def test_it_makes_tasks_from_results(make_room: MakeRoom) -> None:
    asked: list[int] = []

    def third_time(start: StartAttempt) -> float:
        asked.append(number_of(start))
        return float(len(asked) > 4)

    executor, payloads = make(third_time)
    async with make_room(executor, payloads=payloads) as room:
        options = {"task": task(5)}
        run = await room.run(source=curriculum("until_solved", curriculum_options=options))
        assert await take_all(room, run) == [5, 5, 5]
        results = await room.store.source_results(run.id, 2)
        assert [(each.place, each.rewards, each.metadata) for each in results] == [
            (1, [0.0, 0.0], {"number": 5}),
            (2, [1.0, 1.0], {"number": 5}),
        ]


async def test_one_that_raises_ends_the_source_and_is_named(make_room: MakeRoom) -> None:
    executor, payloads = make(solved)
    async with make_room(executor, payloads=payloads) as room:
        assert await failed(room, curriculum("raises")) == (
            "filters:raises ZeroDivisionError: division by zero"
        )
    async with make_room(executor, payloads=payloads) as room:
        lost = await failed(room, curriculum("lost", tasks=(a_task(),)))
        assert lost == "filters:lost: there is no task 99: the source has 1, from 0 on"


async def test_a_task_that_the_policy_takes_none_of_is_named(make_room: MakeRoom) -> None:
    executor, payloads = make(solved)
    pictured = task(0) | {"pictures": [{"url": "https://pictures.invalid/a.png"}]}
    async with make_room(executor, payloads=payloads) as room:
        detail = await failed(room, curriculum("until_solved", curriculum_options={"task": pictured}))
        assert "policy 'pol' takes no images" in detail


async def test_passed_over_it_is_asked_again_a_few_times(make_room: MakeRoom) -> None:
    executor, payloads = make(solved)
    async with make_room(executor, payloads=payloads) as room:
        detail = await failed(room, curriculum("raises", on_broken_line="skip"))
        assert detail.startswith("8 times in a row, the last time: filters:raises")
        skipped = [event for event in await room.store.list_events(after=0) if event.type == "source.skipped"]
        assert len(skipped) == 8


async def test_one_that_hangs_holds_up_no_other_source(make_room: MakeRoom, tmp_path: Path) -> None:
    path = write(tmp_path, [task(n) for n in range(3)])
    executor, payloads = make(solved)
    async with make_room(executor, payloads=payloads) as room:
        await room.run(source=curriculum("hangs"))
        other = await room.run(source=TaskSource(path=path, num_rollouts=1))
        assert await take_all(room, other) == [0, 1, 2]


async def test_settings_that_contradict_each_other(make_room: MakeRoom) -> None:
    executor, payloads = make(solved)
    async with make_room(executor, payloads=payloads) as room:
        bad = {
            "source.path": TaskSource(),
            "source.epochs": curriculum("x", epochs=2),
            "source.shuffle_seed": curriculum("x", shuffle_seed=1),
            "source.curriculum_options": TaskSource(tasks=(a_task(),), curriculum_options={"a": 1}),
            "source.curriculum": TaskSource(curriculum="nowhere:x"),
        }
        await room.run()
        for field, source in bad.items():
            with pytest.raises(InvalidInput) as caught:
                await room.core.runs.open(RunSpec(policy="pol", source=source))
            assert caught.value.field == field
