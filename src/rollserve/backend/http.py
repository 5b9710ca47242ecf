"""The one door to the aiohttp client.

No cap on connections (a pool of 100 is where peers stalled), a bounded time to connect, a bounded total
for control calls and none for generations: those are bounded by the budgets of the attempt. A host that
vanished without closing its sockets is noticed by TCP keep-alive within about a minute.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import yarl

from rollserve.addresses import root_of
from rollserve.errors import BackendError, BackendUnavailable, InvalidInput
from rollserve.turns import Turns

IDLE_CONNECTION_S = 4.0
"""Below the 5 s after which uvicorn (vLLM, SGLang) closes an idle connection: a request must not meet a
socket that the server is just closing."""

MAX_ANSWER_BYTES = 512 << 20
"""Of a whole answer (a million tokens with logprobs and a few extras), and of one event of a stream."""

MAX_METRICS_BYTES = 4 << 20
MAX_MODELS_BYTES = 4 << 20
"""Of the list: an engine with many adapters has an entry for each."""

MAX_SAID_BYTES = 1 << 20
"""Of what else a server says of itself (health, version). Asked every few seconds, of whatever answers."""

_DATA = b"data: "

LAST_BYTES_S = 1.0
"""How long the end of a stream may take after its last event."""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """``control_s`` bounds a whole control call (models, health, abort)."""

    connect_s: float = 10.0
    control_s: float = 10.0
    abort_s: float = 3.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole HTTP answer. ``retry_after_s`` is the header's, in seconds, if there was one."""

    status: int
    content_type: str
    body: bytes
    retry_after_s: float | None = None


class Http:
    """A client of one server. ``base_url`` is its root. Raises ``InvalidInput`` (field ``url``) for what
    is no HTTP address; every call raises ``BackendUnavailable`` when the server can't be reached or
    breaks off, ``BackendError`` when what answers does not speak HTTP or says too much."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeouts: Timeouts | None = None,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        self.url = root_of(base_url)
        self._max_answer_bytes = max_answer_bytes
        self.timeouts = timeouts or Timeouts()
        self._headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._routes: dict[str, yarl.URL] = {}
        self._session: aiohttp.ClientSession | None = None
        self._turns = Turns()
        self._closed = False

    async def get(self, path: str, *, max_bytes: int = MAX_SAID_BYTES) -> Answer:
        """For what is short. Raises ``BackendError`` for more than ``max_bytes``."""
        return await self._bounded("GET", path, None, self.timeouts.control_s, max_bytes)

    async def control(self, path: str, body: bytes, *, timeout_s: float | None = None) -> Answer:
        """POST with a bound on the whole call."""
        return await self._bounded("POST", path, body, timeout_s or self.timeouts.control_s, None)

    async def post(self, path: str, body: bytes) -> Answer:
        """POST without a bound on the whole call: for generations. Answers that arrive together are
        handed on in turns."""
        async with self._request("POST", path, body) as response:
            answer = await self._read(response, path)
        await self._turns.take()
        return answer

    @asynccontextmanager
    async def stream(self, path: str, body: bytes) -> AsyncIterator[Answer | AsyncIterator[list[bytes]]]:
        """POST; yields the payloads of the server-sent events as they come, those that come together as
        one list, or the whole answer when it is not a stream (an error). Leaving early closes the
        connection."""
        async with self._request("POST", path, body) as response:
            if response.status != 200 or response.content_type != "text/event-stream":
                yield await self._read(response, path)
                return
            async with aclosing(self._events(response, path)) as events:
                yield events

    async def close(self) -> None:
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _bounded(
        self, method: str, path: str, body: bytes | None, timeout_s: float, max_bytes: int | None
    ) -> Answer:
        try:
            async with asyncio.timeout(timeout_s), self._request(method, path, body) as response:
                return await self._read(response, path, max_bytes)
        except TimeoutError as error:
            message = f"{self.url}{path} did not answer within {timeout_s:g} s"
            raise BackendUnavailable(message, operation=path) from error

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: bytes | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        url = self._routes.get(path) or self._routes.setdefault(path, yarl.URL(self.url + path))
        with self._ours(path):
            response = await self._open().request(method, url, data=body, headers=self._headers)
        async with response:
            yield response

    async def _read(
        self, response: aiohttp.ClientResponse, path: str, max_bytes: int | None = None
    ) -> Answer:
        body = bytearray()
        with self._ours(path):
            async for chunk in response.content.iter_any():
                body += chunk
                self._check_size(len(body), path, max_bytes or self._max_answer_bytes)
        header = response.headers.get("Retry-After")
        retry_after_s = None if header is None else parse_retry_after(header, time.time())
        return Answer(response.status, response.content_type, bytes(body), retry_after_s)

    def _check_size(self, size: int, path: str, max_bytes: int) -> None:
        if size > max_bytes:
            message = f"{self.url}{path} sent more than {max_bytes} bytes"
            raise BackendError(message, operation=path)

    async def _events(self, response: aiohttp.ClientResponse, path: str) -> AsyncGenerator[list[bytes]]:
        """Payloads of the ``data:`` lines, however the chunks are cut; ends at ``[DONE]``."""
        lines = Lines()
        with self._ours(path):
            async for chunk in response.content.iter_any():
                payloads = None if lines.waiting else whole_events(chunk)
                if payloads is None:
                    payloads = [line[5:].strip() for line in lines.feed(chunk) if line.startswith(b"data:")]
                ended = b"[DONE]" in payloads
                if ended:
                    del payloads[payloads.index(b"[DONE]") :]
                if found := [payload for payload in payloads if payload]:
                    yield found
                if ended:
                    await _read_end(response)
                    return
                self._check_size(lines.waiting, path, self._max_answer_bytes)

    @contextmanager
    def _ours(self, path: str) -> Iterator[None]:
        """The one place where aiohttp's errors become ours."""
        try:
            yield
        except aiohttp.ClientResponseError as error:
            message = f"what answers at {self.url} does not speak HTTP: {error.message}"
            raise BackendError(message, operation=path) from error
        except aiohttp.InvalidURL as error:
            raise InvalidInput(f"not a usable address: {self.url}", field="url") from error
        except aiohttp.ServerTimeoutError as error:
            message = f"{self.url} could not be reached within {self.timeouts.connect_s:g} s"
            raise BackendUnavailable(message, operation=path) from error
        except (aiohttp.ClientError, OSError) as error:
            message = f"{self.url}: {_reason(error)}"
            raise BackendUnavailable(message, operation=path) from error

    def _open(self) -> aiohttp.ClientSession:
        if self._closed:
            raise BackendUnavailable(f"the client of {self.url} is closed", operation="connect")
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=0,
                keepalive_timeout=IDLE_CONNECTION_S,
                ttl_dns_cache=60,
                socket_factory=_socket,
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.timeouts.connect_s),
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("User-Agent", "Accept-Encoding"),
                trust_env=False,
                read_bufsize=2**20,
            )
        return self._session


async def _read_end(response: aiohttp.ClientResponse) -> None:
    """Read what follows the last event, so that the connection can be used again; a server that does
    not end its answer loses the connection instead."""
    try:
        async with asyncio.timeout(LAST_BYTES_S):
            async for _ in response.content.iter_any():
                continue
    except (TimeoutError, aiohttp.ClientError):
        response.close()


def whole_events(chunk: bytes) -> list[bytes] | None:
    """The payloads of a chunk that is nothing but whole events of one line each, as servers of tokens send
    them; None for any other."""
    if not (chunk.startswith(_DATA) and chunk.endswith(b"\n\n")) or b"\r" in chunk:
        return None
    payloads = chunk[len(_DATA) : -2].split(b"\n\n" + _DATA)
    payloads[-1] = payloads[-1].strip()
    return payloads if chunk.count(b"\n") == 2 * len(payloads) else None


class Lines:
    """Cuts a byte stream into lines; LF and CRLF; a partial line waits for its rest, ``waiting`` bytes
    of it so far."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.waiting = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        head, newline, rest = chunk.partition(b"\n")
        if not newline:
            self._parts.append(chunk)
            self.waiting += len(chunk)
            return []
        self._parts.append(head)
        *lines, tail = [b"".join(self._parts), *rest.split(b"\n")]
        self._parts = [tail] if tail else []
        self.waiting = len(tail)
        if b"\r" not in rest and b"\r" not in lines[0]:
            return lines
        return [line.removesuffix(b"\r") for line in lines]


def parse_retry_after(header: str, now_s: float) -> float | None:
    """Seconds from ``Retry-After``: a number, or an HTTP date; None for anything else."""
    text = header.strip()
    if text.replace(".", "", 1).isdecimal():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - now_s)
    except ValueError:
        return None


def _socket(info: tuple[Any, Any, int, str, tuple[Any, ...]]) -> socket.socket:
    family, kind, protocol, _, _ = info
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        option = getattr(socket, name, None)
        if option is not None:
            made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


def _reason(error: Exception) -> str:
    """What happened, in a few words: the errors of aiohttp often have no text of their own."""
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "the server closed the connection without an answer"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the connection broke off in the middle of the answer"
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    return getattr(cause, "strerror", None) or str(cause) or type(error).__name__
