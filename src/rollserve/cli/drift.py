"""``rollserve drift``: where tokens differ from what was sent or consumed, of a run or a rollout."""

from __future__ import annotations

from typing import Any

from rollserve.cli.connect import connect
from rollserve.cli.options import Where
from rollserve.cli.output import counted, out, print_json, table
from rollserve.records.drift import DriftCause, RolloutDrift

SHOWN = 20
"""Places, or rollouts, that a person is shown; ``--json`` has all."""


async def drift(where: Where, target: str, *, cause: str | None, as_json: bool) -> int:
    async with connect(where) as client:
        if target.startswith("run_"):
            found = [each async for each in client.drift(target, cause=cause)]
            _of_run(target, found, as_json=as_json)
        else:
            every = [each async for each in client.rollout_drift(target)]
            _of_rollout(
                target,
                [each for each in every if cause in (None, each["drift"]["cause"])],
                as_json=as_json,
            )
    return 0


def _of_run(run_id: str, found: list[RolloutDrift], *, as_json: bool) -> None:
    sums, rollouts = _sums(found)
    if as_json:
        causes = [each.model_dump(mode="json") for each in sums]
        print_json({"causes": causes, "rollouts": [each.model_dump(mode="json") for each in found]})
        return
    sampled = sum(each.sampled for each in found)
    out.print(f"{run_id}: {counted(len(found), 'rollout')}, {sampled} sampled tokens", markup=False)
    if not sums:
        out.print("nothing differs")
        return
    table(
        ("cause", "times", "absorbed", "untrainable tokens", "rollouts"),
        [(e.cause, e.times, e.absorbed, e.untrainable, rollouts[e.cause]) for e in sums],
    )
    worst = max(found, key=lambda each: sum(cause.times for cause in each.causes))
    out.print(f"look into one with `rollserve drift {worst.rollout_id}`", soft_wrap=True, markup=False)


def _sums(found: list[RolloutDrift]) -> tuple[list[DriftCause], dict[str, int]]:
    """By cause over all rollouts, the most costly first; and how many rollouts met each."""
    names = sorted({cause.cause for each in found for cause in each.causes})
    sums, rollouts = [], {}
    for name in names:
        met = [cause for each in found for cause in each.causes if cause.cause == name]
        rollouts[name] = len(met)
        sums.append(
            DriftCause(
                cause=name,
                times=sum(each.times for each in met),
                absorbed=sum(each.absorbed for each in met),
                untrainable=sum(each.untrainable for each in met),
            )
        )
    return sorted(sums, key=lambda each: (-each.untrainable, -each.times, each.cause)), rollouts


def _of_rollout(rollout_id: str, every: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print_json({"places": every})
        return
    out.print(f"{rollout_id}: {counted(len(every), 'place')}", markup=False)
    rows = []
    for each in every[:SHOWN]:
        place = each["drift"]
        was, is_now = (repr(place.get(name, "")) for name in ("expected_text", "found_text"))
        kept = "yes" if place.get("absorbed") else "no"
        rows.append((each["call_id"], place["cause"], kept, place.get("at_token"), was, is_now))
    if rows:
        table(("call", "cause", "absorbed", "token", "was", "is"), rows)
    if len(every) > SHOWN:
        out.print(f"and {len(every) - SHOWN} more: --json has all")
