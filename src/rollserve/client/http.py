"""One HTTP conversation with a server: typed errors, and retries that can do no harm.

A request is tried again only where a second one has the same effect as the first: reads, and writes
that carry an idempotency key or are idempotent by meaning. What that is, the caller says.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec

from rollserve import errors
from rollserve.backoff import backoff_s
from rollserve.wire import JSON, MSGPACK

PROXY_STATUSES = frozenset({429, 502, 503, 504})
"""Of a proxy in between, too: try again."""


EXAMPLE_URL = "http://127.0.0.1:8700"

log = logging.getLogger(__name__)


class RemoteError(errors.RollserveError):
    """The server answered an error that has no class of its own here; ``code`` is the server's."""

    def __init__(self, message: str, *, code: str, status: int, field: str | None, hint: str | None) -> None:
        super().__init__(message, field=field, hint=hint)
        self.remote_code = code
        self.remote_status = status


class Unreachable(errors.Unavailable):
    """Nothing answered at the server's URL: not the server's own word that it is busy."""


def _request_errors(base: type[errors.RollserveError]) -> Iterator[type[errors.RollserveError]]:
    for cls in base.__subclasses__():
        if not issubclass(cls, errors.EpisodeFailure | RemoteError | Unreachable):
            yield cls
            yield from _request_errors(cls)


def to_error(status: int, body: bytes, retry_after: str | None) -> errors.RollserveError:
    """The typed error of a problem+json answer."""
    try:
        problem = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.MsgspecError:
        problem = {"detail": body[:500].decode(errors="replace") or f"status {status}"}
    detail = str(problem.get("detail") or problem.get("title") or f"status {status}")
    code, field, hint = str(problem.get("code", "")), problem.get("field"), problem.get("hint")
    if code == errors.UnknownName.code:
        return errors.InvalidInput(detail, field=field, hint=hint)
    for cls in _request_errors(errors.RollserveError):
        if cls.code == code:
            seconds = float(retry_after) if retry_after and retry_after.replace(".", "").isdigit() else None
            return cls(detail, field=field, hint=hint, retry_after_s=seconds)
    if status in PROXY_STATUSES and not code:
        return errors.Unavailable(detail)
    if not code:
        hint = "this is no answer of a rollserve server: is the URL its root?"
    return RemoteError(detail, code=code or "unknown", status=status, field=field, hint=hint)


def part(name: str) -> str:
    """An id or a name as one part of a path. Raises ``InvalidInput`` for what would be another path."""
    if name in ("", ".", "..") or "/" in name:
        raise errors.InvalidInput(f"{name!r} is no id or name of anything", hint="none has a slash in it")
    return quote(name, safe="")


class Transport:
    """Requests to one server. ``patience_s`` bounds the time spent on the tries of a repeatable request."""

    def __init__(self, url: str, api_key: str | None, *, timeout_s: float, patience_s: float = 60.0) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, connect=10)
        self._patience_s = patience_s
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=0),
                timeout=self._timeout,
            )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        repeatable: bool = True,
        msgpack: bool = False,
    ) -> bytes:
        """The body of a 2xx answer. Raises the server's typed error, ``Unavailable`` when it can't
        be reached."""
        data = None if body is None else msgspec.json.encode(body)
        sent = {"Accept": MSGPACK if msgpack else JSON, **(headers or {})}
        if data is not None:
            sent["Content-Type"] = JSON
        query = {key: str(value) for key, value in (params or {}).items() if value is not None}
        deadline = asyncio.get_running_loop().time() + self._patience_s
        for attempt in count(1):
            try:
                return await self._once(method, path, data, query, sent)
            except (errors.QueueFull, errors.Unavailable) as error:
                delay = error.retry_after_s or backoff_s(attempt, 0.2, 5.0, jitter=random.random())
                now = asyncio.get_running_loop().time()
                if not repeatable or now + delay > deadline:
                    raise
                if attempt == 2:  # one failure is nothing to speak of
                    log.warning("%s; trying again for up to %g s", error.message, self._patience_s)
                await asyncio.sleep(delay)
        raise AssertionError("unreachable")

    async def _once(
        self, method: str, path: str, data: bytes | None, query: dict[str, str], headers: dict[str, str]
    ) -> bytes:
        try:
            async with self.session.request(
                method, self.url + path, data=data, params=query, headers=headers
            ) as answer:
                body = await answer.read()
                if answer.status < 400:
                    return body
                raise to_error(answer.status, body, answer.headers.get("Retry-After"))
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            raise errors.InvalidInput(
                f"{self.url!r} is no URL of a server", field="url", hint=f"it looks like {EXAMPLE_URL}"
            ) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unreachable(
                f"no answer from {self.url}: {self._cause(error)}",
                hint="is the server running? `rollserve serve` starts one",
            ) from error

    def _cause(self, error: aiohttp.ClientError | TimeoutError) -> str:
        """Never empty: a time-out has no text of its own."""
        cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
        if isinstance(error, TimeoutError) and not str(error):
            return f"something is there and said nothing for {self._timeout.total:g} s"
        return str(cause) or type(cause).__name__
