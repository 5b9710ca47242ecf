"""A task's tools: built-in ones by name, and Python functions of the user's in a code host.

All functions of an attempt share one host: what a module remembers between calls it remembers for
that attempt alone. A call that runs into ``command_s`` or kills its host costs the attempt that
memory, not the attempt: the next call gets a new host.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import Any

import msgspec

from rollserve.errors import EpisodeFailure, InvalidInput, RollserveError, UnknownName
from rollserve.records.task import Task
from rollserve.sandbox.base import Sandbox
from rollserve.sandbox.tools import (
    BUILT_IN_TOOLS,
    SANDBOX_TOOLS,
    EchoTool,
    ShellTool,
    SubmitTool,
    Tool,
    ToolResult,
    function_schema,
)
from rollserve.usercode import params
from rollserve.usercode.base import CodeFault, CodeHost, CodeHosts, CodeInfo, LogLine, Pause, Role, Use
from rollserve.usercode.options import nearest
from rollserve.usercode.serving import sandbox_handlers

MAX_ARGUMENT_CHARS = 4 << 20
MAX_ARGUMENT_DEPTH = 64
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
            return _wrong(f"there is no tool {name[:200]!r}; {nearest(name[:200], self._tools)}")
        decoded = decode_arguments(arguments)
        if isinstance(decoded, str):
            return _wrong(decoded)
        return await tool.call(decoded)


def _wrong(text: str) -> ToolResult:
    return ToolResult(text=f"error: {text}", is_error=True)


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
    if _depth(decoded) > MAX_ARGUMENT_DEPTH:
        return "the arguments are nested too deeply"
    return decoded


def _depth(value: object) -> int:
    """How deep lists and objects are nested, looked at no further than the bound."""
    level, depth = [value], 0
    while level and depth <= MAX_ARGUMENT_DEPTH:
        depth += 1
        children: list[object] = []
        for node in level:
            if isinstance(node, dict):
                children.extend(node.values())
            elif isinstance(node, list):
                children.extend(node)
        level = children
    return depth


class FunctionsHost:
    """The host of an attempt's functions, opened with the first call; one call at a time."""

    def __init__(self, hosts: CodeHosts, sandbox: Sandbox | None, log: LogLine, pause: Pause) -> None:
        self._hosts = hosts
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
            opening = self._hosts.open(Use.LEAF, handlers=handlers, log=self._log, pause=self._pause)
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

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        try:
            return await self._host.run(self._path, arguments, timeout_s=self._timeout_s)
        except EpisodeFailure:
            raise
        except RollserveError as error:  # CodeFault, or InvalidInput for arguments that don't fit
            return _wrong(str(error))


def tool_schema(info: CodeInfo) -> dict[str, Any]:
    return function_schema(info.name, info.description, info.parameters)


class ToolCatalog:
    """Resolves the names in a task's ``tools``."""

    def __init__(self, hosts: CodeHosts) -> None:
        self._hosts = hosts

    async def check(self, names: Sequence[str], *, field: str = "tools") -> None:
        """Raises ``InvalidInput`` at ``<field>.<index>``. Import paths are looked at once."""
        await self._resolve(names, field)

    async def needs_sandbox(self, names: Sequence[str]) -> bool:
        """Whether any of these tools acts in the task's sandbox."""
        resolved = await self._resolve(names, "tools")
        return any(
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
        """The task's toolbox; the process of its functions, if one was needed, is gone on leaving."""
        resolved = await self._resolve(task.tools, "tools")
        host = FunctionsHost(self._hosts, sandbox, log, pause)
        tools: dict[str, Tool] = {}
        code: dict[str, str] = {}
        for index, (short, (name, info)) in enumerate(resolved.items()):
            if info is not None:
                tools[short] = FunctionTool(info, host, task.limits.command_s)
                code[info.path] = info.version
            elif name in SANDBOX_TOOLS and sandbox is None:
                raise InvalidInput(f"{name!r} needs a sandbox", field=f"tools.{index}")
            else:
                tools[short] = _BUILDERS[name](sandbox, task.limits.command_s)
        try:
            yield BuiltToolbox(tools, code)
        finally:
            await host.close()

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


_BUILDERS: Mapping[str, Callable[[Any, float], Tool]] = {
    "shell": ShellTool,
    "submit": lambda sandbox, command_s: SubmitTool(),
    "echo": lambda sandbox, command_s: EchoTool(),
}
