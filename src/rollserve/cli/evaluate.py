"""``rollserve evaluate``: what a run found, or how it differs from another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rollserve.cli.connect import connect
from rollserve.cli.options import Where
from rollserve.cli.output import counted, out, print_json, table
from rollserve.client import Client, RunHandle
from rollserve.errors import InvalidInput
from rollserve.records.evaluation import Comparison, Estimate, Evaluation, Side, Spread, TaskName

SHOWN = 10
"""Tasks that a person is shown; ``--json`` has all."""


@dataclass(frozen=True, slots=True)
class How:
    ks: tuple[int, ...]
    threshold: float
    confidence: float

    @classmethod
    def of(cls, k: str, threshold: float, confidence: float) -> Self:
        """Raises ``InvalidInput``."""
        try:
            return cls(tuple(int(part) for part in k.split(",")), threshold, confidence)
        except ValueError as error:
            raise InvalidInput("whole numbers, such as 1,4,8", field="k") from error


async def evaluate(where: Where, run_id: str, other: str | None, how: How, *, as_json: bool) -> int:
    async with connect(where) as client:
        handle = await client.run(run_id)
        if other is None:
            await _one(handle, how, as_json=as_json)
        else:
            await _two(client, handle, other, how, as_json=as_json)
    return 0


async def _one(handle: RunHandle, how: How, *, as_json: bool) -> None:
    found = await handle.evaluation(k=how.ks, threshold=how.threshold, confidence=how.confidence)
    tasks = [each async for each in handle.evaluation_tasks(k=how.ks, threshold=how.threshold)]
    if as_json:
        items = [each.model_dump(mode="json") for each in tasks]
        print_json({**found.model_dump(mode="json"), "by_task": items})
        return
    _show(found)
    rows = [(t.title, t.rollouts, t.graded, t.passed, _number(t.mean_reward)) for t in tasks[:SHOWN]]
    if rows:
        table(("task, the worst first", "rollouts", "graded", "passed", "mean reward"), rows)
    if len(tasks) > SHOWN:
        out.print(f"and {len(tasks) - SHOWN} more: --json has all")


def _show(found: Evaluation) -> None:
    graded = f"{found.graded} of {counted(found.rollouts, 'rollout')} graded"
    out.print(f"{found.run_id}: {counted(found.tasks, 'task')}, {graded}", markup=False)
    if found.ungraded:
        reasons = ", ".join(f"{many} {why}" for why, many in sorted(found.ungraded.items()))
        out.print(f"without a grade, in no figure below: {reasons}", markup=False)
    _estimates({"mean reward": found.mean_reward} | _passes(found.pass_at), found.confidence)
    spreads = {
        "sampled tokens": found.sampled_tokens,
        "prompt tokens": found.prompt_tokens,
        "turns": found.turns,
        "active seconds": found.seconds,
    }
    rows = [_spread_row(name, spread) for name, spread in spreads.items() if spread is not None]
    if rows:
        table(("of a rollout", "mean", "median", "p90", "all together"), rows)


def _passes(found: dict[int, Estimate]) -> dict[str, Estimate]:
    return {f"pass@{k}": estimate for k, estimate in found.items()}


def _estimates(found: dict[str, Estimate], confidence: float) -> None:
    rows = [(name, _number(e.value), _interval(e), e.tasks, e.short or "") for name, e in found.items()]
    table(("of graded", "value", f"{confidence:.4g} interval", "tasks", "tasks with too few"), rows)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def _interval(found: Estimate) -> str:
    return "unknown" if found.low is None else f"{_number(found.low)} … {_number(found.high)}"


def _spread_row(name: str, spread: Spread) -> tuple[str, ...]:
    return (name, *(_number(value) for value in (spread.mean, spread.median, spread.p90, spread.total)))


async def _two(client: Client, handle: RunHandle, other: str, how: How, *, as_json: bool) -> None:
    found = await handle.compare(other, k=how.ks, threshold=how.threshold, confidence=how.confidence)
    tasks = [each async for each in handle.compare_tasks(other)]
    if as_json:
        items = [each.model_dump(mode="json") for each in tasks]
        print_json({**found.model_dump(mode="json"), "by_task": items})
        return
    _show_comparison(found)
    lost = [each for each in tasks if each.difference is not None and each.difference < 0][:SHOWN]
    if lost:
        rows = [(t.title, _number(t.ours), _number(t.theirs), _number(t.difference)) for t in lost]
        table(("lost most", "ours", "theirs", "difference"), rows)


def _show_comparison(found: Comparison) -> None:
    both = f"{counted(found.tasks, 'task')} in both"
    out.print(f"{found.ours.run_id} less {found.theirs.run_id}: {both}", markup=False)
    out.print(f"{found.wins} won, {found.losses} lost, {found.ties} tied", markup=False)
    _estimates({"mean reward": found.mean_reward} | _passes(found.pass_at), found.confidence)
    for side in (found.ours, found.theirs):
        _show_side(side)
    _names("without a grade in one of them", found.not_graded, found.not_graded_total)


def _show_side(side: Side) -> None:
    if side.ungraded:
        out.print(f"{counted(side.ungraded, 'rollout')} of {side.run_id} without a grade", markup=False)
    _names(f"only in {side.run_id}", side.only_here, side.only_here_total)


def _names(what: str, tasks: list[TaskName], total: int) -> None:
    if total:
        shown = "; ".join(task.title for task in tasks[:SHOWN])
        out.print(f"{what}: {counted(total, 'task')}: {shown}", markup=False, soft_wrap=True)
