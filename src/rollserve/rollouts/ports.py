"""What the server's side of the core needs from the outside, handed in by the composition root."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from rollserve.config import Settings
from rollserve.executor.base import Executor
from rollserve.records.call import Call
from rollserve.records.policy import BackendInfo, BackendSpec
from rollserve.records.rollout import Rollout
from rollserve.records.run import RunSpec
from rollserve.records.sample import Sample
from rollserve.records.task import Task
from rollserve.rollouts.clock import Clock, SystemClock
from rollserve.store.base import PayloadStore, Store


class SampleBuilder(Protocol):
    """Turns an attempt's calls into samples; pure, and run in a thread."""

    def __call__(
        self, calls: list[Call], *, rollout: Rollout, run: RunSpec, call_rewards: dict[str, float]
    ) -> list[Sample]: ...


@dataclass(frozen=True, kw_only=True)
class Ports:
    """``check_task(task, field)`` raises ``InvalidInput`` whose field begins with ``field``.
    ``probe_backend(spec, model)`` says what answers at a URL; it raises ``InvalidInput`` (field
    ``url``) or ``BackendError``. ``jitter`` is a number in [0, 1)."""

    store: Store
    payloads: PayloadStore
    executor: Executor
    settings: Settings
    check_task: Callable[[Task, str], Awaitable[None]]
    probe_backend: Callable[[BackendSpec, str], Awaitable[BackendInfo]]
    build_samples: SampleBuilder
    clock: Clock = field(default_factory=SystemClock)
    jitter: Callable[[], float] = random.random
