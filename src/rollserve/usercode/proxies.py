"""What user code holds inside a host: the model, the tools and the sandbox, each a proxy that asks the
worker. They have the same methods as what they stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollserve.agent.base import Reply
from rollserve.records.call import Message
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
    ) -> Reply:
        chat = params.Chat(messages=tuple(messages), tools=tuple(tools), max_tokens=max_tokens)
        return await self._channel.ask_async("chat", chat, Reply)


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
        order = params.Exec(command, timeout_s, output_limit_bytes)
        return await self._channel.ask_async("sandbox.exec", order, ExecResult)

    async def read_file(self, path: str, *, limit_bytes: int = 16 << 20) -> bytes:
        return await self._channel.ask_async("sandbox.read_file", params.ReadFile(path, limit_bytes), bytes)

    async def write_file(self, path: str, data: bytes) -> None:
        await self._channel.ask_async("sandbox.write_file", params.WriteFile(path, data), type(None))

    async def close(self) -> None:
        raise PermissionError("the sandbox is the attempt's: it is closed by its owner")


class BlockingSandbox:
    """The sandbox, for plain functions: the same methods, which return when done."""

    def __init__(self, channel: Channel, sandbox_id: str) -> None:
        self._channel = channel
        self.id = sandbox_id

    def exec(self, command: str, *, timeout_s: float = 60.0, output_limit_bytes: int = 65536) -> ExecResult:
        order = params.Exec(command, timeout_s, output_limit_bytes)
        return self._channel.ask("sandbox.exec", order, ExecResult)

    def read_file(self, path: str, *, limit_bytes: int = 16 << 20) -> bytes:
        return self._channel.ask("sandbox.read_file", params.ReadFile(path, limit_bytes), bytes)

    def write_file(self, path: str, data: bytes) -> None:
        self._channel.ask("sandbox.write_file", params.WriteFile(path, data), type(None))
