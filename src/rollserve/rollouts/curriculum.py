"""A curriculum: a function of the user's that is asked which tasks come next, given how the last ones went.

It runs where it can be killed, and nobody else's source waits for it. An answer that can't be had (it raised,
hung, or returned no tasks) is treated like a broken line of a file: fatal for the source, or passed over and
asked for again, as the run says. Where it ends is its own to say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from pydantic import ValidationError

from rollserve.errors import InvalidInput, RollserveError
from rollserve.records.control import TaskSource
from rollserve.records.run import RunSpec, SourceState, SourceStatus
from rollserve.records.task import Task
from rollserve.rollouts.pictures import Sight
from rollserve.rollouts.ports import Ports
from rollserve.rollouts.taken import Taken
from rollserve.store.task_lines import TaskLines
from rollserve.store.values import NewGroup, SourceResult

RESULTS = 256
"""Of the newest groups, that it is told."""

MOST_FAILURES = 8
"""In a row, before a source that passes them over is given up."""

_DETAIL_CHARS = 1000

ReadTask = Callable[[TaskLines, int, str], Awaitable[Task]]
"""A line of them, for a policy."""


class Curriculum:
    """``read`` gives a line of the source as a task that was checked."""

    def __init__(self, ports: Ports, read: ReadTask) -> None:
        self._store = ports.store
        self._ask = ports.next_tasks
        self._check_task = ports.check_task
        self._read = read
        self._failures: dict[str, int] = {}

    def forget(self, run_id: str) -> None:
        self._failures.pop(run_id, None)

    async def take(
        self,
        run_id: str,
        spec: RunSpec,
        source: TaskSource,
        status: SourceStatus,
        tasks: TaskLines | None,
        wanted: int,
    ) -> Taken:
        """Up to ``wanted`` groups; none where it has nothing to give just now."""
        taken = Taken(next=status.position)
        try:
            answer = await self._answer(run_id, source, status, wanted)
        except Exception as error:  # an edge: user code may raise anything
            told = error.message if isinstance(error, RollserveError) else str(error)
            self._failed(run_id, source, taken, f"{source.curriculum} {type(error).__name__}: {told}")
            return taken
        if answer is None:
            taken.state = SourceState.ENDED
            return taken
        for item in answer[:wanted]:
            await self._add(run_id, spec, source, taken, item, tasks)
            if taken.state is not SourceState.RUNNING:
                break
        if taken.groups:
            self.forget(run_id)
        return taken

    async def _answer(
        self, run_id: str, source: TaskSource, status: SourceStatus, wanted: int
    ) -> list[int | dict[str, Any]] | None:
        results = await self._store.source_results(run_id, RESULTS)
        arguments = {
            "wanted": wanted,
            "given": status.position,
            "lines": status.lines,
            "results": [_told(result) for result in results],
            "options": dict(source.curriculum_options),
        }
        return await self._ask(source.curriculum or "", arguments)

    async def _add(
        self,
        run_id: str,
        spec: RunSpec,
        source: TaskSource,
        taken: Taken,
        item: int | dict[str, Any],
        tasks: TaskLines | None,
    ) -> None:
        try:
            task = await self._task(item, tasks, spec.policy)
        except InvalidInput as error:
            taken.next += source.on_broken_line == "skip"
            self._failed(run_id, source, taken, f"{source.curriculum}: {error.message}")
            return
        group = NewGroup(task=task, num_rollouts=source.num_rollouts, rule=spec.groups, source_seq=taken.next)
        taken.next += 1
        taken.groups.append(group)

    async def _task(self, item: int | dict[str, Any], tasks: TaskLines | None, policy: str) -> Task:
        if isinstance(item, int):
            if tasks is None or not 0 <= item < tasks.lines:
                count = 0 if tasks is None else tasks.lines
                raise InvalidInput(f"there is no task {item}: the source has {count}, from 0 on")
            return await self._read(tasks, item, policy)
        try:
            task = await asyncio.to_thread(Task.model_validate_json, msgspec.json.encode(item))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise InvalidInput(f"it gave no task: {where}: {first['msg']}") from error
        await self._check_task(task, "")
        await Sight(policy, self._store).check(task, "")
        return task

    def _failed(self, run_id: str, source: TaskSource, taken: Taken, what: str) -> None:
        taken.detail = what[:_DETAIL_CHARS]
        if source.on_broken_line == "fail":
            taken.state = SourceState.FAILED
            return
        taken.broken.append(taken.detail)
        failures = self._failures[run_id] = self._failures.get(run_id, 0) + 1
        if failures >= MOST_FAILURES:
            taken.state = SourceState.FAILED
            taken.detail = f"{failures} times in a row, the last time: {taken.detail}"


def _told(result: SourceResult) -> dict[str, Any]:
    return {
        "place": result.place,
        "metadata": result.metadata,
        "rewards": result.rewards,
        "state": result.state,
        "filtered_by": result.filtered_by,
    }
