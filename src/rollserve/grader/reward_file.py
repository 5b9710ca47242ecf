"""A grade as a file holds it."""

from __future__ import annotations

from typing import Any

import msgspec

from rollserve.errors import GraderFailure
from rollserve.grader.base import Grade


class _Written(msgspec.Struct):
    """Its JSON form."""

    reward: float
    call_rewards: dict[str, float] = {}
    detail: dict[str, Any] = {}


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
