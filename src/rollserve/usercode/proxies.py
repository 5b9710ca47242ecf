"""What user code holds inside a host: the model, the tools and the sandbox, each a proxy that asks the
worker. They have the same methods as what they stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollserve.agent.base import Reply
from rollserve.records.call import Message
from rollserve.records.image import Image
from rollserve.sandbox.base import ExecResult
from rollserve.sandbox.tools import ToolResult
from rollserve.usercode import params
from rollserve.usercode.child import Channel


class HostedModel:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        model: str | None = None,
    ) -> Reply:
        chat = params.Chat(messages=tuple(messages), tools=tuple(tools), max_tokens=max_tokens, model=model)
        return await self._channel.ask_async("chat", chat, Reply)

    async def show(
        self, data: bytes | str, media_type: str = "image/png", *, model: str | None = None
    ) -> Image | None:
        order = params.Show.of(data, media_type, model)
        return (await self._channel.ask_async("show", order, params.Shown)).image


class BlockingModel:
    """The model, for plain functions."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        model: str | None = None,
    ) -> Reply:
        chat = params.Chat(messages=tuple(messages), tools=tuple(tools), max_tokens=max_tokens, model=model)
        return self._channel.ask("chat", chat, Reply)

    def show(
        self, data: bytes | str, media_type: str = "image/png", *, model: str | None = None
    ) -> Image | None:
        order = params.Show.of(data, media_type, model)
        return self._channel.ask("show", order, params.Shown).image


class HostedToolbox:
    def __init__(self, channel: Channel, schemas: Sequence[Mapping[str, Any]]) -> None:
        self._channel = channel
        self.schemas = schemas

    async def call(self, name: str, arguments: str) -> ToolResult:
        return await self._channel.ask_async("tool", params.ToolCall(name, arguments), ToolResult)


class HostedSandbox:
    """The sandbox, for coroutines."""

    def __init__(self, channel: Channel, sandbox_id: str) -> None:
        self._channel = channel
        self.id = sandbox_id

    async def exec(
        self, command: str, *, timeout_s: float = 60.0, output_limit_bytes: int = 65536
    ) -> ExecResult:
        order = params.Exec(self.id, command, timeout_s, output_limit_bytes)
        return await self._channel.ask_async("sandbox.exec", order, ExecResult)

    async def read_file(self, path: str, *, limit_bytes: int = 16 << 20) -> bytes:
        return await self._channel.ask_async(
            "sandbox.read_file", params.ReadFile(self.id, path, limit_bytes), bytes
        )

    async def write_file(self, path: str, data: bytes) -> None:
        await self._channel.ask_async("sandbox.write_file", params.WriteFile(self.id, path, data), type(None))

    async def close(self) -> None:
        raise PermissionError("the sandbox is the attempt's: it is closed by its owner")


class AgentsSandbox(HostedSandbox):
    """An agent's own, or one that it forked."""

    async def snapshot(self) -> str:
        """Its files as they are now, to ``fork`` from: see ``Sandbox.snapshot``."""
        return await self._channel.ask_async("sandbox.snapshot", params.OfSandbox(self.id), str)

    async def fork(self, snapshot: str | None = None) -> AgentsSandbox:
        """Another sandbox with the files of ``snapshot`` (of now, without it) and the task's bounds. It ends
        with the agent's run, or when it is closed."""
        order = params.Fork(await self.snapshot() if snapshot is None else snapshot)
        return AgentsSandbox(self._channel, await self._channel.ask_async("sandbox.fork", order, str))

    async def forward(self, port: int, *, tcp: bool = False) -> str:
        """An address on this machine that leads to a TCP port of the sandbox, until the agent's run ends: the
        path of a Unix socket, for this user alone, or ``127.0.0.1:PORT`` for all on this machine."""
        order = params.ForwardPort(self.id, port, tcp)
        return await self._channel.ask_async("sandbox.forward", order, str)

    async def close(self) -> None:
        """Of a fork; the agent's own is closed by its owner."""
        await self._channel.ask_async("sandbox.close", params.OfSandbox(self.id), type(None))


class BlockingSandbox:
    """The sandbox, for plain functions: the same methods, which return when done."""

    def __init__(self, channel: Channel, sandbox_id: str) -> None:
        self._channel = channel
        self.id = sandbox_id

    def exec(self, command: str, *, timeout_s: float = 60.0, output_limit_bytes: int = 65536) -> ExecResult:
        order = params.Exec(self.id, command, timeout_s, output_limit_bytes)
        return self._channel.ask("sandbox.exec", order, ExecResult)

    def read_file(self, path: str, *, limit_bytes: int = 16 << 20) -> bytes:
        return self._channel.ask("sandbox.read_file", params.ReadFile(self.id, path, limit_bytes), bytes)

    def write_file(self, path: str, data: bytes) -> None:
        self._channel.ask("sandbox.write_file", params.WriteFile(self.id, path, data), type(None))
