"""``rollserve show`` and ``rollserve cancel``: one rollout."""

from __future__ import annotations

from typing import Any

from rollserve.cli.connect import look
from rollserve.cli.options import Where
from rollserve.cli.output import duration, first_line, local_time, out, print_json, table
from rollserve.records.rollout import Attempt
from rollserve.wire import RolloutStatus


async def show(where: Where, rollout_id: str, *, log: bool, as_json: bool) -> int:
    async with look(where) as client:
        now = await client.rollout(rollout_id)
        trajectory = await client.trajectory(rollout_id)
        attempts = [attempt async for attempt in client.attempts(rollout_id)]
        lines = await client.log(now.last_attempt.id) if log and now.last_attempt else []
    if as_json:
        print_json({**now.model_dump(mode="json"), "trajectory": trajectory, "log": lines})
        return 0
    _show_rollout(now, whole=not lines)
    table(("attempt", "outcome", "failure", "turns", "began", "took"), [_row(each) for each in attempts])
    for message in trajectory.get("conversation", []):
        print_message(message)
    for at, line in lines:
        out.print(f"{local_time(at)} {line}", markup=False, soft_wrap=True)
    return 0


def _show_rollout(now: RolloutStatus, *, whole: bool) -> None:
    """``whole``: the failure with its traceback, which the log has too."""
    rollout = now.rollout
    stage = f" ({now.stage})" if now.stage else ""
    out.print(f"rollout {rollout.id}: {rollout.state.value}{stage}, reward {rollout.reward}", markup=False)
    if rollout.failure:
        message = rollout.failure.message if whole else first_line(rollout.failure.message)
        out.print(f"failure: {rollout.failure.kind.value}: {message}", markup=False, soft_wrap=True)


def _row(attempt: Attempt) -> tuple[Any, ...]:
    end = attempt.finished_at
    return (
        attempt.id,
        attempt.outcome.value if attempt.outcome else "running",
        attempt.failure.code if attempt.failure else "",
        attempt.counts.get("turns", 0),
        local_time(attempt.started_at),
        duration(end - attempt.started_at) if end else "",
    )


def print_message(message: dict[str, Any]) -> None:
    out.print(f"[{message['role']}]", style="bold", markup=False)
    if message.get("reasoning"):
        out.print(message["reasoning"], style="dim", markup=False, soft_wrap=True)
    if message.get("content"):
        out.print(message["content"], markup=False, soft_wrap=True)
    for call in message.get("tool_calls", []):
        out.print(f"→ {call['name']}({call['arguments']})", style="cyan", markup=False, soft_wrap=True)


async def cancel(where: Where, target: str, *, as_json: bool) -> int:
    async with look(where) as client:
        is_group = target.startswith("grp_")
        result = await (client.cancel_group(target) if is_group else client.cancel_rollout(target))
    if as_json:
        print_json(result.model_dump())
    elif result.ended or result.stopping:
        out.print(f"{result.ended} ended, {result.stopping} being stopped")
    else:
        out.print(f"{target} has ended already: there was nothing to cancel", markup=False)
    return 0
