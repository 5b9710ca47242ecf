"""What was seen while the demo ran: the trainer's progress and the server's status over time."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollserve.wire import ServerStatus


@dataclass(frozen=True, slots=True)
class Moment:
    """The server's status at one time. ``tokens`` and ``episodes`` only grow."""

    at: float
    stages: dict[str, int]
    slots: dict[str, int]
    queued: int
    tokens: float
    episodes: float
    backend_in_flight: int


@dataclass(slots=True)
class Record:
    """``steps``, ``evaluations``: the trainer's events of that kind, in order."""

    started: float = field(default_factory=time.time)
    moments: list[Moment] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    evaluating: dict[str, Any] | None = None
    trained: dict[str, Any] | None = None
    done: dict[str, Any] | None = None
    milestone: dict[str, Any] | None = None
    run_id: str | None = None

    def take(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "step":
            self.steps.append(event)
        elif kind == "evaluated":
            self.evaluations.append(event)
            self.evaluating = None
        elif kind == "eval":
            self.evaluating = event
        elif kind == "train":
            self.run_id = event["run_id"]
        elif kind == "trained":
            self.trained = event
        elif kind == "milestone":
            self.milestone = {name: value for name, value in event.items() if name not in ("event", "at")}
        elif kind == "done":
            self.done = event

    def observe(self, status: ServerStatus) -> None:
        in_flight = sum(int(backend.get("in_flight", 0)) for backend in status.backends)
        self.moments.append(
            Moment(
                at=time.time(),
                stages=status.stages,
                slots=status.slots,
                queued=status.queued,
                tokens=status.counters.get("sampled_tokens", 0.0),
                episodes=status.counters.get("episodes", 0.0),
                backend_in_flight=in_flight,
            )
        )

    def tokens_per_s(self, window_s: float = 5.0) -> float:
        """Sampled tokens a second over the last ``window_s``."""
        recent = [moment for moment in self.moments if moment.at > time.time() - window_s]
        if len(recent) < 2:
            return 0.0
        return (recent[-1].tokens - recent[0].tokens) / max(1e-6, recent[-1].at - recent[0].at)

    def idle_share(self) -> float:
        """Of the training time, the part the trainer waited for rollouts."""
        if self.trained:
            return float(self.trained["waited_s"]) / max(1e-6, float(self.trained["train_seconds"]))
        if not self.steps:
            return 0.0
        return float(self.steps[-1]["waited_s"]) / max(1e-6, time.time() - float(self.steps[0]["began"]))


class Follower:
    """Reads a growing file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as source:
            source.seek(self._offset)
            data = source.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]
