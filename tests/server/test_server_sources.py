"""Task sources and dynamic sampling: the server opens groups by itself, as many as are informative."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollserve.errors import FailureKind, InvalidInput
from rollserve.executor.base import StartAttempt
from rollserve.records.control import FilterRule, StalenessRule, TaskSource
from rollserve.records.rollout import GroupState
from rollserve.records.run import Run, RunSpec, SourceState, SourceStatus
from rollserve.rollouts.delivery import Delivered, Wanted
from rollserve.rollouts.sources import Reading
from rollserve.store.payload import AttemptPayload
from rollserve.testing.fake_payloads import FakePayloads
from rollserve.testing.fakes_server import FakeExecutor, Play, a_call, ended, failed
from rollserve.testing.server_room import MakeRoom, Room

ZERO_VARIANCE = (FilterRule(name="zero_variance"),)
Reward = Callable[[StartAttempt], float | None]


def write(folder: Path, tasks: list[Any], name: str = "tasks.jsonl") -> str:
    lines = [task if isinstance(task, str) else json.dumps(task) for task in tasks]
    (folder / name).write_text("\n".join(lines) + "\n")
    return name


def task(number: int, **metadata: Any) -> dict[str, Any]:
    return {
        "instruction": f"task {number}",
        "grader": {"name": "exact"},
        "metadata": {"number": number, **metadata},
    }


def number_of(start: StartAttempt) -> int:
    number: int = start.task().metadata["number"]
    return number


def rewards(reward: Reward, payloads: FakePayloads) -> Play:
    """Every attempt completes with the reward that ``reward`` says, or hangs where that is None."""

    def play(executor: FakeExecutor, _: str, start: StartAttempt) -> None:
        value = reward(start)
        if value is None:
            return
        ref = payloads.keep(f"{start.run_id}/{start.attempt_id}", AttemptPayload(calls=[a_call()]))
        done = ended(start, reward=value, payload=ref)
        executor.end(start.attempt_id, done.model_copy(update={"counts": {"sampled_tokens": 3}}))

    return play


def mixed(start: StartAttempt) -> float:
    """Informative where the task's number is even; the siblings of odd ones agree."""
    return float(start.index % 2) if number_of(start) % 2 == 0 else 1.0


def numbers(delivered: Delivered) -> list[int]:
    return [group.group.task.metadata["number"] for group in delivered.groups]


async def take(room: Room, run: Run, most: int = 100, wait_s: float = 20.0) -> Delivered:
    wanted = Wanted(trainer="t", max_groups=most, wait_s=wait_s)
    delivered = await room.core.deliveries.lease(run.id, wanted)
    if delivered.lease is not None:
        await room.core.deliveries.ack(delivered.lease.id)
    return delivered


async def take_all(room: Room, run: Run) -> list[int]:
    """Until nothing comes any more."""
    taken: list[int] = []
    while (delivered := await take(room, run)).over is None:
        taken += numbers(delivered)
    return taken


async def source_of(room: Room, run: Run) -> SourceStatus:
    source = await room.core.runs.source(run.id)
    assert source is not None
    return source


async def counted(room: Room, run: Run, name: str, value: int) -> None:
    async def met() -> bool:
        return (await room.core.runs.counts(run.id))[name] == value

    await room.until(met)


async def happened(room: Room, run: Run) -> dict[str, int]:
    """What was filtered, stopped, carried."""
    bins = (await room.core.runs.bins(run.id)).get("groups", {})
    return {name: found.count for name, found in bins.items()}


def make(reward: Reward, capacity: int = 64) -> tuple[FakeExecutor, FakePayloads]:
    payloads = FakePayloads()
    return FakeExecutor(capacity=capacity, play=rewards(reward, payloads)), payloads


def ones(_: StartAttempt) -> float:
    return 1.0


# -- a source


async def test_each_task_once_and_then_the_trainer_is_told(make_room: MakeRoom, tmp_path: Path) -> None:
    executor, payloads = make(ones)
    path = write(tmp_path, [task(n) for n in range(150)])
    async with make_room(executor, payloads=payloads) as room:
        run = await room.run(source=TaskSource(path=path, num_rollouts=2, in_flight=20))
        assert sorted(await take_all(room, run)) == list(range(150))
        delivered = await take(room, run)
        assert delivered.over == ("source_ended", "the task source has no more tasks")
        source = await source_of(room, run)
        assert (source.state, source.position, source.lines) == (SourceState.ENDED, 150, 150)


async def test_no_more_groups_are_open_than_wanted(make_room: MakeRoom, tmp_path: Path) -> None:
    executor, payloads = make(lambda _: None)
    path = write(tmp_path, [task(n) for n in range(150)])
    async with make_room(executor, payloads=payloads) as room:
        run = await room.run(source=TaskSource(path=path, num_rollouts=1, in_flight=7))
        await room.started(7)
        await asyncio.sleep(0.1)
        assert (await room.core.runs.counts(run.id))["groups_open"] == 7
        start = executor.history[0]
        executor.end(start.attempt_id, ended(start))
        await room.started(8)


async def test_epochs_each_in_an_order_of_its_own(make_room: MakeRoom, tmp_path: Path) -> None:
    executor, payloads = make(ones, capacity=1)
    path = write(tmp_path, [task(n) for n in range(12)])
    async with make_room(executor, payloads=payloads) as room:
        source = TaskSource(path=path, num_rollouts=1, epochs=3, shuffle_seed=7, in_flight=1)
        run = await room.run(source=source)
        taken = await take_all(room, run)
        first, second, third = taken[:12], taken[12:24], taken[24:]
        assert sorted(first) == sorted(second) == sorted(third) == list(range(12))
        assert len({tuple(first), tuple(second), tuple(third)}) == 3
        again = await room.core.runs.open(run.spec)
        assert await take_all(room, again) == taken


async def test_a_list_of_tasks_in_the_settings(make_room: MakeRoom) -> None:
    executor, payloads = make(ones)
    async with make_room(executor, payloads=payloads) as room:
        spec = {"policy": "pol", "source": {"tasks": [task(n) for n in range(3)], "num_rollouts": 2}}
        await room.run()
        run = await room.core.runs.open(RunSpec.model_validate(spec), "key")
        assert sorted(await take_all(room, run)) == [0, 1, 2]
        assert await room.core.runs.open(RunSpec.model_validate(spec), "key") == run
        assert executor.history[0].run().source is None  # workers need none of it


async def test_a_broken_line_ends_the_source_and_is_named(make_room: MakeRoom, tmp_path: Path) -> None:
    executor, payloads = make(ones)
    lines = [task(0), "", task(1), '{"instruction": "no grader"}', task(2)]
    async with make_room(executor, payloads=payloads) as room:
        run = await room.run(source=TaskSource(path=write(tmp_path, lines), num_rollouts=1))
        taken = numbers(await take(room, run)) + numbers(await take(room, run, wait_s=0.5))
        assert sorted(taken) == [0, 1]
        over = (await take(room, run)).over
        assert over is not None
        assert over == ("source_failed", "the task source failed: line 4: grader: Field required")
        assert (await source_of(room, run)).state is SourceState.FAILED


async def test_broken_lines_are_skipped_where_the_run_says_so(make_room: MakeRoom, tmp_path: Path) -> None:
    executor, payloads = make(ones)
    unknown = task(1) | {"grader": {"name": "nobody"}}
    pictured = task(3) | {"pictures": [{"url": "https://pictures.invalid/a.png"}]}
    lines = [task(0), "{", unknown, task(2), "[]", pictured]
    async with make_room(executor, payloads=payloads) as room:
        source = TaskSource(path=write(tmp_path, lines), num_rollouts=1, on_broken_line="skip")
        run = await room.run(source=source)
        assert sorted(await take_all(room, run)) == [0, 2]
        assert (await happened(room, run))["broken_lines"] == 4
        events = await room.store.list_events(after=0, run_id=run.id)
        skipped = [event.data["line"] for event in events if event.type == "source.skipped"]
        assert [line.split(":")[0] for line in skipped] == ["line 2", "line 3", "line 5", "line 6"]


async def test_a_source_without_one_good_line_fails_and_does_not_spin(
    make_room: MakeRoom, tmp_path: Path
) -> None:
    executor, payloads = make(ones)
    async with make_room(executor, payloads=payloads) as room:
        path = write(tmp_path, ["{"] * 30)
        run = await room.run(source=TaskSource(path=path, epochs=None, on_broken_line="skip"))
        over = (await take(room, run)).over
        assert over is not None
        assert "no line is a task" in over[1]


async def test_a_file_that_changes_under_a_run_ends_its_source(make_room: MakeRoom, tmp_path: Path) -> None:
    path = write(tmp_path, [task(n) for n in range(9)])
    async with make_room(make(lambda _: None)[0]) as room:
        run = await room.run(source=TaskSource(path=path, num_rollouts=1, in_flight=2))
        await room.started(2)
    write(tmp_path, [task(n) for n in range(4)])
    async with make_room(make(ones)[0]) as room:
        over = (await take(room, run)).over
        while over is None:
            over = (await take(room, run)).over
        assert over[0] == "source_failed"
        assert "changed" in over[1]


@pytest.mark.parametrize(
    ("source", "field"),
    [
        (TaskSource(), "source.path"),
        (TaskSource(path="../secrets.jsonl"), "source.path"),
        (TaskSource(path="nowhere.jsonl"), "source.path"),
        (TaskSource(path="empty.jsonl"), "source.path"),
        (TaskSource(path="tasks.jsonl", carry_over=True), "source.carry_over"),
        (TaskSource(path="tasks.jsonl", extra_groups=2), "source.extra_groups"),
        (TaskSource.model_validate({"tasks": [task(0) | {"image": "nowhere"}]}), "source.tasks.0.image"),
    ],
)
async def test_what_is_wrong_with_a_source_is_named(
    room: Room, tmp_path: Path, source: TaskSource, field: str
) -> None:
    write(tmp_path, [task(0)])
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InvalidInput) as caught:
        await room.run(source=source)
    assert caught.value.field == field


async def test_closing_the_run_ends_its_source(make_room: MakeRoom, tmp_path: Path) -> None:
    executor, payloads = make(ones)
    async with make_room(executor, payloads=payloads) as room:
        path = write(tmp_path, [task(n) for n in range(3)])
        run = await room.run(source=TaskSource(path=path, epochs=None, num_rollouts=1, in_flight=3))
        await take(room, run)
        await room.core.runs.close(run.id)
        delivered = await take(room, run)
        while delivered.over is None:
            delivered = await take(room, run)
        assert delivered.over == ("run_closed", "the run is closed")
        before = len(executor.history)
        await asyncio.sleep(0.1)
        assert len(executor.history) == before


# -- dynamic sampling


def dapo(path: str, **changes: Any) -> dict[str, Any]:
    source = {"path": path, "num_rollouts": 4, "epochs": None, "target_groups": 3, **changes}
    return {"source": TaskSource.model_validate(source), "filters": ZERO_VARIANCE}


async def test_filtered_groups_are_replaced_until_the_target_is_met(
    make_room: MakeRoom, tmp_path: Path
) -> None:
    executor, payloads = make(mixed)
    async with make_room(executor, payloads=payloads) as room:
        run = await room.run(**dapo(write(tmp_path, [task(n) for n in range(100)])))
        await counted(room, run, "groups_good", 3)
        await counted(room, run, "groups_open", 0)
        taken = numbers(await take(room, run))
        assert len(taken) == 3
        assert all(number % 2 == 0 for number in taken)
        done = await happened(room, run)
        assert done["filtered:zero_variance"] >= 2
        await asyncio.sleep(0.1)
        assert (await take(room, run, wait_s=0)).over is None  # the next version will bring more
        await room.core.policies.set_version("pol", 1, None)
        await counted(room, run, "groups_good", 6)
        assert len(numbers(await take(room, run))) == 3


async def test_staleness_lets_it_work_ahead(make_room: MakeRoom, tmp_path: Path) -> None:
    executor, payloads = make(mixed)
    async with make_room(executor, payloads=payloads) as room:
        settings = dapo(write(tmp_path, [task(n) for n in range(100)]))
        run = await room.run(**settings, staleness=StalenessRule(max_staleness=2))
        await counted(room, run, "groups_good", 9)
        await asyncio.sleep(0.1)
        assert (await room.core.runs.counts(run.id))["groups_good"] == 9


async def test_what_is_redundant_is_stopped_when_the_target_is_met(
    make_room: MakeRoom, tmp_path: Path
) -> None:
    executor, payloads = make(lambda start: None if number_of(start) >= 3 else mixed_even(start))
    async with make_room(executor, payloads=payloads) as room:
        settings = dapo(write(tmp_path, [task(n) for n in range(100)]), extra_groups=2)
        run = await room.run(**settings)
        await counted(room, run, "groups_good", 3)
        await counted(room, run, "groups_open", 0)
        done = await happened(room, run)
        assert done["stopped"] == 2
        assert len(executor.cancels) == 8
        stopped = await room.core.groups.of_run(run.id, state="cancelled", cursor=None, limit=9)
        assert {group.finished_seq for group in stopped.items} == {None}
        assert len(numbers(await take(room, run))) == 3


def mixed_even(start: StartAttempt) -> float:
    return float(start.index % 2)


async def test_or_carried_over_to_the_next_version(make_room: MakeRoom, tmp_path: Path) -> None:
    executor, payloads = make(lambda start: None if number_of(start) >= 3 else mixed_even(start))
    async with make_room(executor, payloads=payloads) as room:
        path = write(tmp_path, [task(n) for n in range(100)])
        run = await room.run(**dapo(path, extra_groups=2, carry_over=True))
        await counted(room, run, "groups_good", 3)
        await room.until(lambda: room.core.tally.counts().get("groups_carried"))
        assert (await happened(room, run))["carried"] == 2
        assert executor.cancels == []
        held = [start for start in executor.history if number_of(start) >= 3]
        assert {number_of(start) for start in held} == {3, 4}
        await room.core.policies.set_version("pol", 1, None)
        await counted(room, run, "groups_open", 5)
        for start in held:
            executor.end(start.attempt_id, ended(start, reward=mixed_even(start)))
        await counted(room, run, "groups_good", 5)
        assert {3, 4} <= set(numbers(await take(room, run)))


async def test_what_is_carried_over_survives_a_kill(make_room: MakeRoom, tmp_path: Path) -> None:
    executor, payloads = make(lambda start: None if number_of(start) >= 3 else mixed_even(start))
    async with make_room(executor, payloads=payloads) as room:
        path = write(tmp_path, [task(n) for n in range(100)])
        run = await room.run(**dapo(path, extra_groups=2, carry_over=True))
        await counted(room, run, "groups_good", 3)
        await room.until(lambda: room.core.tally.counts().get("groups_carried"))
        await take(room, run)
    again, _ = make(mixed_even)
    async with make_room(again, payloads=payloads) as room:
        assert (await happened(room, run))["carried"] == 2
        await room.core.policies.set_version("pol", 1, None)
        got: set[int] = set()
        while not {3, 4} <= got:
            got |= set(numbers(await take(room, run)))
        assert (await happened(room, run)).get("stopped", 0) == 0


async def test_a_source_that_ends_before_its_target_says_so(make_room: MakeRoom, tmp_path: Path) -> None:
    executor, payloads = make(mixed_even)
    async with make_room(executor, payloads=payloads) as room:
        run = await room.run(**dapo(write(tmp_path, [task(0), task(1)]), epochs=1))
        taken: list[int] = []
        while (answer := await take(room, run)).over is None:
            taken += numbers(answer)
        assert (sorted(taken), answer.over[0]) == ([0, 1], "source_ended")
        status = await room.core.runs.source(run.id)
        assert status is not None
        assert (status.state, status.position) == (SourceState.ENDED, 2)


async def test_a_python_function_filters_and_one_that_raises_keeps(
    make_room: MakeRoom, tmp_path: Path
) -> None:
    executor, payloads = make(lambda start: 0.5 if number_of(start) == 1 else 1.0)
    path = write(tmp_path, [task(n) for n in range(3)])
    async with make_room(executor, payloads=payloads) as room:
        filters = (FilterRule(name="filters:raises"), FilterRule(name="filters:best"))
        run = await room.run(source=TaskSource(path=path, num_rollouts=2), filters=filters)
        delivered: list[Any] = []
        while (answer := await take(room, run)).over is None:
            delivered += answer.groups
        assert sorted(group.group.task.metadata["number"] for group in delivered) == [0, 2]
        assert {group.group.note for group in delivered} == {
            "filter filters:raises raised ZeroDivisionError: division by zero"
        }
        done = await happened(room, run)
        assert (done["filtered:filters:best"], done["filter_errors"]) == (1, 3)


async def test_thresholds_and_groups_that_were_submitted(make_room: MakeRoom) -> None:
    given = [0.2, 0.3]
    executor, payloads = make(lambda start: given[start.index])
    async with make_room(executor, payloads=payloads) as room:
        for rule, left_out in [
            (FilterRule(name="too_hard"), False),
            (FilterRule(name="too_hard", threshold=0.25), True),
            (FilterRule(name="too_easy", threshold=0.25), True),
            (FilterRule(name="too_easy"), False),
            (FilterRule(name="zero_variance", threshold=0.2), True),
            (FilterRule(name="zero_variance"), False),
        ]:
            run = await room.run(filters=(rule,))
            [group] = await room.submit(run, rollouts=2)
            await counted(room, run, "groups_open", 0)
            found = await room.core.groups.get(group.id)
            assert (found.state is GroupState.FILTERED) is left_out
            assert found.filtered_by == (rule.name if left_out else None)


async def test_a_group_without_a_reward_is_not_filtered(room: Room) -> None:
    """Its reasons are what a trainer must hear."""
    run = await room.run(filters=(FilterRule(name="too_hard"),))
    [group] = await room.submit(run)
    await room.started(1)
    [start] = room.executor.history
    room.executor.end(start.attempt_id, ended(start, failure=failed(FailureKind.AGENT)))
    await counted(room, run, "groups_finished", 1)
    [delivered] = (await take(room, run)).groups
    assert (delivered.group.id, delivered.group.state) == (group.id, GroupState.FINISHED)


@pytest.mark.parametrize(
    ("rule", "field"),
    [
        (FilterRule(name="zero_varianse"), "filters.0.name"),
        (FilterRule(name="nowhere:function"), "filters.0.name"),
        (FilterRule(name="filters:best", threshold=0.5), "filters.0.threshold"),
        (FilterRule(name="too_easy", options={"at": 1}), "filters.0.options"),
    ],
)
async def test_unusable_filters_are_refused(room: Room, rule: FilterRule, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        await room.run(filters=(rule,))
    assert caught.value.field == field


# -- deaths and rewinds


async def test_the_cursor_survives_a_kill(make_room: MakeRoom, tmp_path: Path) -> None:
    path = write(tmp_path, [task(n) for n in range(40)])
    taken: list[int] = []
    run: Run | None = None
    payloads = FakePayloads()
    for life in range(6):
        executor = FakeExecutor(capacity=8, play=rewards(ones, payloads))
        async with make_room(executor, payloads=payloads) as room:
            if run is None:
                run = await room.run(source=TaskSource(path=path, num_rollouts=1, in_flight=4))
            if life == 5:
                taken += await take_all(room, run)
            else:
                taken += numbers(await take(room, run, most=3))
    assert sorted(taken) == list(range(40))


async def test_groups_waiting_to_be_judged_survive_a_kill(make_room: MakeRoom) -> None:
    async with make_room(FakeExecutor()) as room:
        run = await room.run(filters=ZERO_VARIANCE)
        [group] = await room.submit(run, rollouts=2)
        room.core._behind._judge._judging.listen()
        room.core._behind._judge._places = asyncio.Semaphore(0)  # nobody is asked in this life
        await room.started(2)
        for start in room.executor.history:
            room.executor.end(start.attempt_id, ended(start, reward=1.0))

        async def judging() -> bool:
            return (await room.core.groups.get(group.id)).state is GroupState.JUDGING

        await room.until(judging)
    async with make_room(FakeExecutor()) as room:
        await counted(room, run, "groups_open", 0)
        assert (await room.core.groups.get(group.id)).state is GroupState.FILTERED


async def test_a_rewind_takes_left_out_tasks_again_and_no_other(make_room: MakeRoom, tmp_path: Path) -> None:
    """The set of tasks that stay in the trainer's history: each once."""
    path = write(tmp_path, [task(n) for n in range(12)])
    odd_is_dull = True

    def reward(start: StartAttempt) -> float:
        return 1.0 if odd_is_dull and number_of(start) % 2 else float(start.index % 2)

    executor, payloads = make(reward, capacity=1)
    async with make_room(executor, payloads=payloads) as room:
        source = TaskSource(path=path, num_rollouts=2, in_flight=1)
        run = await room.run(source=source, filters=ZERO_VARIANCE)
        history: list[int] = []
        while len(history) < 2:
            history += numbers(await take(room, run, most=1))
        checkpoint = await room.core.deliveries.commit(run.id, "t", 0, name="one", cursor=None)
        assert checkpoint.source_position is not None
        lost = await take_all(room, run)
        assert sorted(history + lost) == [0, 2, 4, 6, 8, 10]
        filtered_before = [n for n in (1, 3, 5, 7, 9, 11) if n < checkpoint.source_position - 1]
        odd_is_dull = False
        await room.core.deliveries.rewind(run.id, "t", "one")
        again = history + await take_all(room, run)
        assert len(again) == len(set(again))
        assert set(range(12)) - set(again) <= set(filtered_before)
        assert {0, 2, 4, 6, 8, 10} <= set(again)
        assert {9, 11} <= set(again)  # filtered after the checkpoint


@pytest.mark.parametrize("seed", range(4))
async def test_restarts_and_rewinds_at_random_leave_each_task_once(
    make_room: MakeRoom, tmp_path: Path, seed: int
) -> None:
    """The trainer's history in the end: every informative task, each once."""
    chance = random.Random(seed)
    path = write(tmp_path, [task(n) for n in range(40)])
    payloads, history = FakePayloads(), list[int]()
    marks: dict[str | None, int] = {None: 0}
    run: Run | None = None
    for life in range(5):
        executor = FakeExecutor(capacity=6, play=rewards(mixed, payloads))
        async with make_room(executor, payloads=payloads) as room:
            if run is None:
                source = TaskSource(path=path, num_rollouts=2, in_flight=4, shuffle_seed=seed)
                run = await room.run(source=source, filters=ZERO_VARIANCE)
            for step in range(8):
                history += numbers(await take(room, run, most=chance.randint(1, 3), wait_s=0.05))
                epoch = await room.store.trainer_epoch(run.id, "t")
                if chance.random() < 0.3:
                    name = f"c{life}-{step}"
                    await room.core.deliveries.commit(run.id, "t", epoch, name=name, cursor=None)
                    marks[name] = len(history)
                elif chance.random() < 0.15:
                    kept = chance.choice(list(marks))
                    await room.core.deliveries.rewind(run.id, "t", kept)
                    history = history[: marks[kept]]
                    known = list(marks)
                    marks = {name: marks[name] for name in known[: known.index(kept) + 1]}
            if life == 4:
                history += await take_all(room, run)
    assert sorted(history) == list(range(0, 40, 2))


async def test_a_rewind_to_the_beginning_takes_every_task_again(make_room: MakeRoom, tmp_path: Path) -> None:
    path = write(tmp_path, [task(n) for n in range(6)])
    dull = True
    executor, payloads = make(lambda start: 1.0 if dull else float(start.index))
    async with make_room(executor, payloads=payloads) as room:
        run = await room.run(source=TaskSource(path=path, num_rollouts=2), filters=ZERO_VARIANCE)
        assert await take_all(room, run) == []
        dull = False
        await room.core.deliveries.rewind(run.id, "t", None)
        assert sorted(await take_all(room, run)) == list(range(6))


def test_the_order_of_an_epoch_depends_on_its_seed_alone(tmp_path: Path) -> None:
    class Lines:
        lines = 50
        digest = ""

        def read(self, index: int) -> tuple[str, bytes]:
            raise NotImplementedError

    one, two = Reading(Lines()), Reading(Lines())
    forward = [one.index(place, 3) for place in range(150)]
    assert [two.index(place, 3) for place in (149, 10, 60)] == [forward[149], forward[10], forward[60]]
    assert [one.index(place, None) for place in (0, 51)] == [0, 1]
