"""A bench on which attempts run over fakes, under a clock that the test holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from rollserve.executor.base import StartAttempt
from rollserve.records.rollout import Attempt, Stage
from rollserve.records.run import RunSpec
from rollserve.records.task import AgentSpec, GraderSpec, Task
from rollserve.rollouts.attempt import AttemptRunner
from rollserve.rollouts.stages import StagePools, StageSlots
from rollserve.rollouts.worker_ports import Keeper
from rollserve.sandbox.base import Sandbox
from rollserve.testing.clock import FakeClock
from rollserve.testing.fakes_worker import FakePorts


class AttemptBench:
    """An ``AttemptObserver`` that runs attempts."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.fakes = FakePorts(self.clock)
        self.pools = StagePools(StageSlots(init=2, ready=2, run=4, grade=2))
        self.stages: list[tuple[str, str]] = []
        self.counters: dict[str, float] = {}
        self.kept: list[Sandbox] = []
        self.unclosed: list[tuple[list[Sandbox], Callable[[], None]]] = []
        self.tasks: list[asyncio.Task[Attempt | None]] = []

    # -- AttemptObserver
    def stage_changed(self, attempt_id: str, stage: Stage) -> None:
        self.stages.append((attempt_id, stage.value))
        self.fakes.journal(f"stage {stage.value} {attempt_id}")

    def count(self, counter: str, by: float = 1) -> None:
        self.counters[counter] = self.counters.get(counter, 0) + by

    def close_later(self, sandboxes: Sequence[Sandbox], closed: Callable[[], None]) -> None:
        self.unclosed.append((list(sandboxes), closed))

    # -- driving
    @staticmethod
    def task(*, agent: str = "tool", grader: str = "exact", **fields: Any) -> Task:
        fields = {"instruction": "do", **fields}
        return Task(agent=AgentSpec(name=agent), grader=GraderSpec(name=grader), **fields)

    @classmethod
    def start_message(
        cls, attempt_id: str = "a", *, run: RunSpec | None = None, **fields: Any
    ) -> StartAttempt:
        return StartAttempt(
            attempt_id=attempt_id,
            rollout_id=f"r-{attempt_id}",
            group_id="g",
            run_id="run",
            index=0,
            epoch=1,
            run_json=(run or RunSpec(policy="p")).model_dump_json().encode(),
            task_json=cls.task(**fields).model_dump_json().encode(),
        )

    def runner(self, attempt_id: str = "a", *, keep_s: float = 0.0, **fields: Any) -> AttemptRunner:
        start = self.start_message(attempt_id, **fields)
        return AttemptRunner(
            start,
            self.fakes.payloads.open_segment(start.run_id, attempt_id),
            worker_id="w",
            ports=self.fakes.ports,
            pools=self.pools,
            observer=self,
            keeper=Keeper(take=self.kept.append, seconds=keep_s) if keep_s else None,
        )

    def spawn(self, runner: AttemptRunner) -> asyncio.Task[Attempt | None]:
        task = asyncio.create_task(runner.run())
        self.tasks.append(task)
        return task

    async def play(self, attempt_id: str = "a", **fields: Any) -> Attempt:
        attempt = await self.spawn(self.runner(attempt_id, **fields))
        assert attempt is not None
        return attempt

    async def until(self, task: asyncio.Task[Attempt | None], step_s: float = 1.0) -> Attempt:
        """Turn the clock until the attempt has ended."""
        for _ in range(10_000):
            if task.done():
                break
            await self.clock.advance(step_s)
        attempt = task.result()
        assert attempt is not None
        return attempt

    def log(self, attempt_id: str = "a") -> str:
        return "\n".join(line for _, line in self.fakes.payloads.kept[f"run/{attempt_id}"].log)

    def free(self) -> bool:
        """No slot is held and nobody waits for one."""
        return not any(self.pools.occupancy().values())
