"""Whose fault it is that a call has not come back: the model's, which takes its time, or the backend's.

Nothing is concluded from silence alone while there is anything better: the backend's health, tokens of
the call itself, the engine's own counter of tokens over about a second, other calls that came back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from rollserve.backend.base import BackendHealth
from rollserve.backend.member import Clock, InFlight, Member
from rollserve.errors import BackendUnavailable

LOOK_S = 4.0
"""For an answer about health; asked twice."""

BETWEEN_S = 1.0

PREFILL_S = 30.0
"""An engine may read a long prompt for so long without sampling a token."""

REMEDY = "where one generation does take this long, raise run_s or lower max_tokens"

Look = Callable[[], Awaitable[BackendHealth]]


async def watch(
    member: Member, call: InFlight, run_s: float, clock: Clock, look: Look
) -> BackendUnavailable | None:
    """Look twice at the backend that holds ``call``. None: it is at work, or the call came back."""
    moved_at = call.moved_at
    before = await look()
    if before.ok:
        await clock.sleep(BETWEEN_S)
    after = await look() if before.ok else before
    if call not in member.calls or call.moved_at > moved_at:
        return None
    silent_s = clock.monotonic() - call.moved_at
    if not after.ok:
        return _error(member, silent_s, f"it is not well: {after.detail or 'no reason given'}")
    return _judge(member, call, silent_s, run_s, _sampled(before, after))


def _sampled(before: BackendHealth, after: BackendHealth) -> int | None:
    """Tokens that the engine made meanwhile; None where it does not count. A counter that went back is
    that of an engine which has started again, and lost the call."""
    if before.generated_tokens is None or after.generated_tokens is None:
        return None
    return max(0, after.generated_tokens - before.generated_tokens)


def _judge(
    member: Member, call: InFlight, silent_s: float, run_s: float, sampled: int | None
) -> BackendUnavailable | None:
    """The backend is well. A short silence says nothing: the time before it was the agent's."""
    if sampled is not None:
        if sampled > 0 or silent_s < min(PREFILL_S, run_s / 10):
            return None
        return _error(member, silent_s, "it is healthy and its engine samples nothing")
    if member.succeeded > call.finished_before or silent_s < run_s / 2:
        return None
    return _error(member, silent_s, "it is healthy, counts no tokens, and no other call came back", REMEDY)


def _error(member: Member, silent_s: float, why: str, hint: str | None = None) -> BackendUnavailable:
    message = f"backend {member.id} was silent for {silent_s:.0f} s while the agent's time ran out; {why}"
    return BackendUnavailable(message, operation="pool.generate", hint=hint)
