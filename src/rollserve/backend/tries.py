"""The tries of one call, and how one of them may end besides an answer."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field

from rollserve.backend.homing import Patience
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


@dataclass(slots=True, eq=False)
class Tries:
    """The tries of one call. ``handed``: tokens have reached the caller, so there is no other try.
    ``prompt_tokens`` (None: the engine will know) and ``salt`` say what of a prefix cache it can use;
    ``ticket`` is its place in the line."""

    session_id: str
    deadline: float
    pause: Pause = nullcontext
    prompt_tokens: int | None = None
    salt: str = ""
    ticket: tuple[float, int] | None = None
    patience: Patience = field(default_factory=Patience)
    tries: int = 0
    sent: int = 0
    handed: bool = False
    failed: dict[str, BackendError] = field(default_factory=dict)
    call: InFlight | None = None
