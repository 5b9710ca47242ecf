"""``rollserve callback``: what a run's callback was sent, and what is stuck."""

from __future__ import annotations

from collections.abc import Mapping

from rollserve.cli.connect import connect
from rollserve.cli.options import Where
from rollserve.cli.output import counted, out, print_json, table
from rollserve.records.callback import CallbackMessage, CallbackMessageState, CallbackStatus

SHOWN = 20
"""Messages that a person is shown of each state; ``--json`` has all."""


async def callback(where: Where, run_id: str, *, resend: bool, as_json: bool) -> int:
    async with connect(where) as client:
        handle = await client.run(run_id)
        resent = await handle.resend() if resend else None
        now = await handle.callback()
        stuck = [each async for each in handle.messages(CallbackMessageState.DEAD)]
        waiting = [each async for each in handle.messages(CallbackMessageState.PENDING)]
    if as_json:
        messages = [each.model_dump(mode="json") for each in (*stuck, *waiting)]
        print_json({**now.model_dump(mode="json"), "resent": resent, "open": messages})
        return 0
    if resent is not None:
        out.print(f"{counted(resent, 'message')} sent again")
    show_callback(now)
    _show_messages([*stuck[:SHOWN], *waiting[:SHOWN]])
    return 0


def show_callback(now: CallbackStatus) -> None:
    detail = f": {now.detail}" if now.detail else ""
    out.print(f"callback {now.rule.url}: {now.state.value}{detail}", markup=False, soft_wrap=True)
    print_counts("messages", now.messages)


def print_counts(what: str, counts: Mapping[str, int]) -> None:
    parts = ", ".join(f"{many} {state}" for state, many in counts.items() if many)
    out.print(f"{what}: {parts or 'none'}", markup=False)


def _show_messages(messages: list[CallbackMessage]) -> None:
    if messages:
        table(
            ("message", "event", "group", "state", "tries", "last error"),
            [(m.id, m.type, m.group_id, m.state.value, m.tries, m.error) for m in messages],
        )
