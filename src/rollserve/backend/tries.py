"""The tries of one call, and how one of them may end besides an answer."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field

from rollserve.backend.member import InFlight, Member, Pause
from rollserve.errors import BackendError, BackendUnavailable
from rollserve.records.policy import BackendState


class Interrupted(Exception):
    """The member was removed, or found dead, under a call."""


class Silent(BackendUnavailable):
    """No sign of life for ``silent_s``. The same backend is not waited for that long again."""


def why_left(member: Member) -> str:
    if member.removed:
        return "was removed"
    if member.record.state is BackendState.FENCED:
        return f"was fenced off ({member.record.error})"
    if member.error is not None:
        return f"stopped answering ({member.error})"
    return "did not stop for an update of the weights"


@dataclass(slots=True)
class Tries:
    """The tries of one call. ``handed``: tokens have reached the caller, so there is no other try."""

    session_id: str
    deadline: float
    pause: Pause = nullcontext
    tries: int = 0
    sent: int = 0
    handed: bool = False
    failed: dict[str, BackendError] = field(default_factory=dict)
    call: InFlight | None = None
