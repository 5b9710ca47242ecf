"""Where the demo's training groups come from: the trainer submits each, or the server draws them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rollserve.client import FinishedGroup, RunHandle
from rollserve.records.control import FilterRule, StalenessRule, TaskSource
from rollserve.records.task import Task

SOURCE_TASKS = 256
"""In a run's own settings; the server goes through them again and again, each time in another order."""

EASY, HARD, ALIKE = "too_easy", "too_hard", "zero_variance"


class Supply(Protocol):
    """``settings`` are what the run is opened with, besides the usual. ``begin`` is called once; ``took``
    with each step's groups, and gives the success rate of all rollouts that finished since, of groups that
    were left out too."""

    @property
    def settings(self) -> dict[str, Any]: ...
    async def begin(self, run: RunHandle) -> None: ...
    async def took(self, run: RunHandle, batch: Sequence[FinishedGroup]) -> float: ...


class Submitted:
    """Fresh tasks of the trainer's: a step's groups and as many more are in flight at any time."""

    def __init__(self, make: Callable[[], Task], *, groups: int, ahead: int, rollouts: int) -> None:
        self._make = make
        self._groups = groups + ahead
        self._rollouts = rollouts

    @property
    def settings(self) -> dict[str, Any]:
        return {}

    async def begin(self, run: RunHandle) -> None:
        await self._submit(run, self._groups)

    async def took(self, run: RunHandle, batch: Sequence[FinishedGroup]) -> float:
        await self._submit(run, len(batch))
        rewards = rewards_of(batch)
        return sum(rewards) / max(1, len(rewards))

    async def _submit(self, run: RunHandle, groups: int) -> None:
        await run.submit([self._make() for _ in range(groups)], num_rollouts=self._rollouts)


class Drawn:
    """Dynamic sampling (DAPO, arXiv:2503.14476) in the server: groups whose rewards are all alike teach
    nothing, are left out and replaced at once. ``groups`` more than are missing are in flight, since some
    will be left out; when a version has its groups, what still runs is stopped."""

    def __init__(self, make: Callable[[], Task], *, groups: int, rollouts: int, seed: int) -> None:
        self._source = TaskSource(
            tasks=tuple(make() for _ in range(SOURCE_TASKS)),
            num_rollouts=rollouts,
            epochs=None,
            shuffle_seed=seed,
            target_groups=groups,
            extra_groups=groups,
            in_flight=4 * groups,
        )
        self._rollouts = rollouts
        self._left_out = {EASY: 0, HARD: 0}

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "source": self._source,
            "filters": tuple(FilterRule(name=name) for name in (EASY, HARD, ALIKE)),
            "staleness": StalenessRule(max_staleness=1, on_stale="mark"),
        }

    async def begin(self, run: RunHandle) -> None:
        """The server has begun."""

    async def took(self, run: RunHandle, batch: Sequence[FinishedGroup]) -> float:
        counted = (await run.status()).bins.get("groups", {})
        found = {name: counted.get(f"filtered:{name}") for name in self._left_out}
        now = {name: 0 if each is None else each.count for name, each in found.items()}
        before, self._left_out = self._left_out, now
        new = {name: self._rollouts * (now[name] - before[name]) for name in now}
        rewards = rewards_of(batch)
        return (sum(rewards) + new[EASY]) / max(1, len(rewards) + new[EASY] + new[HARD])


def rewards_of(batch: Sequence[FinishedGroup]) -> list[float]:
    """Of the rollouts that were graded."""
    return [reward for group in batch for reward in group.rewards if reward is not None]
