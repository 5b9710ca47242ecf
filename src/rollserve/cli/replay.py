"""``rollserve regrade`` and ``rollserve export``: a run's store, graded or made into samples anew."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any, TextIO

import msgspec
from pydantic import TypeAdapter, ValidationError
from rich.progress import Progress

from rollserve.cli.connect import PATIENCE_S
from rollserve.cli.options import Where
from rollserve.cli.output import counted, err, out, print_json, table
from rollserve.client import Client, ExportedGroup
from rollserve.errors import InvalidInput
from rollserve.records.export import ExportSettings
from rollserve.records.regrade import JudgeRoute, JudgeRoutes, RegradingState
from rollserve.records.sample import Sample
from rollserve.records.task import GraderSpec

LOOK_S = 0.5
SHOWN = 20
_ARRAYS = ("ids", "loss_mask", "logprobs", "versions", "rewards")
_FIELDS = (
    *("rollout_id", "rollout_index", "index", "count", "weight", "reward", "exact", "cause", "text"),
    *("truncated_by", "mixed_versions", "inferred_versions", "policy", "call_ids"),
)


def settings_of(given: dict[str, Any]) -> ExportSettings:
    """Raises ``InvalidInput`` for the first that is none."""
    try:
        return ExportSettings.model_validate(given)
    except ValidationError as error:
        raise _first(error) from error


def routes_of(given: dict[str, Any]) -> dict[str, JudgeRoute]:
    """Raises ``InvalidInput`` for the first that is none."""
    try:
        return TypeAdapter(JudgeRoutes).validate_python(given)
    except ValidationError as error:
        raise _first(error, "routes") from error


def _first(error: ValidationError, *before: str) -> InvalidInput:
    first = error.errors()[0]
    return InvalidInput(first["msg"], field=".".join(str(part) for part in (*before, *first["loc"])))


async def regrade(
    where: Where,
    run_id: str,
    grader: GraderSpec,
    routes: dict[str, JudgeRoute] | None,
    *,
    wait: bool,
    as_json: bool,
) -> int:
    """Exit code 1 where a grading failed or was impossible."""
    async with Client(*where, patience_s=PATIENCE_S) as client:
        begun = await (await client.run(run_id)).regrade(grader, routes=routes)
        counts = (await client.regrade(begun.id)).counts
        if not wait:
            if as_json:
                print_json({"regrade": begun.model_dump(mode="json"), "counts": counts})
            else:
                out.print(f"{begun.id}: {counted(sum(counts.values()), 'grading')}", markup=False)
            return 0
        counts = await _watched(client, begun.id)
        found = [each async for each in client.gradings(begun.id)]
    bad = [each for each in found if each.state is not RegradingState.GRADED]
    if as_json:
        gradings = [each.model_dump(mode="json") for each in found]
        print_json({"regrade": begun.model_dump(mode="json"), "counts": counts, "gradings": gradings})
        return int(bool(bad))
    pairs = [(each.before, each.reward) for each in found if each.reward is not None]
    moved = sum(1 for before, reward in pairs if before != reward)
    graded = counted(len(pairs), "rollout")
    out.print(f"{begun.id}: {graded} graded, {moved} otherwise than before", markup=False)
    rows = []
    for each in bad[:SHOWN]:
        why = each.graded and (each.graded.note or (each.graded.failure and each.graded.failure.message))
        rows.append((each.rollout_id, each.state.value, why))
    if rows:
        table(("rollout", "state", "why"), rows)
    if len(bad) > SHOWN:
        out.print(f"and {len(bad) - SHOWN} more: --json has all")
    return int(bool(bad))


async def _watched(client: Client, regrade_id: str) -> dict[str, int]:
    """Until all of it has ended."""
    with Progress(console=err, transient=True) as progress:
        bar = progress.add_task("grading", total=None)
        while True:
            counts = (await client.regrade(regrade_id)).counts
            left = sum(counts[state.value] for state in RegradingState if not state.final)
            total = sum(counts.values())
            progress.update(bar, total=total, completed=total - left)
            if not left:
                return counts
            await asyncio.sleep(LOOK_S)


async def export(
    where: Where, run_id: str, settings: ExportSettings, file: Path | None, *, as_json: bool
) -> int:
    """A sample a line, to ``file`` or, without ``--json``, to standard output."""
    sums: Counter[str] = Counter(groups=0, rollouts=0, samples=0, tokens=0, trained_tokens=0)
    left_out: list[dict[str, Any]] = []
    async with Client(*where, patience_s=PATIENCE_S) as client:
        run = await client.run(run_id)
        total = (await run.status()).counts.get("groups_finished")
        with Progress(console=err, transient=True) as progress:
            bar = progress.add_task("groups", total=total)
            sink = None if file is None else file.open("w")
            try:
                async for group in run.export(settings):
                    _write(group, sink, sums, left_out, silent=as_json)
                    progress.advance(bar)
            finally:
                if sink is not None:
                    sink.close()
    if as_json:
        print_json({"run_id": run_id, **sums, "left_out": left_out})
    else:
        told = ", ".join(f"{many} {name.replace('_', ' ')}" for name, many in sums.items())
        err.print(f"{run_id}: {told}; {len(left_out)} left out", markup=False)
        for each in left_out[:SHOWN]:
            err.print(f"  {each.get('rollout_id') or each['group_id']}: {each['why']}", markup=False)
    return 0


def _write(
    group: ExportedGroup,
    sink: TextIO | None,
    sums: Counter[str],
    left_out: list[dict[str, Any]],
    *,
    silent: bool,
) -> None:
    if group.left_out is not None:
        left_out.append({"group_id": group.group.id, "why": group.left_out})
        return
    sums.update(groups=1, rollouts=len(group.rollouts))
    for rollout in group.rollouts:
        if rollout.note and not rollout.samples:
            left_out.append(
                {"group_id": group.group.id, "rollout_id": rollout.rollout.id, "why": rollout.note}
            )
        for sample in rollout.samples:
            trained = int(sample.loss_mask.sum())
            sums.update(samples=1, tokens=len(sample.ids), trained_tokens=trained)
            line = msgspec.json.encode(_plain(group, sample)).decode()
            if sink is not None:
                sink.write(line + "\n")
            elif not silent:
                out.file.write(line + "\n")


def _plain(group: ExportedGroup, sample: Sample) -> dict[str, Any]:
    fields = {name: getattr(sample, name) for name in _FIELDS}
    arrays = {name: getattr(sample, name).tolist() for name in _ARRAYS}
    metadata = group.group.task.metadata
    return {"group_id": group.group.id, "metadata": metadata, **fields, **arrays}
