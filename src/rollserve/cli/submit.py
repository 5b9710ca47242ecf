"""``rollserve submit``: a file of tasks becomes groups of a run."""

from __future__ import annotations

import asyncio
from typing import Any

from rollserve.cli.connect import connect
from rollserve.cli.obstacles import in_the_way
from rollserve.cli.options import Where
from rollserve.cli.output import counted, err, out, print_json, table
from rollserve.cli.waiting import Results, wait_for
from rollserve.client import Client, RunHandle
from rollserve.records.task import Task
from rollserve.wire import OpenRun

SOME_FAILED = 3
"""Exit code when a rollout that was waited for failed."""
SOME_CANCELLED = 4
"""… when none failed, and one was cancelled."""

SHOWN_REASONS = 10


async def submit(
    where: Where,
    tasks: list[Task],
    policy: str,
    num_rollouts: int,
    *,
    name: str | None,
    run_id: str | None,
    wait: bool,
    as_json: bool,
) -> int:
    """0, or with ``wait`` ``SOME_FAILED`` or ``SOME_CANCELLED``."""
    async with connect(where) as client:
        handle = (
            await client.run(run_id) if run_id else await client.open_run(OpenRun(policy=policy, name=name))
        )
        groups = await handle.submit(tasks, num_rollouts=num_rollouts)
        ids = [group.id for group in groups]
        summary: dict[str, Any] = {"run_id": handle.id, "groups": ids}
        if not as_json:
            out.print(f"run {handle.id}: {counted(len(ids), 'group')} of {num_rollouts} submitted")
        results = await _waited(client, handle, ids, quiet=as_json) if wait else None
        if results is None and not as_json:
            await _leave(client, handle)
    if as_json:
        print_json(summary | (_facts(results) if results else {}))
    elif results is not None:
        _report(results)
    return _exit_code(results)


async def _waited(client: Client, handle: RunHandle, ids: list[str], *, quiet: bool) -> Results:
    try:
        return await wait_for(client, handle, ids, quiet=quiet)
    except asyncio.CancelledError:
        follow = f"`rollserve status {handle.id}` follows it, `rollserve run close {handle.id}` ends it"
        err.print(f"run {handle.id} goes on: {follow}", soft_wrap=True, markup=False)
        raise


async def _leave(client: Client, handle: RunHandle) -> None:
    for obstacle in await in_the_way(client, handle.run):
        err.print(str(obstacle), style="yellow", markup=False, soft_wrap=True)
    out.print(f"follow it with `rollserve status {handle.id}`", soft_wrap=True)


def _exit_code(results: Results | None) -> int:
    if results is None or not results.reasons:
        return 0
    return SOME_FAILED if results.failed else SOME_CANCELLED


def _facts(results: Results) -> dict[str, Any]:
    reasons = [
        {"kind": kind, "code": code, "message": message, "count": count, "rollout_id": example}
        for (kind, code, message), count, example in _by_count(results)
    ]
    return {
        "rewards": results.rewards,
        "failed": results.failed,
        "cancelled": results.cancelled,
        "failures": reasons,
    }


def _by_count(results: Results) -> list[tuple[tuple[str, str, str], int, str]]:
    return [(reason, count, results.examples[reason]) for reason, count in results.reasons.most_common()]


def _report(results: Results) -> None:
    rewards = [reward for group in results.rewards.values() for reward in group]
    graded = [reward for reward in rewards if reward is not None]
    mean = f"{sum(graded) / len(graded):.3f}" if graded else "none"
    ended = f"{counted(len(rewards), 'rollout')}, {len(graded)} graded, mean reward {mean}"
    failed = f", {results.failed} failed" if results.failed else ""
    out.print(ended + failed + (f", {results.cancelled} cancelled" if results.cancelled else ""))
    reasons = _by_count(results)
    if not reasons:
        return
    rows = [(count, kind, code, message, example) for (kind, code, message), count, example in reasons]
    table(("count", "kind", "code", "why", "one of them"), rows[:SHOWN_REASONS])
    if len(rows) > SHOWN_REASONS:
        out.print(f"and {len(rows) - SHOWN_REASONS} more reasons: --json has all")
    out.print(f"look into one with `rollserve show {reasons[0][2]} --log`", soft_wrap=True, markup=False)
