"""ASGI as the gateway uses it: its types, reading a request, and the one answer to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from rollserve.errors import TooLarge, Unavailable

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

BREAK_OFF = "rollserve.break_off"
"""The extension of a scope by which its connection is closed in the middle of an answer."""

_DRAINED_BYTES = 64 << 10
"""A server takes less than that from us before the connection has taken any."""

Headers = Iterable[tuple[bytes, bytes]]


class Gone(Exception):
    """The client has closed its connection; nobody is left to answer."""


def header_map(headers: Headers) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}


async def read_body(
    headers: dict[str, str], receive: Receive, max_bytes: int, body_s: float, take: Callable[[int], None]
) -> bytes:
    """``take`` is told the size of each part, and may refuse it. Raises ``TooLarge``, ``Unavailable`` when it
    does not arrive within ``body_s``, ``Gone``."""
    too_large = TooLarge(f"the body is larger than {max_bytes} bytes", field="body")
    length = headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise too_large
    try:
        async with asyncio.timeout(body_s):
            return await _parts(receive, max_bytes, too_large, take)
    except TimeoutError as error:
        raise Unavailable(f"the body did not arrive within {body_s:g} s", field="body") from error


async def _parts(receive: Receive, max_bytes: int, too_large: TooLarge, take: Callable[[int], None]) -> bytes:
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise too_large
        take(len(part))
        parts.append(part)
        more = message.get("more_body", False)
    return b"".join(parts)


async def disconnected(receive: Receive) -> None:
    """Until the client goes away."""
    while (await receive())["type"] != "http.disconnect":
        continue


class Answering:
    """The answer being sent."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self.started = False

    async def whole(self, status: int, body: bytes, headers: Headers = ()) -> None:
        self.started = True
        head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *headers]
        await self._send({"type": "http.response.start", "status": status, "headers": head})
        await self._last(body)

    async def begin(self, content_type: bytes) -> None:
        self.started = True
        head = [(b"content-type", content_type), (b"cache-control", b"no-cache")]
        await self._send({"type": "http.response.start", "status": 200, "headers": head})

    async def part(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self, body: bytes) -> None:
        await self._last(body)

    async def _last(self, body: bytes) -> None:
        """When it returns, a connection that is still there has taken the body, as far as a server knows."""
        if len(body) > _DRAINED_BYTES:
            await self.part(body)
            body = b""
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def break_off(self) -> None:
        """Close the connection without an end."""
        close = self._scope.get("extensions", {}).get(BREAK_OFF)
        if close is not None:
            close()
            await disconnected(self._receive)


async def lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        elif message["type"] == "lifespan.shutdown":
            await send({"type": "lifespan.shutdown.complete"})
            return
