"""MCP servers of a task as tools: the one door to the ``mcp`` package (extra ``mcp``).

A server is a program in the task's sandbox, spoken to over its stdin and stdout, or over one of its ports.
Its session lives in a task of its own, since the package wants it entered and left by the same one. What
a server says is a stranger's: sizes are bounded, and its faults are errors the model reads. A server that
ended is started anew by the next call, a few times.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from rollserve import installing
from rollserve.agent.mcp_url import inside_port, url_transport
from rollserve.cancelling import uninterrupted
from rollserve.errors import InfrastructureFailure, InvalidInput, RollserveError, SandboxError
from rollserve.records.task import McpServer
from rollserve.sandbox.base import Program, Sandbox
from rollserve.sandbox.capture import Capture
from rollserve.sandbox.tools.base import (
    Attachment,
    Tool,
    ToolResult,
    function_schema,
    still_there,
    wrong,
)
from rollserve.usercode.base import LogLine

if TYPE_CHECKING:
    import mcp_types
    from mcp import ClientSession
    from mcp.client._transport import TransportStreams

    Transport: TypeAlias = AbstractAsyncContextManager[TransportStreams]

MAX_MESSAGE_BYTES = 16 << 20
MAX_TOOLS = 128
MAX_SCHEMA_BYTES = 64 << 10
MAX_PAGES = 16
MAX_STARTS = 4
STOP_S = 5.0
ERROR_BYTES = 4096
NAME_CHARS = 64
_NO_NAME = re.compile(r"[^A-Za-z0-9_-]")


def check_servers(servers: Mapping[str, McpServer], *, field: str = "mcp_servers") -> None:
    """Raises ``InvalidInput`` at ``<field>.<name>.<part>``; starts nothing."""
    if servers and find_spec("mcp") is None:
        raise InvalidInput(
            "the package mcp is not installed",
            field=field,
            hint=f"{installing.extra('mcp')}, for the server and its workers",
        )
    for name, server in servers.items():
        where = f"{field}.{name}"
        if server.url is None and not server.command:
            raise InvalidInput("give a command or a url", field=where)
        if server.env and not server.command:
            raise InvalidInput("env is for a command", field=f"{where}.env")
        if server.url is not None and inside_port(server.url) is None:
            raise InvalidInput(
                "is no http address of the sandbox itself (http://127.0.0.1:PORT/…)",
                field=f"{where}.url",
                hint="what is elsewhere a program in the sandbox can reach, through the task's network",
            )
        if server.command and not server.command[0]:
            raise InvalidInput("is empty", field=f"{where}.command.0")


class ServerGone(Exception):
    """It ended, or does not speak the protocol."""


class McpConnection:
    """One server. ``command_s`` is the most a call may take."""

    def __init__(
        self, name: str, server: McpServer, sandbox: Sandbox | None, *, command_s: float, log: LogLine
    ) -> None:
        self.name = name
        self._server = server
        self._sandbox = sandbox
        self._command_s = command_s
        self._log = log
        self._errors = Capture(ERROR_BYTES)
        self._starts = 0
        self._session: ClientSession | None = None
        self._serving: asyncio.Task[None] | None = None
        self._leave = asyncio.Event()
        self._starting = asyncio.Lock()

    async def start(self) -> list[mcp_types.Tool]:
        """Its tools. Raises ``InfrastructureFailure`` when it does not come up."""
        await asyncio.to_thread(_load, self._server)
        try:
            return await self._start()
        except ServerGone as error:
            raise InfrastructureFailure(
                f"the MCP server {self.name!r} does not start: {error}{self._said()}", operation="mcp.start"
            ) from None

    async def _start(self) -> list[mcp_types.Tool]:
        self._starts += 1
        self._errors = Capture(ERROR_BYTES)
        self._leave = asyncio.Event()
        ready: asyncio.Future[list[mcp_types.Tool]] = asyncio.get_running_loop().create_future()
        self._serving = asyncio.create_task(self._serve(ready))
        try:
            async with asyncio.timeout(self._server.start_s):
                either: set[asyncio.Future[Any]] = {ready, self._serving}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            await self.close()
            raise ServerGone(f"no answer in {self._server.start_s:g} s") from None
        except BaseException:
            await uninterrupted(self.close())
            raise
        if not ready.done():
            await self.close()
            raise ServerGone("it ended")
        return ready.result()

    async def _serve(self, ready: asyncio.Future[list[mcp_types.Tool]]) -> None:
        from mcp import ClientSession

        try:
            async with self._transport() as (read, write), ClientSession(read, write) as session:
                await session.initialize()
                tools = await _list_tools(session)
                self._session = session
                ready.set_result(tools)
                await self._leave.wait()
        except (
            Exception,
            BaseExceptionGroup,
        ) as error:  # the package raises many, in groups: all mean that it is over
            self._log(f"MCP server {self.name}: {type(error).__name__}: {error}"[:1000])
        finally:
            self._session = None

    def _transport(self) -> Transport:
        assert self._sandbox is not None
        command = _command(self._server) if self._server.command else None
        if self._server.url is not None:
            return url_transport(self._sandbox, self._server.url, command, self._errors, self._ended)
        assert command is not None
        return _program_transport(self._sandbox, command, self._errors, self._ended)

    def _ended(self) -> None:
        self._leave.set()

    async def call(self, tool: str, arguments: dict[str, Any]) -> ToolResult:
        import mcp_types
        from mcp import MCPError
        from pydantic import ValidationError

        try:
            session = await self._speaking()
            request = mcp_types.CallToolRequest(
                params=mcp_types.CallToolRequestParams(name=tool, arguments=arguments)
            )
            result = await session.send_request(
                request, mcp_types.CallToolResult, request_read_timeout_seconds=self._command_s
            )
        except MCPError as error:
            return await self._failed(error)
        except (ServerGone, RuntimeError, ValidationError) as error:
            await self._look_after_sandbox()
            return wrong(f"the MCP server {self.name!r}: {error}{self._said()}"[:4000])
        return _told(result)

    async def _speaking(self) -> ClientSession:
        """The session; a server that ended is started anew."""
        async with self._starting:
            if self._session is None or self._leave.is_set():
                await self.close()
                if self._starts >= MAX_STARTS:
                    raise ServerGone(f"it ended, and has been started {self._starts} times")
                await self._start()
            if self._session is None:
                raise ServerGone("it ended")
            return self._session

    async def _failed(self, error: Exception) -> ToolResult:
        from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        code = getattr(error, "code", None)
        if code == REQUEST_TIMEOUT:
            return wrong(f"no answer of the MCP server {self.name!r} in {self._command_s:g} s")
        if code == CONNECTION_CLOSED or self._leave.is_set():
            await self._look_after_sandbox()
            said = self._said()
            return wrong(f"the MCP server {self.name!r} ended; the next call starts it anew{said}")
        return wrong(str(error)[:4000])

    async def _look_after_sandbox(self) -> None:
        if self._sandbox is not None:
            await still_there(self._sandbox)

    def _said(self) -> str:
        text = self._errors.text().strip()
        return f"\n{text}" if text else ""

    async def close(self) -> None:
        serving, self._serving = self._serving, None
        if serving is None:
            return
        self._leave.set()
        await asyncio.wait({serving}, timeout=STOP_S)
        serving.cancel()
        await asyncio.wait({serving}, timeout=STOP_S)


def _load(server: McpServer) -> None:
    """The package takes a second to import: off the loop."""
    import_module("mcp")
    if server.url is not None:
        import_module("mcp.client.streamable_http")


def _command(server: McpServer) -> str:
    variables = "".join(f"export {name}={shlex.quote(value)};" for name, value in server.env.items())
    return f"{variables} exec {shlex.join(server.command)}"


async def _list_tools(session: ClientSession) -> list[mcp_types.Tool]:
    import mcp_types

    tools: list[mcp_types.Tool] = []
    cursor = None
    for _ in range(MAX_PAGES):
        page = await session.list_tools(params=mcp_types.PaginatedRequestParams(cursor=cursor))
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None or len(tools) > MAX_TOOLS:
            break
    return tools[:MAX_TOOLS]


class McpTool:
    """One tool of a server."""

    def __init__(self, name: str, tool: mcp_types.Tool, connection: McpConnection) -> None:
        self._tool = tool.name
        self._connection = connection
        self.schema = function_schema(name, tool.description or "", tool.input_schema)

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        return await self._connection.call(self._tool, arguments)

    async def close(self) -> None:
        """The server has an owner of its own."""


async def start_server(
    connection: McpConnection, wanted: Sequence[str] | None, log: LogLine
) -> dict[str, Tool]:
    """The tools of a server by the names the model uses. Raises ``InfrastructureFailure`` when it does
    not start, or lacks a tool that is wanted."""
    offered = {tool.name: tool for tool in await connection.start()}
    for name in wanted or ():
        if name not in offered:
            message = f"the MCP server {connection.name!r} has no tool {name!r}, only {sorted(offered)}"
            raise InfrastructureFailure(message[:2000], operation="mcp.start")
    found: dict[str, Tool] = {}
    for name, tool in offered.items():
        if wanted is not None and name not in wanted:
            continue
        if len(msgspec.json.encode(tool.input_schema)) > MAX_SCHEMA_BYTES:
            log(f"MCP server {connection.name}: the schema of {name[:64]!r} is too big; it is left out")
            continue
        short = _short(f"{connection.name}__{name}", found)
        found[short] = McpTool(short, tool, connection)
    return found


def _short(name: str, taken: Mapping[str, object]) -> str:
    """``name`` as models may write it: no other signs, no more than 64, no name twice."""
    plain = _NO_NAME.sub("_", name)
    if len(plain) <= NAME_CHARS and plain not in taken:
        return plain
    return f"{plain[: NAME_CHARS - 9]}_{sha256(name.encode()).hexdigest()[:8]}"


def _told(result: mcp_types.CallToolResult) -> ToolResult:
    parts: list[str] = []
    attachments: list[Attachment] = []
    for block in result.content:
        match block.type:
            case "text":
                parts.append(block.text)
            case "image" | "audio":
                attachments.append(Attachment(media_type=block.mime_type, base64=block.data))
                parts.append(f"[{block.mime_type} attached]")
            case _:
                parts.append(block.model_dump_json(exclude_none=True, by_alias=True))
    if not parts and result.structured_content is not None:
        parts.append(msgspec.json.encode(result.structured_content).decode())
    text = "\n".join(parts)
    return ToolResult(text=text, is_error=bool(result.is_error), attachments=tuple(attachments))


# -- a program of a sandbox as a transport ------------------------------------------------------


@asynccontextmanager
async def _program_transport(
    sandbox: Sandbox, command: str, errors: Capture, ended: Any
) -> AsyncIterator[TransportStreams]:
    """Lines of JSON over the program's stdin and stdout; it is killed on leaving."""
    import anyio

    program = await sandbox.spawn(command, on_errors=errors.feed)
    try:
        to_session, from_server = anyio.create_memory_object_stream[Any](0)
        to_server, from_session = anyio.create_memory_object_stream[Any](0)
        async with anyio.create_task_group() as group, to_session, from_server, to_server, from_session:
            group.start_soon(_read_lines, program, to_session, ended)
            group.start_soon(_write_lines, program, from_session)
            try:
                yield from_server, to_server
            finally:
                group.cancel_scope.cancel()
    finally:
        await uninterrupted(program.kill())


async def _read_lines(program: Program, to_session: Any, ended: Any) -> None:
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter

    buffer = bytearray()
    async with to_session:
        while data := await _read(program):
            buffer += data
            while (end := buffer.find(b"\n")) >= 0:
                line = bytes(buffer[:end]).strip()
                del buffer[: end + 1]
                if not line:
                    continue
                try:
                    message = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
                except ValueError:  # servers print what they should not: it is no message
                    continue
                await to_session.send(message)
            if len(buffer) > MAX_MESSAGE_BYTES:
                break
        ended()


async def _read(program: Program) -> bytes:
    try:
        return await program.read()
    except SandboxError:
        return b""


async def _write_lines(program: Program, from_session: Any) -> None:
    async with from_session:
        async for each in from_session:
            text = each.message.model_dump_json(by_alias=True, exclude_unset=True)
            try:
                await program.write(text.encode() + b"\n")
            except RollserveError:  # it ended, which its reader tells
                return
