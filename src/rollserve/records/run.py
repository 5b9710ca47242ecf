"""A run: the settings under which groups are rolled out, and the log of finished ones."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from rollserve.errors import FailureKind
from rollserve.records.base import JsonObject, Name, Record


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
    the rollout (``fail``). ``failure_rewards`` maps a failure kind to the reward it counts as; what it
    does not name stays without reward."""

    policy: Name
    name: Name | None = None
    sampling: SamplingSettings = SamplingSettings()
    thinking: Literal["keep", "strip"] = "keep"
    on_inexact: Literal["drop", "text", "fail"] = "drop"
    failure_rewards: dict[Literal["agent", "limit"], float] = {}
    retry: RetrySettings = RetrySettings()
    quota: Quota = Quota()
    metadata: JsonObject = {}

    def reward_for(self, kind: FailureKind) -> float | None:
        """The reward a failure of ``kind`` counts as, or None."""
        return dict(self.failure_rewards).get(kind.value)  # type: ignore[call-overload,no-any-return]


class Run(Record):
    id: str
    spec: RunSpec
    state: RunState = RunState.OPEN
    created_at: float
