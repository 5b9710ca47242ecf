"""The contract between server and workers: where workers live is the executor's business.

Messages are msgspec structs, so that any channel carries them (a Unix socket for ``local``, actor
calls for ``ray``). The server owns decisions and durable state; a worker owns the attempts it was
given, until it has reported their end and the report was acknowledged.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

import msgspec

from rollserve.records.policy import Backend, Policy
from rollserve.records.regrade import Graded, try_name
from rollserve.records.rollout import Attempt
from rollserve.records.run import RunSpec
from rollserve.records.task import Task

# Cold records cross the channel as their JSON (`bytes`): workers validate what they run.


class PolicyView(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A policy as workers see it; ``revision`` grows, an older view is ignored."""

    revision: int
    policy_json: bytes
    backends_json: list[bytes]

    def policy(self) -> Policy:
        return Policy.model_validate_json(self.policy_json)

    def backends(self) -> list[Backend]:
        return [Backend.model_validate_json(item) for item in self.backends_json]


class StartAttempt(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    attempt_id: str
    rollout_id: str
    group_id: str
    run_id: str
    index: int
    epoch: int
    run_json: bytes
    task_json: bytes

    def run(self) -> RunSpec:
        return RunSpec.model_validate_json(self.run_json)

    def task(self) -> Task:
        return Task.model_validate_json(self.task_json)


class CancelAttempt(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    attempt_id: str
    reason: str


class AckAttempt(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The server has committed (or fenced) the attempt's end; the worker may forget it. ``accepted``
    False: its payload is nobody's and can go."""

    attempt_id: str
    accepted: bool


class StartRegrading(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Grade a stored attempt by the grader in ``task_json``, which may ask the routes in ``run_json``.
    ``tries`` tells one try from another."""

    regrade_id: str
    run_id: str
    rollout_id: str
    tries: int
    run_json: bytes
    task_json: bytes
    attempt_json: bytes

    def run(self) -> RunSpec:
        return RunSpec.model_validate_json(self.run_json)

    def task(self) -> Task:
        return Task.model_validate_json(self.task_json)

    def attempt(self) -> Attempt:
        return Attempt.model_validate_json(self.attempt_json)

    @property
    def owner(self) -> str:
        """Whose sandboxes and calls of this try are."""
        return try_name(self.regrade_id, self.rollout_id, self.tries)


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Stop within ``grace_s``; attempts that have not ended by then are abandoned and cleaned up."""

    grace_s: float = 5.0


ToWorker = PolicyView | StartAttempt | CancelAttempt | AckAttempt | StartRegrading | Shutdown


class WorkerHello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """``capacity`` is how many attempts it holds at once (all stages and the ready buffer);
    ``slots`` by stage. ``runtimes`` are the usable ones."""

    worker_id: str
    pid: int
    capacity: int
    slots: dict[str, int]
    runtimes: list[str]
    gateway_url: str


class StageChanged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    attempt_id: str
    stage: str
    at: float


class AttemptEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """``attempt_json`` is a finished ``records.rollout.Attempt`` with its payload sealed."""

    attempt_json: bytes

    def attempt(self) -> Attempt:
        return Attempt.model_validate_json(self.attempt_json)


class RegradingEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """``graded_json`` is a ``records.regrade.Graded``."""

    regrade_id: str
    rollout_id: str
    tries: int
    graded_json: bytes

    def graded(self) -> Graded:
        return Graded.model_validate_json(self.graded_json)


class BackendReport(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker's pool saw a backend fail or come back."""

    backend_id: str
    ok: bool
    detail: str = ""


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sent every second. ``stages`` are attempts by stage; counters only grow."""

    at: float
    stages: dict[str, int]
    counters: dict[str, float]
    loop_lag_ms_p99: float
    rss_mb: float
    cpu_s: float
    backends: dict[str, dict[str, Any]] = {}


FromWorker = WorkerHello | StageChanged | AttemptEnded | RegradingEnded | BackendReport | WorkerStats


class WorkerLost(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's process is gone; so are its attempts and their sandboxes."""

    detail: str


class Executor(Protocol):
    async def start(self) -> None:
        """Start the workers; returns when the first has said hello. Raises ``InfrastructureFailure``
        with the worker's own words when none comes up."""

    def send(self, worker_id: str, message: ToWorker) -> bool:
        """Hand a message to a worker; False when it is gone. Never blocks."""

    def broadcast(self, message: ToWorker) -> None:
        """To every worker, those that join later included for ``PolicyView`` (latest per policy)."""

    def reports(self) -> AsyncIterator[tuple[str, FromWorker | WorkerLost]]:
        """What workers say, in each worker's order. A lost worker is replaced by itself."""

    async def stop(self, grace_s: float) -> None:
        """Stop every worker; returns when their processes are gone."""
