"""``rollserve status``: what the server, or one run, is doing."""

from __future__ import annotations

from rollserve.cli.callback import print_counts, show_callback
from rollserve.cli.connect import look
from rollserve.cli.obstacles import Obstacle, in_the_way, of_policy, of_run, policy_state
from rollserve.cli.options import Where
from rollserve.cli.output import counted, duration, err, first_line, out, print_json, table
from rollserve.cli.runs import RUN_COLUMNS, Counted, run_json, run_row, with_counts
from rollserve.client import Client, RunHandle
from rollserve.records.rollout import Rollout, RolloutState
from rollserve.records.run import Run, RunState
from rollserve.wire import RunStatus, ServerStatus

SHOWN_RUNS = 20
SHOWN_ROLLOUTS = 8


async def status(where: Where, run_id: str | None, *, as_json: bool) -> int:
    async with look(where) as client:
        if run_id:
            await _run_status(client, await client.run(run_id), as_json=as_json)
            return 0
        now = await client.status()
        shown, more = await _some_runs(client)
        runs = await with_counts(client, shown)
    if as_json:
        known = [run_json(each) for each in runs]
        print_json({**now.model_dump(mode="json"), "runs": known, "more_runs": more})
        return 0
    _show_server(now)
    _show_policies(now)
    if runs:
        table(RUN_COLUMNS, [run_row(each) for each in runs])
    if more:
        out.print("`rollserve run list` has the others")
    _show_obstacles(now, runs)
    return 0


async def _some_runs(client: Client) -> tuple[list[Run], bool]:
    """The newest, and among older ones those that are open or paused, up to ``SHOWN_RUNS`` each; whether
    there are more."""
    pages = [
        await client.runs(state=state, newest=True, limit=SHOWN_RUNS)
        for state in (None, RunState.OPEN, RunState.PAUSED)
    ]
    found = {run.id: run for listed in pages for run in listed.items}
    newest_first = sorted(found.values(), key=lambda run: -run.created_at)
    return newest_first, any(listed.next for listed in pages)


def _show_server(now: ServerStatus) -> None:
    up = duration(now.uptime_s)
    out.print(f"rollserve {now.version}, up {up}, {counted(len(now.workers), 'worker')}")
    out.print(f"queued {now.queued}, running {now.running}, loop lag p99 {now.loop_lag_ms_p99:.1f} ms")
    if any(now.callbacks.values()):
        print_counts("messages to callbacks", now.callbacks)
    if now.slots:
        table(("stage", "attempts", "slots"), [(s, now.stages.get(s, 0), n) for s, n in now.slots.items()])


def _show_policies(now: ServerStatus) -> None:
    if now.policies:
        table(
            ("policy", "version", "state", "backends", "active"),
            [
                (p["name"], p["version"], policy_state(p["paused"], p["active"]), p["backends"], p["active"])
                for p in now.policies
            ],
        )
    if now.backends:
        rows = [
            (
                *(b.get("policy"), b.get("id"), b.get("url"), b.get("state"), _age(b.get("age_s"))),
                *(b.get("in_flight"), b.get("error")),
            )
            for b in now.backends
        ]
        table(("policy", "backend", "url", "state", "seen", "in flight", "error"), rows)


def _age(age_s: float | None) -> str:
    return "not yet" if age_s is None else f"{duration(age_s)} ago"


def _show_obstacles(now: ServerStatus, runs: list[Counted]) -> None:
    found = [
        each
        for p in now.policies
        for each in of_policy(p["name"], paused=p["paused"], backends=p["backends"], active=p["active"])
    ]
    _say([*found, *(each for run, _ in runs for each in of_run(run))])


def _say(found: list[Obstacle]) -> None:
    for each in found:
        err.print(str(each), style="yellow", markup=False, soft_wrap=True)


async def _run_status(client: Client, handle: RunHandle, *, as_json: bool) -> None:
    now = await handle.status()
    some = await _some_rollouts(client, handle.id)
    if as_json:
        shown = [rollout.model_dump(mode="json") for rollout in some]
        print_json({**now.model_dump(mode="json"), "rollouts": shown})
        return
    found = [] if now.run.state is RunState.CLOSED else await in_the_way(client, now.run)
    callback = await handle.callback() if now.run.spec.callback else None
    _show_run(now, some)
    if callback is not None:
        show_callback(callback)
    _say(found)


def _show_run(now: RunStatus, some: list[Rollout]) -> None:
    spec = now.run.spec
    out.print(f"run {now.run.id} ({spec.name or 'unnamed'}), policy {spec.policy}: {now.run.state.value}")
    table(RUN_COLUMNS, [run_row((now.run, now.counts))])
    if some:
        rows = [
            (r.id, r.group_id, r.state.value, r.reward, first_line(r.failure.message) if r.failure else "")
            for r in some
        ]
        table(("rollout", "group", "state", "reward", "failure"), rows)
        out.print(f"look into one with `rollserve show {some[0].id}`", soft_wrap=True)


async def _some_rollouts(client: Client, run_id: str) -> list[Rollout]:
    """A few to look into, the failed ones first."""
    found: list[Rollout] = []
    for state in (RolloutState.FAILED, RolloutState.RUNNING, RolloutState.COMPLETED):
        async for rollout in client.rollouts(run_id=run_id, state=state.value):
            if len(found) == SHOWN_ROLLOUTS:
                return found
            found.append(rollout)
    return found
