"""A run: the settings under which groups are rolled out, and the log of finished ones."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rollserve.errors import FailureKind
from rollserve.records.base import JsonObject, Name, Record
from rollserve.records.call import Label
from rollserve.records.callback import CallbackRule
from rollserve.records.control import DeliveryRule, FilterRule, GroupRule, StalenessRule, TaskSource
from rollserve.records.task import Path

TRAINED: tuple[Label, ...] = ("continuation", "fork", "compaction", "subagent", "retry")
"""All but side calls."""

RunStage = Literal["run", "grade"]


class RunState(StrEnum):
    OPEN = "open"
    PAUSED = "paused"
    CLOSED = "closed"


class SamplingSettings(Record):
    """The run's sampling settings; they override what a harness asks for. ``max_tokens`` bounds one
    call. ``seed`` None lets the backend choose."""

    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=1_000_000)] = -1
    max_tokens: Annotated[int, Field(ge=1, le=1_000_000)] = 4096
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None


class RouteSpec(Record):
    """Calls that ask for the route's name as their model go to ``policy``, under ``sampling`` (None: the
    run's), in conversations of their own. With ``train`` what they sample is trained, in samples that name
    the policy. ``stages`` says who may ask it: agents (``run``), graders (``grade``). With ``side_calls`` it
    also answers side calls that name no route (those that can be told when they come). A plain text stands
    for its policy."""

    policy: Name
    sampling: SamplingSettings | None = None
    train: bool = False
    stages: Annotated[tuple[RunStage, ...], Field(min_length=1, max_length=2)] = ("run",)
    side_calls: bool = False

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        return {"policy": value} if isinstance(value, str) else value


class RetrySettings(Record):
    """Infrastructure and grader failures are tried again, ``backoff_s * 2**n`` seconds later."""

    max_attempts: Annotated[int, Field(ge=1, le=100)] = 3
    backoff_s: Annotated[float, Field(ge=0, le=3600)] = 1.0
    max_backoff_s: Annotated[float, Field(ge=0, le=3600)] = 30.0


class Quota(Record):
    """Bounds of one run. Over ``max_queued_groups`` a submit is answered 429."""

    max_running_rollouts: Annotated[int, Field(ge=1, le=100_000)] = 1024
    max_queued_groups: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    max_undelivered_groups: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000


class RunSpec(Record):
    """``thinking`` says whether reasoning of earlier turns stays in the context (``keep``) or is
    stripped as the template does (``strip``). ``on_inexact`` decides on samples whose tokens are not
    exact: leave them out (``drop``), hand them over as text without a loss mask (``text``), or fail
    the rollout (``fail``). ``rewrites`` decides on model turns that the agent sends back rewritten: keep
    the sampled ids where the meaning is the same (``exact``), render what it sent as a new branch
    (``faithful``), or fail the rollout (``fail``); an edited turn begins a new branch, or fails it too.
    Sampled tokens of calls with one of ``train_labels`` are trained, others are left out and counted.
    ``routes`` are policies that may be asked beside the run's own, by name. ``failure_rewards`` maps a
    failure kind to the reward it counts as; what it does not name stays without reward. Runs of higher
    ``priority`` start first, among equals those whose ``purpose`` is evaluation; what is left is shared
    fairly (``records.control`` has the other rules).
    ``keep_files`` are paths of the run sandbox that are kept with each attempt, for graders that come later.
    With ``callback`` finished groups are also sent, and need not be asked for."""

    policy: Name
    name: Name | None = None
    sampling: SamplingSettings = SamplingSettings()
    thinking: Literal["keep", "strip"] = "keep"
    on_inexact: Literal["drop", "text", "fail"] = "drop"
    rewrites: Literal["exact", "faithful", "fail"] = "exact"
    train_labels: Annotated[tuple[Label, ...], Field(max_length=6)] = TRAINED
    routes: Annotated[dict[Name, RouteSpec], Field(max_length=16)] = {}
    failure_rewards: dict[Literal["agent", "limit"], float] = {}
    retry: RetrySettings = RetrySettings()
    quota: Quota = Quota()
    purpose: Literal["training", "evaluation"] = "training"
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    groups: GroupRule = GroupRule()
    staleness: StalenessRule = StalenessRule()
    source: TaskSource | None = None
    filters: Annotated[tuple[FilterRule, ...], Field(max_length=16)] = ()
    delivery: DeliveryRule = DeliveryRule()
    callback: CallbackRule | None = None
    keep_files: Annotated[tuple[Path, ...], Field(max_length=100)] = ()
    metadata: JsonObject = {}

    def reward_for(self, kind: FailureKind) -> float | None:
        """The reward a failure of ``kind`` counts as, or None."""
        return next((reward for name, reward in self.failure_rewards.items() if name == kind.value), None)

    @property
    def policies(self) -> list[str]:
        """Its own, then those of its routes; each once."""
        return list(dict.fromkeys((self.policy, *(route.policy for route in self.routes.values()))))

    def trains(self, route: str) -> bool:
        """Whether calls of a route are trained, as far as it goes by that; "" is the run's own policy."""
        known = self.routes.get(route)
        return not route if known is None else known.train

    def sampling_of(self, route: str) -> SamplingSettings:
        known = self.routes.get(route)
        return self.sampling if known is None or known.sampling is None else known.sampling


class Run(Record):
    """``base_version`` is the policy's when the run was opened or rewound."""

    id: str
    spec: RunSpec
    state: RunState = RunState.OPEN
    created_at: float
    base_version: int = 0


class SourceState(StrEnum):
    RUNNING = "running"
    ENDED = "ended"
    FAILED = "failed"


class SourceStatus(Record):
    """A run's task source. ``position`` counts the tasks taken, over all epochs; ``lines`` are a file's.
    ``detail`` says why it failed, or what was skipped last."""

    state: SourceState
    position: int
    lines: int
    digest: str
    detail: str = ""
