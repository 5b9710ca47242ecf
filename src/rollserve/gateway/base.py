"""What the rest of a worker sees of the gateway."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from rollserve.agent.base import ModelClient
from rollserve.errors import InfrastructureFailure, LimitReached
from rollserve.executor.base import PolicyView
from rollserve.records.call import Message
from rollserve.records.run import RunSpec, RunStage
from rollserve.records.task import Limits
from rollserve.store.payload import Segment


class ActiveClock(Protocol):
    """Charges active time. Time spent inside ``pause()`` (queues, pauses, gateway waits) is not
    charged; pauses may nest and overlap."""

    def pause(self) -> AbstractContextManager[None]: ...
    def refundable(self) -> Callable[[], None]:
        """Call what is returned to take back all that was charged since: the time was lost through a
        fault that is not the agent's. What overlaps with other refunds is taken back once."""


class Ending(StrEnum):
    """Why a session is over, as its agent may know it."""

    ENDED = "its attempt has ended"
    CANCELLED = "its attempt was cancelled"
    STOPPING = "the worker is stopping"


@dataclass(frozen=True, kw_only=True)
class SessionSpec:
    """In the stage ``grade`` only the routes that graders may ask are there, and not the run's own policy."""

    attempt_id: str
    rollout_id: str
    run: RunSpec
    limits: Limits
    segment: Segment
    clock: ActiveClock
    on_call: Callable[[], None] | None = None
    stage: RunStage = "run"


class Session(Protocol):
    """What a running agent holds: a secret and an address, valid for one attempt. ``counts``,
    ``call_ids``, ``trouble`` and ``conversation`` can still be read after ``close``."""

    @property
    def id(self) -> str: ...
    @property
    def secret(self) -> str: ...
    @property
    def base_url(self) -> str:
        """The session's own: another session's secret is refused there."""

    @property
    def model(self) -> ModelClient: ...
    @property
    def counts(self) -> dict[str, int]:
        """``turns``, ``sampled_tokens``, ``prompt_tokens`` (new ones), ``breaks``, and, of what may be
        trained, ``inexact`` and ``rewritten``: requests in which something came back otherwise than it was.
        """

    @property
    def call_ids(self) -> list[str]: ...
    @property
    def trouble(self) -> LimitReached | InfrastructureFailure | None:
        """What its newest call ended with, where that was no fault of the agent's; None when it was
        served. An agent that speaks HTTP hears of it as an error of its client, and may crash on it."""

    def conversation(self) -> list[Message]:
        """Root to the newest call of the run's own policy, model turns included."""

    async def stalled(self) -> InfrastructureFailure | None:
        """Asked when the agent's time is used up and before it is stopped: was it a backend that used
        it? The failure that names the backend, when a call that is out has met one that is not well or
        does nothing; None when the time was the agent's. Takes about ten seconds at most."""

    async def close(self, ending: Ending = Ending.ENDED) -> None:
        """Abort what is being generated, wait until it has stopped, refuse later calls with
        ``SessionClosed``, which says the ``ending``. Idempotent; the first ending stays."""


class Gateway(Protocol):
    def update_policy(self, view: PolicyView) -> None: ...
    async def open_session(self, spec: SessionSpec) -> Session:
        """Raises ``InfrastructureFailure`` when the policy is unknown or its tokenizer can't be
        loaded here."""

    def stats(self) -> dict[str, Any]: ...
    async def close(self) -> None: ...
