"""In-memory ports of a worker: runtime, gateway, payloads, agents, graders. Each journals what is done to
it, and can be told to be slow, to hang or to fail at any point."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rollserve.agent.base import AgentEntry, AgentResult, Episode
from rollserve.errors import (
    UnknownName,
)
from rollserve.gateway.base import Session
from rollserve.grader.base import Grade, GraderEntry, Grading
from rollserve.records.call import Message
from rollserve.records.network import Network
from rollserve.records.task import AgentSpec, GraderSpec, Task
from rollserve.rollouts.clock import Clock
from rollserve.rollouts.worker_ports import Bounds, WorkerPorts
from rollserve.sandbox.base import Sandbox
from rollserve.sandbox.tools import ToolResult
from rollserve.testing.fake_payloads import FakePayloads
from rollserve.testing.fakes_gateway import FakeGateway
from rollserve.testing.fakes_sandbox import FakeRuntime
from rollserve.testing.journal import Hooks, Journal

Play = Callable[[Episode], Awaitable[AgentResult]]
Judge = Callable[[Grading], Awaitable[Grade]]


class FakeAgent:
    def __init__(self, play: Play) -> None:
        self._play = play

    async def run(self, episode: Episode) -> AgentResult:
        return await self._play(episode)


class FakeGrader:
    def __init__(self, judge: Judge, carry: tuple[str, ...] | None) -> None:
        self._judge = judge
        self.carry = carry

    async def grade(self, grading: Grading) -> Grade:
        return await self._judge(grading)


async def one_turn(episode: Episode) -> AgentResult:
    reply = await episode.model.chat([Message(role="user", content=episode.task.instruction)])
    return AgentResult(answer=reply.message.content)


async def full_marks(grading: Grading) -> Grade:
    return Grade(reward=1.0 if grading.answer == "ok" else 0.0)


class FakeAgents:
    """The name of a task's agent chooses the play; ``mounts`` is what all of them want to see."""

    def __init__(self) -> None:
        self.mounts: dict[str, str] = {}
        self.plays: dict[str, Play] = {"tool": one_turn}

    async def resolve(self, spec: AgentSpec) -> AgentEntry:
        if spec.name not in self.plays:
            raise UnknownName("agent", spec.name, self.plays, field="task.agent.name")
        play = self.plays[spec.name]
        return AgentEntry(
            name=spec.name,
            make=lambda _: FakeAgent(play),
            check=lambda _: None,
            mounts=lambda _: self.mounts,
            code={"agent": "1"},
        )


class FakeGraders:
    """The name of a task's grader chooses the judge; ``carry`` is what all of them ask for."""

    def __init__(self) -> None:
        self.judges: dict[str, Judge] = {"exact": full_marks}
        self.carry: tuple[str, ...] | None = None

    async def resolve(self, spec: GraderSpec) -> GraderEntry:
        if spec.name not in self.judges:
            raise UnknownName("grader", spec.name, self.judges, field="task.grader.name")
        judge = self.judges[spec.name]
        return GraderEntry(
            name=spec.name,
            make=lambda _: FakeGrader(judge, self.carry),
            check=lambda _: None,
            code={"grader": "2"},
        )


class FakeToolbox:
    """No tools but ``write``: ``{"path", "text"}`` into the sandbox."""

    schemas: Sequence[Mapping[str, Any]] = ()

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def call(self, name: str, arguments: str) -> ToolResult:
        if name != "write":
            return ToolResult(text=f"error: no tool {name!r}", is_error=True)
        written = msgspec.json.decode(arguments, type=dict[str, str])
        await self._sandbox.write_file(written["path"], written["text"].encode())
        return ToolResult(text="written")


@dataclass
class FakePorts:
    """All fakes of one worker; ``ports`` is what the worker gets."""

    clock: Clock
    hooks: Hooks = field(default_factory=Hooks)
    journal: Journal = field(default_factory=Journal)
    bounds: Bounds = field(default_factory=Bounds)

    def __post_init__(self) -> None:
        self.runtime = FakeRuntime(self.hooks, self.journal)
        self.gateway = FakeGateway(self.hooks, self.journal)
        self.payloads = FakePayloads()
        self.agents = FakeAgents()
        self.graders = FakeGraders()
        self.open_toolboxes = 0
        self.session_sockets = 0
        self.networks: list[Network] = []
        self.opened_networks: list[Network] = []
        self.ports = WorkerPorts(
            runtimes={"fake": self.runtime},
            default_runtime="fake",
            gateway=self.gateway,
            payloads=self.payloads,
            agents=self.agents,
            graders=self.graders,
            open_toolbox=self.open_toolbox,
            serve_session=self.serve_session,
            open_network=self.open_network,
            clock=self.clock,
            bounds=self.bounds,
        )

    @asynccontextmanager
    async def serve_session(self, session: Session, sock: socket.socket) -> AsyncIterator[str]:
        self.session_sockets += 1
        with sock:
            try:
                yield f"http://inside/s/{session.id}/v1"
            finally:
                self.session_sockets -= 1
                self.journal("session_socket.closed")

    @asynccontextmanager
    async def open_network(
        self, network: Network, sock: socket.socket, *, log: Callable[[str], None]
    ) -> AsyncIterator[Mapping[str, str]]:
        with sock:
            await self.hooks.open_network()
            self.networks.append(network)
            self.opened_networks.append(network)
            try:
                yield {"HTTP_PROXY": "http://inside"}
            finally:
                self.networks.remove(network)
                self.journal("network.closed")

    @asynccontextmanager
    async def open_toolbox(
        self,
        task: Task,
        sandbox: Sandbox,
        *,
        log: Callable[[str], None],
        pause: Callable[[], AbstractContextManager[None]],
    ) -> AsyncIterator[FakeToolbox]:
        await self.hooks.open_tools()
        self.open_toolboxes += 1
        try:
            yield FakeToolbox(sandbox)
        finally:
            await self.hooks.close_tools()
            self.open_toolboxes -= 1
            self.journal("tools.closed")

    @property
    def leftovers(self) -> list[str]:
        """What is still held: empty after every attempt has ended."""
        held = [f"sandbox {sandbox.id}" for sandbox in self.runtime.open]
        held += [f"session {name}" for name in self.gateway.open]
        held += [f"generation {name}" for name in self.gateway.generating]
        held += [f"segment {ref}" for ref in self.payloads.live]
        held += ["network" for _ in self.networks]
        return held + ["toolbox"] * self.open_toolboxes + ["session socket"] * self.session_sockets


async def hang() -> None:
    """A hook that never returns."""
    await asyncio.Event().wait()
