"""A task's tools: built-in ones by name, and Python functions of the user's in a code host.

All functions of an attempt share one host: what a module remembers between calls it remembers for
that attempt alone. A call that runs into ``command_s`` or kills its host costs the attempt that
memory, not the attempt: the next call gets a new host.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import Any

import msgspec

from rollserve.agent.mcp_servers import McpConnection, check_servers, start_server
from rollserve.errors import EpisodeFailure, InvalidInput, RollserveError, UnknownName
from rollserve.records.base import deeper_than
from rollserve.records.task import Task
from rollserve.sandbox.base import Sandbox
from rollserve.sandbox.tools.base import Tool, ToolResult, function_schema, wrong
from rollserve.sandbox.tools.registry import BUILT_IN_TOOLS, OTHER_TOOLS, SANDBOX_TOOLS
from rollserve.usercode import params
from rollserve.usercode.base import CodeFault, CodeHost, CodeHosts, CodeInfo, LogLine, Pause, Role, Use
from rollserve.usercode.schema import faults, lenient, name_hint
from rollserve.usercode.serving import sandbox_handlers

MAX_ARGUMENT_CHARS = 4 << 20
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class BuiltToolbox:
    """Tools by the name the model uses. ``code`` holds the versions of user code by import path."""

    def __init__(self, tools: Mapping[str, Tool], code: Mapping[str, str]) -> None:
        self._tools = tools
        self.schemas: Sequence[Mapping[str, Any]] = [tool.schema for tool in tools.values()]
        self.code = dict(code)

    async def call(self, name: str, arguments: str) -> ToolResult:
        tool = self._tools.get(name)
        if tool is None:
            return wrong(f"there is no tool {name[:200]!r}; {name_hint(name[:200], self._tools)}")
        decoded = decode_arguments(arguments)
        if isinstance(decoded, str):
            return wrong(decoded)
        schema = tool.schema["function"].get("parameters", {})
        decoded = lenient(schema, decoded)
        if found := faults(schema, decoded):
            listed = "; ".join(str(fault) for fault in found)
            return wrong(f"the arguments do not fit: {listed}")
        return await tool.call(decoded)


def decode_arguments(arguments: str) -> dict[str, Any] | str:
    """The arguments a model wrote, or what is wrong with them. No text can crash it."""
    if len(arguments) > MAX_ARGUMENT_CHARS:
        return f"the arguments are longer than {MAX_ARGUMENT_CHARS} characters"
    try:
        decoded = msgspec.json.decode(arguments.strip() or "{}")
    except (msgspec.DecodeError, UnicodeError) as error:
        return f"the arguments are not valid JSON: {error}"
    except RecursionError:
        return "the arguments are nested too deeply"
    if not isinstance(decoded, dict):
        return f"the arguments must be a JSON object, not {type(decoded).__name__}"
    if deeper_than(decoded):
        return "the arguments are nested too deeply"
    return decoded


class FunctionsHost:
    """The host of an attempt's functions ``code``, opened with the first call; one call at a time."""

    def __init__(
        self,
        hosts: CodeHosts,
        code: Sequence[CodeInfo],
        sandbox: Sandbox | None,
        log: LogLine,
        pause: Pause,
    ) -> None:
        self._hosts = hosts
        self._code = code
        self._sandbox = sandbox
        self._log = log
        self._pause = pause
        self._lock = asyncio.Lock()
        self._stack = AsyncExitStack()
        self._host: CodeHost | None = None

    async def run(self, path: str, arguments: dict[str, Any], *, timeout_s: float) -> ToolResult:
        order = params.RunTool(
            path=path,
            arguments_json=msgspec.json.encode(arguments),
            sandbox_id=None if self._sandbox is None else self._sandbox.id,
        )
        async with self._lock:
            host = await self._running()
            try:
                return await host.call("tool", order, ToolResult, timeout_s=timeout_s)
            except CodeFault as fault:
                self._log(f"tool {path}: {fault.report}")
                raise

    async def _running(self) -> CodeHost:
        if self._host is None or not self._host.alive:
            await self._stack.aclose()
            handlers = {} if self._sandbox is None else sandbox_handlers(self._sandbox)
            opening = self._hosts.open(
                Use.LEAF, handlers=handlers, log=self._log, pause=self._pause, code=self._code
            )
            self._host = await self._stack.enter_async_context(opening)
        return self._host

    async def close(self) -> None:
        await self._stack.aclose()


class FunctionTool:
    """One Python function. What it raises is an error the model reads; the traceback is logged."""

    def __init__(self, info: CodeInfo, host: FunctionsHost, timeout_s: float) -> None:
        self._path = info.path
        self._host = host
        self._timeout_s = timeout_s
        self.schema = tool_schema(info)

    async def close(self) -> None:
        """The functions of an attempt share a host, which has an owner."""

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        try:
            return await self._host.run(self._path, arguments, timeout_s=self._timeout_s)
        except EpisodeFailure:
            raise
        except RollserveError as error:  # CodeFault, or InvalidInput for arguments that don't fit
            return wrong(str(error))


def tool_schema(info: CodeInfo) -> dict[str, Any]:
    return function_schema(info.name, info.description, info.parameters)


class ToolCatalog:
    """Resolves the names in a task's ``tools``, and its ``mcp_servers``."""

    def __init__(self, hosts: CodeHosts) -> None:
        self._hosts = hosts

    async def check(self, task: Task) -> None:
        """Raises ``InvalidInput`` at ``tools.<index>`` or ``mcp_servers.<name>``. Import paths are looked
        at once."""
        await self._resolve(task.tools, "tools")
        check_servers(task.mcp_servers)

    async def needs_sandbox(self, task: Task) -> bool:
        """Whether any of its tools acts in the task's sandbox."""
        resolved = await self._resolve(task.tools, "tools")
        return bool(task.mcp_servers) or any(
            name in SANDBOX_TOOLS if info is None else info.wants_sandbox for name, info in resolved.values()
        )

    @asynccontextmanager
    async def open(
        self,
        task: Task,
        sandbox: Sandbox | None,
        *,
        log: LogLine = lambda line: None,
        pause: Pause = nullcontext,
    ) -> AsyncIterator[BuiltToolbox]:
        """The task's toolbox; whatever its tools run in is gone on leaving."""
        resolved = await self._resolve(task.tools, "tools")
        tools: dict[str, Tool] = {}
        code: dict[str, str] = {}
        async with AsyncExitStack() as stack:
            functions = [info for _, info in resolved.values() if info is not None]
            host = FunctionsHost(self._hosts, functions, sandbox, log, pause)
            stack.push_async_callback(host.close)
            for index, (short, (name, info)) in enumerate(resolved.items()):
                if info is not None:
                    tools[short] = FunctionTool(info, host, task.limits.command_s)
                    code[info.path] = info.version
                else:
                    tools[short] = _built_in(name, sandbox, task.limits.command_s, field=f"tools.{index}")
                stack.push_async_callback(tools[short].close)
            for name, tool in (await _open_servers(task, sandbox, stack, log)).items():
                if name in tools:
                    raise InvalidInput(f"two tools are called {name!r}", field="mcp_servers")
                tools[name] = tool
            yield BuiltToolbox(tools, code)

    async def _resolve(self, names: Sequence[str], field: str) -> dict[str, tuple[str, CodeInfo | None]]:
        """By the name the model will use: the task's name for it, and what is known of a function."""
        resolved: dict[str, tuple[str, CodeInfo | None]] = {}
        for index, name in enumerate(names):
            where = f"{field}.{index}"
            info: CodeInfo | None = None
            if ":" in name:
                info = await self._hosts.describe(name, Role.TOOL, field=where)
            elif name not in BUILT_IN_TOOLS:
                raise UnknownName("tool", name, BUILT_IN_TOOLS, field=where)
            short = name if info is None else info.name
            if not _NAME.fullmatch(short):
                raise InvalidInput(f"{short!r} can't be a tool's name", field=where, hint=_NAME.pattern)
            if short in resolved:
                raise InvalidInput(f"two tools are called {short!r}", field=where)
            resolved[short] = (name, info)
        return resolved


def _built_in(name: str, sandbox: Sandbox | None, command_s: float, *, field: str) -> Tool:
    if name in OTHER_TOOLS:
        return OTHER_TOOLS[name]()
    if sandbox is None:
        raise InvalidInput(f"{name!r} needs a sandbox", field=field)
    return SANDBOX_TOOLS[name](sandbox, command_s)


async def _open_servers(
    task: Task, sandbox: Sandbox | None, stack: AsyncExitStack, log: LogLine
) -> dict[str, Tool]:
    """Start the task's MCP servers, all at once."""
    connections = [
        McpConnection(name, server, sandbox, command_s=task.limits.command_s, log=log)
        for name, server in task.mcp_servers.items()
    ]
    for connection in connections:
        stack.push_async_callback(connection.close)
    try:
        async with asyncio.TaskGroup() as group:
            starting = [
                group.create_task(start_server(connection, task.mcp_servers[connection.name].tools, log))
                for connection in connections
            ]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return {name: tool for each in starting for name, tool in each.result().items()}
