"""What runs now, in memory: the store knows that a rollout runs, the board knows where and how far."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rollserve.records.rollout import Stage
from rollserve.store.values import Start


@dataclass(slots=True)
class Running:
    """One attempt on a worker; ``since`` in seconds since the epoch."""

    start: Start
    worker_id: str
    since: float
    stage: str = Stage.INIT.value


@dataclass(frozen=True, slots=True)
class Asked:
    """A cancel that was asked for."""

    reason: str
    at: float


class Board:
    """``ending`` holds attempts whose end is being committed."""

    def __init__(self) -> None:
        self._running: dict[str, Running] = {}
        self._attempt_of: dict[str, str] = {}
        self._asked: dict[str, Asked] = {}
        self.ending: set[str] = set()

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[tuple[str, Running]]:
        return iter(list(self._running.items()))

    def put(self, running: Running) -> None:
        self._running[running.start.attempt_id] = running
        self._attempt_of[running.start.rollout.id] = running.start.attempt_id

    def get(self, attempt_id: str) -> Running | None:
        return self._running.get(attempt_id)

    def of_rollout(self, rollout_id: str) -> Running | None:
        attempt_id = self._attempt_of.get(rollout_id)
        return None if attempt_id is None else self._running.get(attempt_id)

    def remove(self, attempt_id: str) -> None:
        running = self._running.pop(attempt_id, None)
        if running is not None and self._attempt_of.get(running.start.rollout.id) == attempt_id:
            del self._attempt_of[running.start.rollout.id]

    def moved(self, attempt_id: str, stage: str) -> None:
        running = self._running.get(attempt_id)
        if running is not None:
            running.stage = stage

    def ask_cancel(self, rollout_id: str, reason: str, now: float) -> bool:
        """False when it was asked for before."""
        if rollout_id in self._asked:
            return False
        self._asked[rollout_id] = Asked(reason, now)
        return True

    def asked(self, rollout_id: str) -> Asked | None:
        return self._asked.get(rollout_id)

    def forget_cancel(self, rollout_id: str) -> None:
        self._asked.pop(rollout_id, None)

    def forget_old_cancels(self, before: float) -> None:
        """Of rollouts that do not run: they ended before the cancel could reach them."""
        for rollout_id, asked in list(self._asked.items()):
            if asked.at < before and rollout_id not in self._attempt_of:
                del self._asked[rollout_id]
