"""What the worker's side of the core needs from the outside, handed in by the composition root."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from rollserve.agent.base import AgentEntry, Toolbox
from rollserve.gateway.base import Gateway, Session
from rollserve.grader.base import GraderEntry
from rollserve.records.network import Network
from rollserve.records.rollout import Stage
from rollserve.records.task import AgentSpec, GraderSpec, Task
from rollserve.rollouts.clock import Clock, SystemClock
from rollserve.sandbox.base import Runtime, Sandbox
from rollserve.store.payload import PayloadStore


class AgentCatalog(Protocol):
    async def resolve(self, spec: AgentSpec) -> AgentEntry:
        """Raises ``UnknownName``, or ``ConfigError`` when user code can't be loaded."""


class GraderCatalog(Protocol):
    async def resolve(self, spec: GraderSpec) -> GraderEntry:
        """Raises ``UnknownName``, or ``ConfigError`` when user code can't be loaded."""


class OpenToolbox(Protocol):
    def __call__(
        self,
        task: Task,
        sandbox: Sandbox,
        *,
        log: Callable[[str], None],
        pause: Callable[[], AbstractContextManager[None]],
    ) -> AbstractAsyncContextManager[Toolbox]:
        """The task's tools over its sandbox; leaving stops whatever they run in. A toolbox with an
        attribute ``code`` (versions by import path) has it recorded with the attempt."""


class ServeSession(Protocol):
    def __call__(self, session: Session, sock: socket.socket) -> AbstractAsyncContextManager[str]:
        """Serve a session, and no other, on a socket that listens inside its sandbox; what is entered is
        its base URL there. Leaving ends its connections and closes the socket."""


@dataclass(frozen=True, kw_only=True)
class SessionAddress:
    """Where sandboxes elsewhere reach this worker's sessions: ``url`` without a path; ``authority`` (PEM) is
    what they are to trust there beside what they do anyway."""

    url: str
    authority: bytes = b""


class OpenNetwork(Protocol):
    def __call__(
        self, network: Network, sock: socket.socket, *, log: Callable[[str], None]
    ) -> AbstractAsyncContextManager[Mapping[str, str]]:
        """Let a sandbox out as far as ``network`` says, on a socket that listens inside it; what is entered
        is the environment that its programs need for it. Leaving ends its connections and closes the
        socket. Each destination and what became of it goes to the log."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How much an attempt may leave behind, how long each of its releases may take, and how long the
    question whose fault it was that its time ran out; how many sandboxes its agent may fork."""

    artifact_bytes: int = 16 << 20
    artifacts_bytes: int = 64 << 20
    carry_bytes: int = 256 << 20
    log_bytes: int = 4 << 20
    line_chars: int = 16_384
    detail_bytes: int = 64 << 10
    collect_s: float = 60.0
    close_s: float = 15.0
    seal_s: float = 60.0
    ttl_margin_s: float = 60.0
    judge_s: float = 12.0
    forks: int = 32


@dataclass(frozen=True, kw_only=True)
class WorkerPorts:
    """``runtimes`` by name; ``default_runtime`` is used where a task names none. ``session_addresses`` are of
    those whose sandboxes reach their session over a network; the others get a socket inside."""

    runtimes: Mapping[str, Runtime]
    default_runtime: str
    gateway: Gateway
    payloads: PayloadStore
    agents: AgentCatalog
    graders: GraderCatalog
    open_toolbox: OpenToolbox
    serve_session: ServeSession
    open_network: OpenNetwork
    session_addresses: Mapping[str, SessionAddress] = field(default_factory=dict)
    clock: Clock = field(default_factory=SystemClock)
    bounds: Bounds = field(default_factory=Bounds)


@dataclass(frozen=True, kw_only=True)
class Keeper:
    """Somebody who wants to look into the run sandbox when the agent is done: ``take`` hands it over, to be
    closed by them; it lives for ``seconds`` longer than the attempt may."""

    take: Callable[[Sandbox], None]
    seconds: float


class AttemptObserver(Protocol):
    """Whom an attempt tells what happens to it; nothing here can fail or block it."""

    def stage_changed(self, attempt_id: str, stage: Stage) -> None: ...
    def count(self, counter: str, by: float = 1) -> None: ...
    def close_later(self, sandboxes: Sequence[Sandbox], closed: Callable[[], None]) -> None:
        """Take over sandboxes that would not close: tried again until they do, then ``closed`` is called."""
