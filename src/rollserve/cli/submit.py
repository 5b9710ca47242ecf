"""``rollserve submit``: a file of tasks becomes groups of a run."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from rollserve.cli.connect import connect, stay
from rollserve.cli.obstacles import in_the_way
from rollserve.cli.options import Where
from rollserve.cli.output import counted, err, out, print_json, table
from rollserve.cli.tasks import TaskFile
from rollserve.cli.waiting import Results, wait_for
from rollserve.client import Client, RunHandle
from rollserve.errors import Conflict, InvalidInput, RollserveError
from rollserve.wire import OpenRun

SOME_FAILED = 3
"""Exit code when a rollout that was waited for failed."""
SOME_CANCELLED = 4
"""… when none failed, and one was cancelled."""

SHOWN_REASONS = 10


@dataclass(frozen=True, slots=True)
class Into:
    """Where tasks go: into a new run of ``policy``, or into the open one ``run_id``."""

    policy: str | None
    name: str | None
    run_id: str | None

    @classmethod
    def of(cls, *, policy: str | None, name: str | None, run_id: str | None) -> Into:
        """Raises ``InvalidInput`` for flags that don't say which."""
        if not policy and not run_id:
            raise InvalidInput(
                "name the policy: --policy NAME, or --run RUN for an open run", field="--policy"
            )
        if name and run_id:
            raise InvalidInput("an open run has its name: leave out --name, or --run", field="--name")
        return cls(policy, name, run_id)

    async def run(self, client: Client) -> RunHandle:
        """Raises ``InvalidInput`` when the open run is of another policy."""
        if self.run_id is None:
            return await client.open_run(OpenRun(policy=self.policy or "", name=self.name))
        handle = await client.run(self.run_id)
        if self.policy not in (None, handle.run.spec.policy):
            what = f"run {handle.id} is of the policy {handle.run.spec.policy!r}, not {self.policy!r}"
            raise InvalidInput(what, field="--policy", hint="--run needs no --policy")
        return handle


async def submit(
    where: Where, file: TaskFile, into: Into, num_rollouts: int, *, wait: bool, as_json: bool
) -> int:
    """0, or with ``wait`` ``SOME_FAILED`` or ``SOME_CANCELLED``. A run opened here is closed when its tasks
    are refused, and after the wait; else it stays open."""
    async with connect(where) as client:
        handle = await into.run(client)
        own = into.run_id is None
        ids = await _submitted(handle, file, num_rollouts, own=own)
        if not as_json:
            out.print(f"run {handle.id}: {counted(len(ids), 'group')} of {num_rollouts} submitted")
        results = await _waited(where, client, handle.id, ids, quiet=as_json) if wait else None
        closed = results is not None and own and await _close(handle)
        if results is None and not as_json:
            await _leave(client, handle)
    if as_json:
        print_json(
            {"run_id": handle.id, "groups": ids, "closed": closed} | (_facts(results) if results else {})
        )
    elif results is not None:
        _report(results)
        if closed:
            out.print(f"run {handle.id} is closed; its results stay", markup=False)
    return _exit_code(results)


async def _submitted(handle: RunHandle, file: TaskFile, num_rollouts: int, *, own: bool) -> list[str]:
    """Ids of the groups. Raises what the server refuses them with, by its place in the file. What was
    refused or cut off leaves no run of ours open."""
    try:
        return [group.id for group in await handle.submit(file.tasks, num_rollouts=num_rollouts)]
    except (RollserveError, ValidationError, asyncio.CancelledError) as error:
        if isinstance(error, RollserveError):
            file.place(error)
        if own:
            await _close(handle)
        raise


async def _close(handle: RunHandle) -> bool:
    """Whether it is closed now; where not, it is named."""
    try:
        await handle.close()
    except Conflict:  # it was closed elsewhere
        return True
    except RollserveError as error:
        what = f"run {handle.id} could not be closed ({error.message}): `rollserve run close {handle.id}`"
        err.print(what, style="yellow", markup=False, soft_wrap=True)
        return False
    return True


async def _waited(where: Where, client: Client, run_id: str, ids: list[str], *, quiet: bool) -> Results:
    try:
        async with stay(where) as patient:
            return await wait_for(client, await patient.run(run_id), ids, quiet=quiet)
    except (asyncio.CancelledError, RollserveError):
        follow = f"`rollserve status {run_id}` follows it, `rollserve run close {run_id}` ends it"
        err.print(f"run {run_id} goes on: {follow}", soft_wrap=True, markup=False)
        raise


async def _leave(client: Client, handle: RunHandle) -> None:
    for obstacle in await in_the_way(client, handle.run):
        err.print(str(obstacle), style="yellow", markup=False, soft_wrap=True)
    follow = f"follow it with `rollserve status {handle.id}`"
    out.print(f"{follow}; it stays open: `rollserve run close {handle.id}` ends it", soft_wrap=True)


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
