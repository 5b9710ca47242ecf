"""What every grader's reward must be: finite, and for calls that took place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rollserve.errors import GraderFailure
from rollserve.grader.base import Grade
from rollserve.records.sample import is_reward


class _Written(msgspec.Struct):
    """A grade as a reward file holds it."""

    reward: float
    call_rewards: dict[str, float] = {}
    detail: dict[str, Any] = {}


def sound(grade: Grade, call_ids: Sequence[str], *, operation: str) -> Grade:
    """``grade`` itself. Raises ``GraderFailure`` for a reward that is not finite (as float32, which
    samples hold) or a call that never took place."""
    for name, reward in {"reward": grade.reward, **grade.call_rewards}.items():
        if not is_reward(reward):
            raise GraderFailure(f"{name} is {reward}, which is no reward", operation=operation)
    if unknown := grade.call_rewards.keys() - set(call_ids):
        raise GraderFailure(f"no such call: {min(unknown)!r}", operation=operation)
    return grade


def read_grade(data: bytes, *, operation: str) -> Grade:
    """A reward file: a number, or JSON ``{"reward": …, "call_rewards"?, "detail"?}``. Raises
    ``GraderFailure``."""
    text = data.decode(errors="replace").strip()
    try:
        if text.startswith("{"):
            written = msgspec.json.decode(text, type=_Written)
            return Grade(reward=written.reward, call_rewards=written.call_rewards, detail=written.detail)
        return Grade(reward=float(text))
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise GraderFailure(f"the reward can't be read: {error}"[:1000], operation=operation) from error
