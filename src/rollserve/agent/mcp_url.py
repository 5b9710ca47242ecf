"""An MCP server on a port inside a sandbox, spoken to over HTTP from here; no network is needed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rollserve.cancelling import uninterrupted
from rollserve.errors import NotFound, SandboxError
from rollserve.sandbox.base import Program, Sandbox
from rollserve.sandbox.capture import Capture
from rollserve.sandbox.ports import forwarded

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

LOOK_EVERY_S = 0.05
CONNECT_S = 30.0
READ_S = 300.0
"""A server may hold a response open; a call has a bound of its own."""

_LOOPBACK = ("127.0.0.1", "localhost")


def inside_port(url: str) -> int | None:
    """The port of an address that, inside a sandbox, is the sandbox; None for any other."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    if parts.scheme != "http" or parts.hostname not in _LOOPBACK or parts.username is not None:
        return None
    return 80 if port is None else port or None


@asynccontextmanager
async def url_transport(
    sandbox: Sandbox, url: str, command: str | None, errors: Capture, ended: Callable[[], None]
) -> AsyncIterator[TransportStreams]:
    """Start the program, if there is one, wait until its port answers, and speak to it. It is killed on
    leaving; ``ended`` is called when it ends by itself."""
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    port = inside_port(url)
    assert port is not None
    async with AsyncExitStack() as stack:
        if command is not None:
            await _start(sandbox, command, errors, ended, stack)
        await _wait_for(sandbox, port)
        path = await stack.enter_async_context(forwarded(sandbox, port))
        client = httpx2.AsyncClient(
            transport=httpx2.AsyncHTTPTransport(uds=path),
            timeout=httpx2.Timeout(CONNECT_S, read=READ_S),
            trust_env=False,
        )
        await stack.enter_async_context(client)
        yield await stack.enter_async_context(streamable_http_client(url, http_client=client))


async def _start(
    sandbox: Sandbox, command: str, errors: Capture, ended: Callable[[], None], stack: AsyncExitStack
) -> None:
    program = await sandbox.spawn(command, on_errors=errors.feed)

    async def kill() -> None:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await uninterrupted(program.kill())

    watching = asyncio.create_task(_watch(program, errors, ended))
    stack.push_async_callback(kill)


async def _watch(program: Program, errors: Capture, ended: Callable[[], None]) -> None:
    """What it prints is for people: it is kept as its complaints are."""
    try:
        while data := await program.read():
            errors.feed(data)
    except SandboxError:
        pass  # it was ended from here, or with its sandbox
    ended()


async def _wait_for(sandbox: Sandbox, port: int) -> None:
    """As long as its start may take, which whoever waits for it bounds."""
    while True:
        try:
            (await sandbox.connect(port)).close()
        except NotFound:
            await asyncio.sleep(LOOK_EVERY_S)
            continue
        return
