"""What a task source gave in one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollserve.records.run import SourceState
from rollserve.store.values import NewGroup


@dataclass(slots=True)
class Taken:
    """Tasks from one place to the next."""

    next: int
    groups: list[NewGroup] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    state: SourceState = SourceState.RUNNING
    detail: str = ""
