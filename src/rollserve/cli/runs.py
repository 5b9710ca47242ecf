"""``rollserve run …``: look at runs, pause, resume and close them."""

from __future__ import annotations

import time
from typing import Any

from rollserve.cli.connect import connect, look
from rollserve.cli.options import Where
from rollserve.cli.output import duration, out, print_json, table
from rollserve.client import Client
from rollserve.records.run import Run, RunState

Counted = tuple[Run, dict[str, int]]

RUN_COLUMNS = (
    *("run", "name", "policy", "state", "age", "groups in flight", "ready"),
    *("waiting", "running", "completed", "failed", "cancelled"),
)
"""Groups, then rollouts; ``ready`` are finished groups that no trainer has taken."""

_COUNTS = ("groups_open", "groups_undelivered", "queued", "running", "completed", "failed", "cancelled")


def run_row(counted: Counted) -> tuple[Any, ...]:
    run, counts = counted
    age = duration(time.time() - run.created_at)
    about = (run.id, run.spec.name, run.spec.policy, run.state.value, age)
    return about + tuple(counts.get(name, 0) for name in _COUNTS)


def run_json(counted: Counted) -> dict[str, Any]:
    run, counts = counted
    return {**run.model_dump(mode="json"), "counts": counts}


async def with_counts(client: Client, runs: list[Run]) -> list[Counted]:
    """One question each: for a page that people read."""
    return [(run, (await (await client.run(run.id)).status()).counts) for run in runs]


async def list_runs(
    where: Where, *, state: RunState | None, limit: int, cursor: str | None, as_json: bool
) -> None:
    async with look(where) as client:
        found = await client.runs(state=state, newest=True, limit=limit, cursor=cursor)
        runs = await with_counts(client, found.items)
    if as_json:
        print_json({"runs": [run_json(each) for each in runs], "next": found.next})
        return
    if not runs:
        out.print("no run" if state is None else f"no run is {state.value}")
        return
    table(RUN_COLUMNS, [run_row(each) for each in runs])
    if found.next:
        only = f" --state {state.value}" if state else ""
        out.print(f"older ones: `rollserve run list{only} --cursor {found.next}`", soft_wrap=True)


async def pause(where: Where, run_id: str, *, as_json: bool) -> None:
    async with look(where) as client:
        run = await (await client.run(run_id)).pause()
    if as_json:
        print_json(run.model_dump(mode="json"))
    else:
        out.print(f"run {run.id} is paused: nothing new starts, what runs goes on", soft_wrap=True)


async def resume(where: Where, run_id: str, *, as_json: bool) -> None:
    async with look(where) as client:
        run = await (await client.run(run_id)).resume()
    if as_json:
        print_json(run.model_dump(mode="json"))
    else:
        out.print(f"run {run.id} is {run.state.value}")


async def close(where: Where, run_id: str, *, as_json: bool) -> None:
    async with connect(where) as client:
        closed = await (await client.run(run_id)).close()
    if as_json:
        print_json(closed.model_dump(mode="json"))
        return
    what = f"{closed.ended} rollouts ended, {closed.stopping} being stopped"
    out.print(f"run {closed.run.id} is closed: {what}; finished groups can still be fetched", soft_wrap=True)
