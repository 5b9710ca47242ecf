"""Stand-ins for what an agent and a grader are given: a scripted model, a sandbox in memory."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from rollserve.agent.base import Episode, ModelClient, Reply, Toolbox
from rollserve.errors import SandboxError, TooLarge
from rollserve.grader.base import Grading
from rollserve.records.call import Message, ToolCall
from rollserve.records.image import Image, digest_of
from rollserve.records.task import GraderSpec, Task
from rollserve.sandbox.base import WORKDIR, Console, ExecResult, Program, Sandbox

Turn = Message | Reply | Exception
"""What a scripted model does when it is asked: say something, or raise."""


def says(content: str = "", *calls: tuple[str, str], finish_reason: str | None = None) -> Reply:
    """A reply with tool calls given as (name, arguments)."""
    made = tuple(
        ToolCall(id=f"call_{index}", name=name, arguments=text) for index, (name, text) in enumerate(calls)
    )
    message = Message(role="assistant", content=content, tool_calls=made)
    reason = finish_reason or ("tool_calls" if made else "stop")
    return Reply(call_id="", message=message, finish_reason=reason, prompt_tokens=10, sampled_tokens=5)


class ScriptedModel:
    """A ``ModelClient`` that takes its turns from a list; ``asked`` keeps what it was sent. After the
    last turn it waits for ever (until it is cancelled: ``cancelled`` counts), and sets ``waiting``. One that
    ``sees`` takes images, and keeps what it was shown in ``shown``."""

    def __init__(self, *turns: Turn, sees: bool = False) -> None:
        self._turns = list(turns)
        self.sees = sees
        self.shown: list[bytes | str] = []
        self.asked: list[tuple[Message, ...]] = []
        self.offered: list[tuple[Mapping[str, Any], ...]] = []
        self.models: list[str | None] = []
        self.waiting = asyncio.Event()
        self.cancelled = 0

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        model: str | None = None,
    ) -> Reply:
        self.asked.append(tuple(messages))
        self.offered.append(tuple(tools))
        self.models.append(model)
        if not self._turns:
            await self._for_ever()
        turn = self._turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        reply = turn if isinstance(turn, Reply) else says(turn.content)
        return msgspec.structs.replace(reply, call_id=f"c{len(self.asked)}")

    async def show(
        self, data: bytes | str, media_type: str = "image/png", *, model: str | None = None
    ) -> Image | None:
        self.shown.append(data)
        self.models.append(model)
        if not self.sees:
            return None
        given = data.encode() if isinstance(data, str) else data
        url = data if isinstance(data, str) and data.startswith("http") else None
        return Image(digest=digest_of(given), media_type=media_type, size_bytes=len(given), url=url)

    async def _for_ever(self) -> None:
        self.waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled += 1


class FakeSandbox:
    """A ``Sandbox`` whose files are a dictionary and whose shell is a function of the command. After
    ``close`` it is gone: every use raises ``SandboxError``."""

    def __init__(
        self,
        shell: Callable[[str], ExecResult] | None = None,
        *,
        files: Mapping[str, bytes] | None = None,
        sandbox_id: str = "sandbox_fake",
    ) -> None:
        self.id = sandbox_id
        self.files = dict(files or {})
        self.commands: list[tuple[str, float]] = []
        self.gone = False
        self._shell = shell or (lambda command: ExecResult(output="", exit_code=0))

    async def exec(
        self, command: str, *, timeout_s: float = 60.0, output_limit_bytes: int = 65536
    ) -> ExecResult:
        self._check()
        self.commands.append((command, timeout_s))
        return self._shell(command)

    async def run(self, command: str, *, timeout_s: float, on_output: Callable[[bytes], None]) -> int | None:
        result = await self.exec(command, timeout_s=timeout_s)
        on_output(result.output.encode())
        return result.exit_code

    async def spawn(self, command: str, *, on_errors: Callable[[bytes], None]) -> Program:
        raise SandboxError("a fake runs no programs", operation="sandbox.spawn")

    async def open_console(self) -> Console:
        raise SandboxError("a fake runs no programs", operation="sandbox.spawn")

    async def listen(self) -> socket.socket:
        self._check()
        return socket.create_server(("127.0.0.1", 0))

    async def connect(self, port: int) -> socket.socket:
        raise SandboxError("a fake has no ports", operation="sandbox.connect")

    async def snapshot(self) -> str:
        raise SandboxError("a fake is not kept", operation="sandbox.snapshot")

    async def read_file(self, path: str, *, limit_bytes: int = 16 << 20) -> bytes:
        self._check()
        data = self.files.get(_absolute(path))
        if data is None:
            raise SandboxError(f"no such file: {path}", operation="sandbox.read_file")
        if len(data) > limit_bytes:
            raise TooLarge(f"{path} has {len(data)} bytes")
        return data

    async def write_file(self, path: str, data: bytes) -> None:
        self._check()
        self.files[_absolute(path)] = data

    async def close(self) -> None:
        self.gone = True

    def _check(self) -> None:
        if self.gone:
            raise SandboxError("the sandbox is gone", operation="sandbox")


def _absolute(path: str) -> str:
    return path if path.startswith("/") else f"{WORKDIR}/{path}"


def some_task(**fields: Any) -> Task:
    """A task with the required fields filled in."""
    given = {"instruction": "do it", "grader": GraderSpec(name="exact", options={"answer": "42"})}
    return Task.model_validate({**given, **fields})


def some_episode(
    model: ScriptedModel, tools: Toolbox, *, task: Task | None = None, log: list[str] | None = None
) -> Episode:
    """``log`` collects the lines."""
    lines = [] if log is None else log
    return Episode(task=task or some_task(), tools=tools, model=model, log=lines.append)


def some_grading(
    answer: str | None = "42",
    *,
    sandbox: Sandbox | None = None,
    call_ids: Sequence[str] = ("c1", "c2"),
    log: list[str] | None = None,
    model: ModelClient | None = None,
) -> Grading:
    conversation = (
        Message(role="user", content="do it"),
        Message(role="assistant", content=answer or ""),
    )
    return Grading(
        task=some_task(),
        answer=answer,
        conversation=conversation,
        call_ids=tuple(call_ids),
        log=([] if log is None else log).append,
        sandbox=sandbox,
        model=model,
    )
