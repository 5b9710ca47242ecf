"""In-memory ports of a worker: runtime, gateway, payloads, catalogs. Each journals what is done to it,
and can be told to be slow, to hang or to fail at any point."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rollserve.agent.base import AgentEntry, AgentResult, Episode, Reply
from rollserve.errors import (
    InfrastructureFailure,
    InvalidInput,
    LimitReached,
    NotFound,
    SandboxError,
    SessionClosed,
    TooLarge,
    UnknownName,
)
from rollserve.executor.base import PolicyView
from rollserve.gateway.base import Ending, Session, SessionSpec
from rollserve.grader.base import Grade, GraderEntry, Grading
from rollserve.records.call import Call, Message
from rollserve.records.network import Network
from rollserve.records.task import AgentSpec, GraderSpec, Task
from rollserve.rollouts.clock import Clock
from rollserve.rollouts.worker_ports import Bounds, WorkerPorts
from rollserve.sandbox.base import Console, ExecResult, Program, RuntimeReport, Sandbox, SandboxSpec
from rollserve.sandbox.tools import ToolResult
from rollserve.store.base import AttemptPayload, EndState, SealedPayload

Hook = Callable[[], Awaitable[None]]
"""Awaited where a fake would do its work: sleep, hang or raise there."""


class Journal:
    """What happened, in order, over all fakes of one worker."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    def __call__(self, entry: str) -> None:
        self.entries.append(entry)

    def index(self, entry: str) -> int:
        return self.entries.index(entry)


async def _nothing() -> None:
    return


@dataclass
class Hooks:
    """By point; see where each is awaited."""

    create: Hook = _nothing
    adopt: Hook = _nothing
    open_session: Hook = _nothing
    open_tools: Hook = _nothing
    close_tools: Hook = _nothing
    chat: Hook = _nothing
    stalled: Hook = _nothing
    close_session: Hook = _nothing
    listen: Hook = _nothing
    open_network: Hook = _nothing
    close_sandbox: Hook = _nothing
    seal: Hook = _nothing


class FakeSandbox:
    """Files in memory. ``exec`` knows how files are carried, and answers all else with nothing."""

    def __init__(self, runtime: FakeRuntime, number: int, spec: SandboxSpec, owner: str) -> None:
        self._runtime = runtime
        self.id = f"{owner}-{number}"
        self.spec = spec
        self.owner = owner
        self.files = {**runtime.snapshots.get(spec.snapshot, {}), **spec.files}
        self.closed = False
        self.commands: list[str] = []

    async def exec(
        self, command: str, *, timeout_s: float = 60.0, output_limit_bytes: int = 65536
    ) -> ExecResult:
        self._check_open()
        self.commands.append(command)
        if "tar -tf" in command:
            carried = msgspec.msgpack.decode(self.files.pop(_archive_in(command)), type=dict[str, bytes])
            self.files |= carried
        elif "tar -cf" in command:
            archive = _archive_in(command)
            self.files[archive] = msgspec.msgpack.encode(self.files)
        return ExecResult(output="", exit_code=0)

    async def run(self, command: str, *, timeout_s: float, on_output: Callable[[bytes], None]) -> int | None:
        return (await self.exec(command, timeout_s=timeout_s)).exit_code

    async def spawn(self, command: str, *, on_errors: Callable[[bytes], None]) -> Program:
        raise SandboxError("a fake runs no programs", operation="sandbox.spawn")

    async def open_console(self) -> Console:
        raise SandboxError("a fake runs no programs", operation="sandbox.spawn")

    async def listen(self) -> socket.socket:
        self._check_open()
        await self._runtime.hooks.listen()
        return socket.create_server(("127.0.0.1", 0))

    async def connect(self, port: int) -> socket.socket:
        raise SandboxError("a fake has no ports", operation="sandbox.connect")

    async def snapshot(self) -> str:
        self._check_open()
        name = f"snapshot-{len(self._runtime.snapshots)}"
        self._runtime.snapshots[name] = dict(self.files)
        return name

    async def read_file(self, path: str, *, limit_bytes: int = 16 << 20) -> bytes:
        self._check_open()
        if path not in self.files:
            raise SandboxError(f"no such file: {path}", operation="read_file")
        if len(self.files[path]) > limit_bytes:
            raise TooLarge(f"{path} is over {limit_bytes} bytes")
        return self.files[path]

    async def write_file(self, path: str, data: bytes) -> None:
        self._check_open()
        self.files[path] = data

    async def adopt(self, spec: SandboxSpec, *, ttl_s: float) -> None:
        self._check_open()
        await self._runtime.hooks.adopt()
        self.spec, self.files = spec, dict(spec.files)

    async def close(self) -> None:
        await self._runtime.hooks.close_sandbox()
        if not self.closed:
            self.closed = True
            self._runtime.open.discard(self)
            self._runtime.journal(f"sandbox.closed {self.id}")

    def _check_open(self) -> None:
        if self.closed:
            raise SandboxError("the sandbox is gone", operation="sandbox")


def _archive_in(command: str) -> str:
    return next(word for word in command.split() if word.endswith(".tar"))


class FakeRuntime:
    def __init__(self, hooks: Hooks, journal: Journal, name: str = "fake") -> None:
        self.name = name
        self.hooks = hooks
        self.journal = journal
        self.open: set[FakeSandbox] = set()
        self.made: list[FakeSandbox] = []
        self.most_open = 0
        self.reaps = 0
        self.snapshots: dict[str, dict[str, bytes]] = {}
        self.enforces: tuple[str, ...] = ()
        self._by_owner: Counter[str] = Counter()

    def report(self) -> RuntimeReport:
        return RuntimeReport(name=self.name, usable=True, isolated=False, enforces=self.enforces)

    def check_image(self, image: str) -> None:
        if image == "missing":
            raise InvalidInput("no such image: missing", field="image")

    async def create(self, spec: SandboxSpec, *, owner: str, ttl_s: float) -> FakeSandbox:
        self.check_image(spec.image)
        await self.hooks.create()
        self._by_owner[owner] += 1
        sandbox = FakeSandbox(self, self._by_owner[owner], spec, owner)
        self.open.add(sandbox)
        self.made.append(sandbox)
        self.most_open = max(self.most_open, len(self.open))
        self.journal(f"sandbox.created {sandbox.id}")
        return sandbox

    async def create_spare(self, spec: SandboxSpec, *, ttl_s: float) -> FakeSandbox:
        return await self.create(spec, owner="spare", ttl_s=ttl_s)

    async def reap(self) -> int:
        self.reaps += 1
        return 0

    async def close(self) -> None:
        for sandbox in list(self.open):
            await sandbox.close()


class FakeModel:
    """Answers every chat with ``ok``."""

    def __init__(self, session: FakeSession) -> None:
        self._session = session

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        model: str | None = None,
    ) -> Reply:
        return await self._session.generate(list(messages))


class FakeSession:
    def __init__(self, gateway: FakeGateway, spec: SessionSpec) -> None:
        self._gateway = gateway
        self.spec = spec
        self.id = f"session-{spec.attempt_id}"
        self.secret = f"secret-{spec.attempt_id}"
        self.base_url = "http://fake"
        self.counts = dict.fromkeys(("turns", "sampled_tokens", "prompt_tokens", "breaks", "inexact"), 0)
        self.call_ids: list[str] = []
        self.trouble: LimitReached | InfrastructureFailure | None = None
        self.stall: InfrastructureFailure | None = None
        self.ending: Ending | None = None
        self.closed = False
        self._messages: list[Message] = []

    @property
    def model(self) -> FakeModel:
        return FakeModel(self)

    def conversation(self) -> list[Message]:
        return list(self._messages)

    async def generate(self, messages: list[Message]) -> Reply:
        if self.closed:
            raise SessionClosed("the attempt has ended")
        self._gateway.generating.add(self.id)
        try:
            await self._gateway.hooks.chat()
        except InfrastructureFailure as error:
            self.trouble = error
            raise
        finally:
            self._gateway.generating.discard(self.id)
        self.counts["turns"] += 1
        self._gateway.calls += 1
        self.counts["sampled_tokens"] += 3
        self.call_ids.append(f"call-{len(self.call_ids)}")
        answer = Message(role="assistant", content="ok")
        self._messages = [*messages, answer]
        return Reply(
            call_id=self.call_ids[-1], message=answer, finish_reason="stop", prompt_tokens=5, sampled_tokens=3
        )

    async def stalled(self) -> InfrastructureFailure | None:
        await self._gateway.hooks.stalled()
        return self.stall

    async def close(self, ending: Ending = Ending.ENDED) -> None:
        await self._gateway.hooks.close_session()
        if not self.closed:
            self.closed = True
            self.ending = ending
            self._gateway.open.discard(self.id)
            self._gateway.journal(f"session.closed {self.spec.attempt_id}")


class FakeGateway:
    def __init__(self, hooks: Hooks, journal: Journal) -> None:
        self.hooks = hooks
        self.journal = journal
        self.views: list[PolicyView] = []
        self.open: set[str] = set()
        self.generating: set[str] = set()
        self.sessions: list[FakeSession] = []
        self.calls = 0

    def update_policy(self, view: PolicyView) -> None:
        self.views.append(view)

    async def open_session(self, spec: SessionSpec) -> FakeSession:
        await self.hooks.open_session()
        session = FakeSession(self, spec)
        self.open.add(session.id)
        self.sessions.append(session)
        return session

    def stats(self) -> dict[str, Any]:
        newest = {view.policy().spec.name: view.revision for view in self.views}
        return {
            "calls": self.calls,
            "policy_revisions": sum(newest.values()),
            "sessions": len(self.open),
            "backends": {"b1": {"in_flight": 0}},
        }

    async def close(self) -> None:
        return


class FakeSegment:
    def __init__(self, payloads: FakePayloads, ref: str) -> None:
        self._payloads = payloads
        self._ref = ref
        self.payload = AttemptPayload()

    def append_call(self, call: Call) -> None:
        self.payload.calls.append(call)

    def append_log(self, line: str) -> None:
        if self._payloads.log_error is not None:
            raise self._payloads.log_error
        self.payload.log.append((0.0, line))

    def append_artifact(self, path: str, data: bytes) -> None:
        self.payload.artifacts[path] = data

    def append_call_rewards(self, rewards: dict[str, float]) -> None:
        self.payload.call_rewards |= rewards

    def append_end(self, end: EndState) -> None:
        self.payload.end = end

    async def seal(self) -> SealedPayload:
        await self._payloads.hooks.seal()
        del self._payloads.live[self._ref]
        self._payloads.sealed[self._ref] = self.payload
        return SealedPayload(ref=self._ref, size_bytes=1)

    def leave(self) -> None:
        self._payloads.left[self._ref] = self._payloads.live.pop(self._ref)

    def discard(self) -> None:
        self._payloads.live.pop(self._ref, None)


class FakePayloads:
    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks
        self.live: dict[str, AttemptPayload] = {}
        self.left: dict[str, AttemptPayload] = {}
        self.sealed: dict[str, AttemptPayload] = {}
        self.open_error: Exception | None = None
        self.log_error: OSError | None = None

    def open_segment(self, run_id: str, attempt_id: str) -> FakeSegment:
        if self.open_error is not None:
            raise self.open_error
        segment = FakeSegment(self, f"{run_id}/{attempt_id}")
        self.live[f"{run_id}/{attempt_id}"] = segment.payload
        return segment

    async def read(self, ref: str) -> AttemptPayload:
        if ref not in self.sealed:
            raise NotFound(f"no payload {ref}")
        return self.sealed[ref]

    async def read_live(self, run_id: str, attempt_id: str) -> AttemptPayload:
        return self.live.get(f"{run_id}/{attempt_id}", AttemptPayload())

    async def salvage(self, run_id: str, attempt_id: str) -> SealedPayload | None:
        ref = f"{run_id}/{attempt_id}"
        if ref in self.live:
            self.sealed[ref] = self.live.pop(ref)
        return SealedPayload(ref=ref, size_bytes=1) if ref in self.sealed else None

    async def delete(self, refs: Sequence[str]) -> None:
        for ref in refs:
            self.sealed.pop(ref, None)

    async def sweep(self, known: set[str]) -> int:
        return 0


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
        self.payloads = FakePayloads(self.hooks)
        self.agents = FakeAgents()
        self.graders = FakeGraders()
        self.open_toolboxes = 0
        self.routes = 0
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
        self.routes += 1
        with sock:
            try:
                yield f"http://inside/s/{session.id}/v1"
            finally:
                self.routes -= 1
                self.journal("route.closed")

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
        return held + ["toolbox"] * self.open_toolboxes + ["route"] * self.routes


async def hang() -> None:
    """A hook that never returns."""
    await asyncio.Event().wait()
