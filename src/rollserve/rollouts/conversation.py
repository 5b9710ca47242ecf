"""What was said in an attempt, read from its calls."""

from __future__ import annotations

from collections.abc import Sequence

from rollserve.records.call import Call, Message


def conversation(calls: Sequence[Call]) -> list[Message]:
    """Root to the newest call of the run's own policy, the model's own turns included."""
    by_id = {call.id: call for call in calls}
    path: list[Call] = []
    call = next((call for call in reversed(calls) if not call.route), None)
    while call is not None:
        path.append(call)
        call = by_id.get(call.parent) if call.parent is not None else None
    return [message for step in reversed(path) for message in (*step.messages, step.reply)]
