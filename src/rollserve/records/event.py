"""Events: what happened, numbered, so that a reader that reconnects misses nothing."""

from __future__ import annotations

from typing import Any

from rollserve.records.base import Record


class Event(Record):
    """``seq`` grows by commit order. ``type`` is ``<noun>.<verb>`` (``rollout.completed``)."""

    seq: int
    at: float
    type: str
    policy: str | None = None
    run_id: str | None = None
    group_id: str | None = None
    rollout_id: str | None = None
    data: dict[str, Any] = {}
