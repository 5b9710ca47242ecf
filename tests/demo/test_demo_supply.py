"""Where the demo's groups come from, against a server in process; and when its policy was good enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from rollserve.client import FinishedGroup, RunHandle
from rollserve.demo.milestone import Milestone, first_good
from rollserve.demo.record import Record
from rollserve.demo.report import report
from rollserve.demo.supply import SOURCE_TASKS, Drawn, Submitted
from rollserve.records import run as records
from rollserve.records.task import GraderSpec, Task
from rollserve.wire import BinCount, RunStatus


@dataclass
class Groups:
    """As much of a finished group as a supply looks at."""

    rewards: list[float | None]


class Run:
    """As much of a run as a supply asks of it."""

    def __init__(self) -> None:
        self.submitted: list[tuple[int, int]] = []
        self.filtered: dict[str, int] = {}

    async def submit(self, tasks: list[Task], *, num_rollouts: int) -> None:
        self.submitted.append((len(tasks), num_rollouts))

    async def status(self) -> RunStatus:
        counted = {f"filtered:{name}": BinCount(count=n, tokens=0) for name, n in self.filtered.items()}
        run = records.Run(id="r", spec=records.RunSpec(policy="p"), created_at=0.0)
        return RunStatus(run=run, counts={}, bins={"groups": counted})


def batch(*rewards: list[float | None]) -> list[FinishedGroup]:
    return cast("list[FinishedGroup]", [Groups(each) for each in rewards])


def make() -> Task:
    return Task(instruction="lookup a", grader=GraderSpec(name="exact", options={"answer": "1"}))


async def test_the_trainer_submits_as_many_as_it_takes() -> None:
    run, supply = Run(), Submitted(make, groups=2, ahead=3, rollouts=4)
    handle = cast("RunHandle", run)
    assert records.RunSpec(policy="p", **supply.settings).source is None
    await supply.begin(handle)
    assert await supply.took(handle, batch([1.0, 0.0, None], [1.0, 1.0, 1.0])) == 0.8
    assert run.submitted == [(5, 4), (2, 4)]


async def test_the_server_draws_and_what_it_left_out_counts_in_the_success_rate() -> None:
    run, supply = Run(), Drawn(make, groups=2, rollouts=4, seed=0)
    handle = cast("RunHandle", run)
    spec = records.RunSpec(policy="p", **supply.settings)
    assert spec.source is not None
    assert len(spec.source.tasks) == SOURCE_TASKS
    assert (spec.source.target_groups, spec.source.extra_groups, spec.source.carry_over) == (2, 2, False)
    assert "zero_variance" in [rule.name for rule in spec.filters]
    await supply.begin(handle)
    mixed = batch([1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0])
    assert await supply.took(handle, mixed) == 3 / 8
    run.filtered = {"too_easy": 3, "too_hard": 1}
    assert await supply.took(handle, mixed) == (3 + 12) / 24
    assert await supply.took(handle, mixed) == 3 / 8
    assert run.submitted == []


def mark(version: int) -> Milestone:
    return Milestone(
        version=version,
        step=version,
        busy_s=1.0,
        gradient_cpu_s=0.25,
        cpu_s=0.5,
        seconds=2.0,
        rollouts=64,
        tokens=900,
        trained=3,
        weights={},
    )


async def test_the_first_that_is_good_enough_is_found_with_few_looks() -> None:
    asked: list[int] = []

    async def measure(each: Milestone) -> float:
        asked.append(each.version)
        return each.version / 20

    marks = [mark(version) for version in range(1, 17)]
    found = await first_good(marks, 0.55, measure)
    assert found is not None
    assert found.facts() == {
        "version": 11,
        "step": 11,
        "busy_s": 1.0,
        "gradient_cpu_s": 0.25,
        "cpu_s": 0.5,
        "seconds": 2.0,
        "rollouts": 64,
        "tokens": 900,
        "trained": 3,
    }
    assert len(asked) <= 5
    assert await first_good(marks, 0.9, measure) is None
    assert await first_good([], 0.5, measure) is None


def test_the_report_says_how_it_sampled_and_what_the_milestone_took() -> None:
    record = Record()
    trained: dict[str, Any] = {"train_seconds": 10.0, "waited_s": 4.0, "busy_s": 6.0, "cpu_s": 3.0}
    record.take({"event": "trained", "rollouts": 8, "tokens": 80, "version": 1, **trained})
    record.take({"event": "milestone", "at": 1.0, "rate": 0.85, "step": 5, "busy_s": 2.0})
    record.take({"event": "done", "success_rate_start": 0.4, "success_rate_end": 0.9})
    made = report(record, seed=0, backend="local", stuck=0, dynamic_sampling=True, mix=True)
    assert made["milestone"] == {"rate": 0.85, "step": 5, "busy_s": 2.0}
    assert (made["trainer_busy_seconds"], made["trainer_cpu_seconds"]) == (6.0, 3.0)
    assert (made["dynamic_sampling"], made["mix"]) == (True, True)
