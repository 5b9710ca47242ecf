"""What an evaluation run found, and how two runs differ on the tasks that both have.

A rollout without a reward is counted by its reason and is in no estimate: a failure is never a reward. Groups
with the same task are one task.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rollserve.errors import InvalidInput
from rollserve.records.evaluation import (
    Comparison,
    Estimate,
    Evaluation,
    Outcome,
    Side,
    Spread,
    TaskDifference,
    TaskName,
    TaskResult,
)
from rollserve.records.run import RunSpec
from rollserve.rollouts.intervals import mean_of, pass_at, share_of
from rollserve.rollouts.ports import Ports
from rollserve.rollouts.runs import RunSpecs

OPEN = "open"
"""Among the reasons for no reward: it has not ended."""

SHOWN_TASKS = 100
"""Named in a comparison; all are counted."""

_PAGE = 500
_AT_ONCE = 2


@dataclass(frozen=True, kw_only=True)
class Asked:
    """``ks`` of pass@k; a rollout passes with a reward of ``threshold`` or more."""

    ks: tuple[int, ...] = (1,)
    threshold: float = 1.0
    confidence: float = 0.95


@dataclass(slots=True)
class Tally:
    """The rollouts of one task."""

    key: str
    title: str
    rewards: list[float] = field(default_factory=list)
    rollouts: int = 0

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.rewards) if self.rewards else None

    def passed(self, threshold: float) -> int:
        return sum(reward >= threshold for reward in self.rewards)

    def pass_at(self, k: int, threshold: float) -> float | None:
        """None where fewer than ``k`` are graded."""
        graded = len(self.rewards)
        return pass_at(k, graded, self.passed(threshold)) if graded >= k else None

    @property
    def name(self) -> TaskName:
        return TaskName(key=self.key, title=self.title)


def by_task(outcomes: Iterable[Outcome]) -> dict[str, Tally]:
    found: dict[str, Tally] = {}
    for each in outcomes:
        task = found.setdefault(each.task_key, Tally(each.task_key, each.title))
        task.rollouts += 1
        if each.reward is not None:
            task.rewards.append(each.reward)
    return found


def evaluate(run_id: str, spec: RunSpec, outcomes: Sequence[Outcome], asked: Asked) -> Evaluation:
    tasks = by_task(outcomes)
    graded = [each for each in outcomes if each.reward is not None]
    ended = [each for each in outcomes if each.ungraded != OPEN]
    means = [mean for task in tasks.values() if (mean := task.mean) is not None]
    return Evaluation(
        run_id=run_id,
        purpose=spec.purpose,
        policy=spec.policy,
        threshold=asked.threshold,
        confidence=asked.confidence,
        tasks=len(tasks),
        rollouts=len(outcomes),
        graded=len(graded),
        ungraded=dict(Counter(each.ungraded for each in outcomes if each.ungraded is not None)),
        mean_reward=mean_of(means, asked.confidence, short=len(tasks) - len(means)),
        pass_at={k: _passing(k, tasks.values(), asked) for k in asked.ks},
        sampled_tokens=_spread(ended, lambda each: each.sampled_tokens),
        prompt_tokens=_spread(ended, lambda each: each.prompt_tokens),
        turns=_spread(ended, lambda each: each.turns),
        seconds=_spread(ended, lambda each: each.seconds),
    )


def _passing(k: int, tasks: Iterable[Tally], asked: Asked) -> Estimate:
    values = [task.pass_at(k, asked.threshold) for task in tasks]
    known = [value for value in values if value is not None]
    return share_of(known, asked.confidence, short=len(values) - len(known))


def _spread(outcomes: Sequence[Outcome], of: Callable[[Outcome], float]) -> Spread | None:
    if not outcomes:
        return None
    values = sorted(of(each) for each in outcomes)
    p90 = values[min(len(values) - 1, int(0.9 * len(values)))]
    return Spread(mean=statistics.fmean(values), median=statistics.median(values), p90=p90, total=sum(values))


def results(outcomes: Sequence[Outcome], asked: Asked) -> list[TaskResult]:
    """Task by task, the worst first; those without any grade at the end."""
    tasks = sorted(by_task(outcomes).values(), key=lambda task: (task.mean is None, task.mean or 0.0))
    return [
        TaskResult(
            key=task.key,
            title=task.title,
            rollouts=task.rollouts,
            graded=len(task.rewards),
            passed=task.passed(asked.threshold),
            mean_reward=task.mean,
            pass_at={k: value for k in asked.ks if (value := task.pass_at(k, asked.threshold)) is not None},
        )
        for task in tasks
    ]


Pair = tuple[Tally, Tally]


def compare(
    our_run: str,
    our_outcomes: Sequence[Outcome],
    their_run: str,
    their_outcomes: Sequence[Outcome],
    asked: Asked,
) -> Comparison:
    """Paired: each task is compared with itself, so what makes it hard or easy cancels out."""
    ours, theirs = by_task(our_outcomes), by_task(their_outcomes)
    pairs = [(ours[key], theirs[key]) for key in ours if key in theirs]
    differences = [_difference(pair) for pair in pairs]
    known = [each for each in differences if each is not None]
    not_graded = [pair[0].name for pair, each in zip(pairs, differences, strict=True) if each is None]
    return Comparison(
        ours=_side(our_run, ours, theirs),
        theirs=_side(their_run, theirs, ours),
        threshold=asked.threshold,
        confidence=asked.confidence,
        tasks=len(pairs),
        wins=sum(each > 0 for each in known),
        losses=sum(each < 0 for each in known),
        ties=sum(each == 0 for each in known),
        not_graded=not_graded[:SHOWN_TASKS],
        not_graded_total=len(not_graded),
        mean_reward=mean_of(known, asked.confidence, short=len(not_graded)),
        pass_at={k: _pass_difference(k, pairs, asked) for k in asked.ks},
    )


def _difference(pair: Pair) -> float | None:
    ours, theirs = pair[0].mean, pair[1].mean
    return None if ours is None or theirs is None else ours - theirs


def _pass_difference(k: int, pairs: Sequence[Pair], asked: Asked) -> Estimate:
    both = [tuple(each.pass_at(k, asked.threshold) for each in pair) for pair in pairs]
    known = [ours - theirs for ours, theirs in both if ours is not None and theirs is not None]
    return mean_of(known, asked.confidence, short=len(both) - len(known))


def _side(run_id: str, here: dict[str, Tally], there: dict[str, Tally]) -> Side:
    only = [task.name for key, task in here.items() if key not in there]
    shared = [task for key, task in here.items() if key in there]
    return Side(
        run_id=run_id,
        only_here=only[:SHOWN_TASKS],
        only_here_total=len(only),
        ungraded=sum(task.rollouts - len(task.rewards) for task in shared),
    )


def differences(ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> list[TaskDifference]:
    """Of the tasks that both have, what was lost most first; those without a grade at the end."""
    here, there = by_task(ours), by_task(theirs)
    found = [
        TaskDifference(
            key=key,
            title=here[key].title,
            ours=here[key].mean,
            theirs=there[key].mean,
            difference=_difference((here[key], there[key])),
        )
        for key in here
        if key in there
    ]
    return sorted(found, key=lambda each: (each.difference is None, each.difference or 0.0))


class Evaluations:
    """Reads a run's outcomes and reckons, a few at a time; the reckoning is done in threads."""

    def __init__(self, ports: Ports, specs: RunSpecs) -> None:
        self._store = ports.store
        self._specs = specs
        self._places = asyncio.Semaphore(_AT_ONCE)

    async def evaluate(self, run_id: str, asked: Asked) -> Evaluation:
        """Raises ``NotFound``."""
        async with self._places:
            spec, outcomes = await self._outcomes(run_id)
            return await asyncio.to_thread(evaluate, run_id, spec, outcomes, asked)

    async def results(self, run_id: str, asked: Asked) -> list[TaskResult]:
        async with self._places:
            _, outcomes = await self._outcomes(run_id)
            return await asyncio.to_thread(results, outcomes, asked)

    async def compare(self, our_run: str, their_run: str, asked: Asked) -> Comparison:
        """Raises ``NotFound``, ``InvalidInput`` where both are the same run."""
        async with self._places:
            ours, theirs = await self._both(our_run, their_run)
            return await asyncio.to_thread(compare, our_run, ours, their_run, theirs, asked)

    async def differences(self, our_run: str, their_run: str) -> list[TaskDifference]:
        async with self._places:
            return await asyncio.to_thread(differences, *await self._both(our_run, their_run))

    async def _both(self, our_run: str, their_run: str) -> tuple[list[Outcome], list[Outcome]]:
        if our_run == their_run:
            raise InvalidInput("a run is no different from itself", field="other")
        _, ours = await self._outcomes(our_run)
        _, theirs = await self._outcomes(their_run)
        return ours, theirs

    async def _outcomes(self, run_id: str) -> tuple[RunSpec, list[Outcome]]:
        spec, _ = await self._specs.get(run_id)
        found: list[Outcome] = []
        cursor: str | None = None
        while True:
            page = await self._store.list_outcomes(run_id, cursor=cursor, limit=_PAGE)
            found += [each for group in page.items for each in group]
            cursor = page.next
            if cursor is None:
                return spec, found
