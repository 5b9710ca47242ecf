"""``rollserve verify``: prove the samples of one rollout, or of a run's."""

from __future__ import annotations

from collections.abc import AsyncIterator

from rollserve.cli.connect import connect
from rollserve.cli.options import Where
from rollserve.cli.output import counted, out, print_json, table
from rollserve.client import Client
from rollserve.records.verification import Finding, Verification

SHOWN = 20
"""Findings a person is shown; ``--json`` has all."""


async def verify(where: Where, target: str, *, as_json: bool, **asked: str | float | bool | None) -> int:
    """1 when something is wrong, or nothing was there to look at."""
    every: list[Verification] = []
    async with connect(where) as client:
        async for rollout_id in _rollouts(client, target):
            every.append(await client.verify(rollout_id, **asked))
    ok = bool(every) and all(each.ok for each in every)
    if as_json:
        print_json({"ok": ok, "rollouts": [each.model_dump(mode="json") for each in every]})
    else:
        _show(every)
    return 0 if ok else 1


async def _rollouts(client: Client, target: str) -> AsyncIterator[str]:
    """A run's finished ones; failures are of no use to a trainer and have no samples."""
    if not target.startswith("run_"):
        yield target
        return
    async for rollout in client.rollouts(run_id=target, state="completed"):
        yield rollout.id


def _show(every: list[Verification]) -> None:
    samples = [(each.rollout_id, sample) for each in every for sample in each.samples]
    scored = [(where, each, each.difference) for where, each in samples if each.difference is not None]
    trained = sum(each.trained for _, each in samples)
    out.print(
        f"{counted(len(every), 'rollout')}, {counted(len(samples), 'sample')}, {trained} trained tokens"
    )
    if scored:
        compared = sum(found.compared for _, _, found in scored)
        mean = sum(found.mean * found.compared for _, _, found in scored) / compared
        where, sample, worst = max(scored, key=lambda each: each[2].max)
        out.print(
            f"{compared} tokens scored again: |difference| {mean:.5f} on average, {worst.max:.5f} at most"
        )
        token = f"token {worst.at} ({worst.text!r})"
        values = f"{worst.recorded:.4f} recorded, {worst.scored:.4f} scored"
        out.print(f"the most at {token} of {where} sample {sample.index}: {values}", markup=False)
    _show_unscored(every)
    _show_findings(every)


def _show_unscored(every: list[Verification]) -> None:
    reasons: dict[str, int] = {}
    for sample in (sample for each in every for sample in each.samples):
        if sample.not_scored is not None:
            reasons[sample.not_scored] = reasons.get(sample.not_scored, 0) + sample.trained
        for reason, count in (sample.difference.skipped if sample.difference else {}).items():
            reasons[reason] = reasons.get(reason, 0) + count
    if reasons:
        table(("tokens not compared", "because"), [(count, reason) for reason, count in reasons.items()])


def _show_findings(every: list[Verification]) -> None:
    rows: list[tuple[str, ...]] = [(each.rollout_id, "", "samples", each.note) for each in every if each.note]
    rows += [(each.rollout_id, "", found.check, found.detail) for each in every for found in each.findings]
    rows += [
        (each.rollout_id, str(sample.index), found.check, _placed(found))
        for each in every
        for sample in each.samples
        for found in sample.findings
    ]
    if not rows:
        out.print(_verdict(every))
        return
    table(("rollout", "sample", "wrong", "detail"), rows[:SHOWN])
    if len(rows) > SHOWN:
        out.print(f"and {len(rows) - SHOWN} more: --json has all")


def _verdict(every: list[Verification]) -> str:
    """Where nothing was found. What was not compared is not proven."""
    if not every:
        return "there is no finished rollout to look at"
    samples = [sample for each in every for sample in each.samples]
    compared = sum(sample.difference.compared for sample in samples if sample.difference)
    trained = sum(sample.trained for sample in samples)
    if trained and not compared:
        return f"not proven: {trained} tokens not compared"
    return "nothing is wrong"


def _placed(found: Finding) -> str:
    return found.detail if found.at is None else f"{found.detail}, at token {found.at}"
