"""Commands that speak to a running server: submit, status, show, cancel."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rollserve.cli.output import counted, err, out, print_json, table
from rollserve.client import Client, RunHandle
from rollserve.errors import InvalidInput
from rollserve.records.rollout import Rollout, RolloutState
from rollserve.records.task import Task
from rollserve.wire import OpenRun

Where = tuple[str, str | None]

SHOWN_ROLLOUTS = 8
PATIENCE_S = 3.0
"""A person at a terminal would rather hear at once that there is no server."""
LOOK_EVERY_S = 2.0


def read_text(path: Path) -> str:
    """The file's text, or standard input for ``-``. Raises ``InvalidInput``."""
    if str(path) == "-":
        return sys.stdin.read()
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"can't read {path}: {error}") from error


def parse_task(text: str, where: str) -> Task:
    """Raises ``InvalidInput`` that names the place and the field."""
    try:
        return Task.model_validate_json(text)
    except ValidationError as error:
        from rollserve.api.problems import invalid  # slow to import

        found = invalid(error, Task)
        field = f"{where}: {found.field}" if found.field else where
        raise InvalidInput(found.message, field=field, hint=found.hint) from error


def _one_a_line(text: str) -> list[str]:
    """The lines; a file that is one JSON object over several lines is one task."""
    try:
        return [text] if isinstance(json.loads(text), dict) else text.splitlines()
    except ValueError:  # several: "extra data" after the first
        return text.splitlines()


def read_tasks(path: Path) -> list[Task]:
    text = read_text(path)
    tasks = [
        parse_task(line, f"line {number}")
        for number, line in enumerate(_one_a_line(text), start=1)
        if line.strip()
    ]
    if not tasks:
        raise InvalidInput(f"{path} holds no task", hint="one JSON object a line")
    return tasks


async def submit(
    where: Where,
    file: Path,
    policy: str,
    num_rollouts: int,
    *,
    name: str | None,
    run_id: str | None,
    wait: bool,
    as_json: bool,
) -> int:
    tasks = read_tasks(file)
    async with Client(*where, patience_s=PATIENCE_S) as client:
        handle = (
            await client.run(run_id) if run_id else await client.open_run(OpenRun(policy=policy, name=name))
        )
        groups = await handle.submit(tasks, num_rollouts=num_rollouts)
        summary: dict[str, Any] = {"run_id": handle.id, "groups": [group.id for group in groups]}
        if not as_json:
            out.print(f"run {handle.id}: {counted(len(groups), 'group')} of {num_rollouts} submitted")
        if wait:
            summary["rewards"] = await _wait(client, handle, {group.id for group in groups}, quiet=as_json)
    if as_json:
        print_json(summary)
    elif not wait:
        out.print(f"follow it with `rollserve status {handle.id}`", soft_wrap=True)
    return 0


async def _report_backends(client: Client, policy: str) -> None:
    """Say once of each backend of the policy that it has failed: until it is back nothing moves."""
    said: set[str] = set()
    while True:
        for backend in (await client.status()).backends:
            name, error = str(backend.get("url")), backend.get("error")
            if backend.get("policy") == policy and error and name not in said:
                said.add(name)
                err.print(f"backend {name} does not answer: {error}", style="yellow", markup=False)
        await asyncio.sleep(LOOK_EVERY_S)


async def _wait(
    client: Client, handle: RunHandle, ids: set[str], *, quiet: bool
) -> dict[str, list[float | None]]:
    """Rewards by group id, each reported as it finishes."""
    rewards: dict[str, list[float | None]] = {}
    columns = (TextColumn("groups"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    watching = asyncio.create_task(_report_backends(client, handle.run.spec.policy))
    try:
        with Progress(*columns, console=err, disable=quiet) as progress:
            await _collect(handle, ids, rewards, progress)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    if not quiet:
        graded = [r for group in rewards.values() for r in group if r is not None]
        total = sum(len(group) for group in rewards.values())
        mean = f"{sum(graded) / len(graded):.3f}" if graded else "none"
        out.print(f"{total} rollouts, {len(graded)} graded, mean reward {mean}")
    return rewards


async def _collect(
    handle: RunHandle, ids: set[str], rewards: dict[str, list[float | None]], progress: Progress
) -> None:
    bar = progress.add_task("groups", total=len(ids))
    async with aclosing(handle.groups(trainer="rollserve-cli", auto_ack=False)) as stream:
        while ids - rewards.keys():
            group = await anext(stream)
            await group.ack()
            if group.group.id in ids:
                rewards[group.group.id] = group.rewards
                progress.advance(bar)


async def status(where: Where, run_id: str | None, *, as_json: bool) -> int:
    async with Client(*where, patience_s=PATIENCE_S) as client:
        if run_id:
            return await _run_status(client, await client.run(run_id), as_json=as_json)
        now = await client.status()
        runs = await client.runs()
    if as_json:
        print_json({**now.model_dump(mode="json"), "runs": [run.model_dump(mode="json") for run in runs]})
        return 0
    out.print(f"rollserve {now.version}, up {now.uptime_s:.0f} s, {counted(len(now.workers), 'worker')}")
    out.print(f"queued {now.queued}, running {now.running}, loop lag p99 {now.loop_lag_ms_p99:.1f} ms")
    if now.slots:
        table(("stage", "attempts", "slots"), [(s, now.stages.get(s, 0), n) for s, n in now.slots.items()])
    if now.backends:
        rows = [
            (b.get("policy"), b.get("id"), b.get("url"), b.get("state"), b.get("in_flight"), b.get("error"))
            for b in now.backends
        ]
        table(("policy", "backend", "url", "state", "in flight", "error"), rows)
    if runs:
        table(
            ("run", "name", "policy", "state"),
            [(r.id, r.spec.name, r.spec.policy, r.state.value) for r in runs],
        )
    return 0


async def _run_status(client: Client, handle: RunHandle, *, as_json: bool) -> int:
    now = await handle.status()
    if as_json:
        print_json(now.model_dump(mode="json"))
        return 0
    spec = now.run.spec
    out.print(f"run {now.run.id} ({spec.name or 'unnamed'}), policy {spec.policy}: {now.run.state.value}")
    table(("what", "count"), sorted(now.counts.items()))
    some = await _some_rollouts(client, handle.id)
    if some:
        rows = [
            (r.id, r.group_id, r.state.value, r.reward, r.failure.code if r.failure else "") for r in some
        ]
        table(("rollout", "group", "state", "reward", "failure"), rows)
        out.print(f"look into one with `rollserve show {some[0].id}`", soft_wrap=True)
    return 0


async def _some_rollouts(client: Client, run_id: str) -> list[Rollout]:
    """A few to look into, the failed ones first."""
    found: list[Rollout] = []
    for state in (RolloutState.FAILED, RolloutState.RUNNING, RolloutState.COMPLETED):
        async for rollout in client.rollouts(run_id=run_id, state=state.value):
            if len(found) == SHOWN_ROLLOUTS:
                return found
            found.append(rollout)
    return found


async def show(where: Where, rollout_id: str, *, log: bool, as_json: bool) -> int:
    async with Client(*where, patience_s=PATIENCE_S) as client:
        now = await client.rollout(rollout_id)
        trajectory = await client.trajectory(rollout_id)
        attempts = [attempt async for attempt in client.attempts(rollout_id)]
        lines = await client.log(now.last_attempt.id) if log and now.last_attempt else []
    if as_json:
        print_json({**now.model_dump(mode="json"), "trajectory": trajectory, "log": lines})
        return 0
    rollout = now.rollout
    stage = f" ({now.stage})" if now.stage else ""
    out.print(f"rollout {rollout.id}: {rollout.state.value}{stage}, reward {rollout.reward}", markup=False)
    if rollout.failure:
        out.print(f"failure: {rollout.failure.kind.value}: {rollout.failure.message}", markup=False)
    rows = [
        (
            a.id,
            a.outcome.value if a.outcome else "running",
            a.failure.code if a.failure else "",
            a.counts.get("turns", 0),
        )
        for a in attempts
    ]
    table(("attempt", "outcome", "failure", "turns"), rows)
    for message in trajectory.get("conversation", []):
        print_message(message)
    for at, line in lines:
        out.print(f"{at:.3f} {line}", markup=False)
    return 0


def print_message(message: dict[str, Any]) -> None:
    out.print(f"[{message['role']}]", style="bold", markup=False)
    if message.get("reasoning"):
        out.print(message["reasoning"], style="dim", markup=False)
    if message.get("content"):
        out.print(message["content"], markup=False)
    for call in message.get("tool_calls", []):
        out.print(f"→ {call['name']}({call['arguments']})", style="cyan", markup=False)


async def cancel(where: Where, target: str, *, as_json: bool) -> int:
    async with Client(*where, patience_s=PATIENCE_S) as client:
        is_group = target.startswith("grp_")
        result = await (client.cancel_group(target) if is_group else client.cancel_rollout(target))
    if as_json:
        print_json(result.model_dump())
    else:
        out.print(f"{result.ended} ended, {result.stopping} being stopped")
    return 0
