"""Plain ASGI for servers that tests stand up: reading, answering, and serving on a socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, MutableMapping
from contextlib import asynccontextmanager
from typing import Any, Literal

import msgspec

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Scope = MutableMapping[str, Any]

JSON = [(b"content-type", b"application/json")]
SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]


async def read_body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def send_body(
    send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*(headers or JSON), length]})
    await send({"type": "http.response.body", "body": body})


async def answer(send: Send, status: int, body: dict[str, Any]) -> None:
    await send_body(send, status, msgspec.json.encode(body))


async def send_event(send: Send, payload: bytes, *, first: bool) -> None:
    if first:
        await send({"type": "http.response.start", "status": 200, "headers": SSE})
    await send({"type": "http.response.body", "body": b"data: " + payload + b"\n\n", "more_body": True})


@asynccontextmanager
async def served(
    app: Callable[..., Any], *, port: int = 0, lifespan: Literal["on", "off"] = "off"
) -> AsyncIterator[str]:
    """Any ASGI app, under uvicorn on a loopback port; yields its URL."""
    import uvicorn

    listener = socket.create_server(("127.0.0.1", port), backlog=1024)
    config = uvicorn.Config(
        app,
        lifespan=lifespan,
        ws="none",
        access_log=False,
        log_level="critical",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        await _close_late(server.server_state.connections)


async def _close_late(connections: Collection[Any]) -> None:
    """What was accepted while the server was closing: it no longer looks at those."""
    for _ in range(5):
        await asyncio.sleep(0)
    for connection in list(connections):
        connection.transport.close()
    await asyncio.sleep(0)
