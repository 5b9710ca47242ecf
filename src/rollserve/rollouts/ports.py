"""What the server's side of the core needs from the outside, handed in by the composition root."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollserve.backend.base import Backend
from rollserve.backend.control import Control
from rollserve.config import Settings
from rollserve.executor.base import Executor
from rollserve.records.call import Call
from rollserve.records.policy import BackendInfo, BackendSpec, PolicySpec, TemplateFinding
from rollserve.records.rollout import Rollout
from rollserve.records.run import RunSpec
from rollserve.records.sample import Sample
from rollserve.records.task import Task
from rollserve.rollouts.clock import Clock, SystemClock
from rollserve.store.base import Store
from rollserve.store.payload import PayloadStore
from rollserve.store.task_lines import TaskLines


class SampleBuilder(Protocol):
    """Turns an attempt's calls into samples; pure, and run in a thread."""

    def __call__(
        self,
        calls: list[Call],
        *,
        rollout: Rollout,
        run: RunSpec,
        call_rewards: dict[str, float],
        every_call: bool = False,
    ) -> list[Sample]: ...


@dataclass(frozen=True, slots=True)
class PostAnswer:
    """``retry_after`` is the header's text."""

    status: int
    retry_after: str | None = None


class Poster(Protocol):
    """Sends messages to addresses that others have named."""

    def check(self, url: str, field: str) -> None:
        """Raises ``InvalidInput`` for a URL that nothing is sent to."""

    async def post(self, url: str, headers: Mapping[str, str], body: bytes, timeout_s: float) -> PostAnswer:
        """One POST; no redirect is followed. Raises ``Unavailable`` when no answer came, ``InvalidInput``
        where the address is not allowed."""


@dataclass(frozen=True, kw_only=True)
class Ports:
    """``check_task(task, field)`` raises ``InvalidInput`` whose field begins with ``field``.
    ``probe_backend(spec, model)`` says what answers at a URL; it raises ``InvalidInput`` (field
    ``url``) or ``BackendError``. ``open_backend(spec, model)`` is a client of one, to be closed.
    ``open_control(spec, shared_with, adapter)`` is what pauses one, to be closed; ``shared_with`` another
    policy that it serves, ``adapter`` the policy's model where that is an adapter.
    ``check_tokenizer(name)`` raises ``InvalidInput`` (field ``tokenizer``) where it can't be loaded; bounded.
    ``probe_template`` never raises for what a policy's template is like; bounded.
    ``open_tasks(path)`` reads a file of tasks; it blocks, and raises ``InvalidInput``.
    ``check_function(path, field)`` is of the user's functions, ``keeps(path, arguments)`` asks a filter,
    ``next_tasks`` a curriculum; both raise whatever went wrong. ``jitter`` is a number in [0, 1)."""

    store: Store
    payloads: PayloadStore
    executor: Executor
    settings: Settings
    check_task: Callable[[Task, str], Awaitable[None]]
    probe_backend: Callable[[BackendSpec, str], Awaitable[BackendInfo]]
    open_backend: Callable[[BackendSpec, str], Backend]
    open_control: Callable[[BackendSpec, str | None, str | None], Control]
    check_tokenizer: Callable[[str], Awaitable[None]]
    probe_template: Callable[[PolicySpec], Awaitable[TemplateFinding]]
    build_samples: SampleBuilder
    open_tasks: Callable[[str], TaskLines]
    check_function: Callable[[str, str], Awaitable[None]]
    keeps: Callable[[str, dict[str, Any]], Awaitable[bool]]
    next_tasks: Callable[[str, dict[str, Any]], Awaitable[list[int | dict[str, Any]] | None]]
    poster: Poster
    clock: Clock = field(default_factory=SystemClock)
    jitter: Callable[[], float] = random.random
