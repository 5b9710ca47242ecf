"""The gateway over HTTP: a raw ASGI application for agents outside the worker, in every dialect.

Bodies are read raw and decoded once. A secret is asked for before anything is read: a call of a session
that is over meets a status at which its client stops, and not one that it keeps trying for a minute. What a
request leads to is an exchange, which outlives its connection for a while.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable
from urllib.parse import parse_qsl

import msgspec
import structlog
from msgspec.structs import replace

from rollserve.dialect import clients
from rollserve.dialect.base import Asked, Dialect, Target
from rollserve.dialect.clients import Client
from rollserve.errors import MethodNotAllowed, RollserveError, Unauthenticated
from rollserve.gateway import dialects
from rollserve.gateway.asgi import (
    Answering,
    ASGIApp,
    Gone,
    Receive,
    Scope,
    Send,
    disconnected,
    header_map,
    lifespan,
)
from rollserve.gateway.bodies import Bodies
from rollserve.gateway.exchanges import Bell
from rollserve.gateway.sending import Sender, Waits, refuse
from rollserve.gateway.service import GatewayService
from rollserve.gateway.sessions import GatewaySession

_LARGE_BYTES = 256 << 10
"""Bodies of more are decoded, and hashed, in a thread: of so much that takes about half a millisecond."""

_GREETINGS = ("/", "/api/hello")
"""Asked by ``HEAD``, by Claude Code, to see whether there is anybody."""

_KEY_HEADERS = ("x-api-key", "x-goog-api-key")

_log = structlog.get_logger(__name__)


def make_app(
    service: GatewayService, *, max_body_bytes: int = 64 * 1024 * 1024, waits: Waits | None = None
) -> ASGIApp:
    waits = waits or Waits()
    return _App(service, Bodies(max_body_bytes, waits.body_s), waits)


class _Request:
    """A request whose head has been read."""

    def __init__(self, scope: Scope) -> None:
        self.method: str = scope["method"]
        self.headers = header_map(scope["headers"])
        self.session_id, self.path = dialects.split(scope["path"])
        self.query: bytes = scope.get("query_string", b"")
        self.client = clients.recognise(self.headers)

    def read(self, dialect: Dialect, target: Target, body: bytes) -> tuple[Asked, Hashable]:
        """What is asked for, and what makes two requests of a session the same: that. Their bytes may differ:
        Codex writes what it says of itself in another order each time. The hash is keyed by the process, so
        that nobody can make another request that has it, and is much cheaper than a digest."""
        query = dict(parse_qsl(self.query.decode("latin-1"))) if self.query else {}
        asked = dialect.parse(target, body, self.headers, query)
        silent = replace(asked, request=replace(asked.request, hints={}, pictures={}))
        known = msgspec.msgpack.encode(silent, order="deterministic")
        return asked, (dialect.name, self.path, self.query, len(known), hash(known))


class _App:
    def __init__(self, service: GatewayService, bodies: Bodies, waits: Waits) -> None:
        self._service = service
        self._bodies = bodies
        self._waits = waits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(_Request(scope), receive, Answering(scope, receive, send))

    async def _http(self, request: _Request, receive: Receive, out: Answering) -> None:
        if request.path == "/healthz":
            await out.whole(200, b'{"status":"ok"}')
            return
        if request.method == "HEAD" and request.path in _GREETINGS:
            await out.whole(200, b"")
            return
        dialect, status = dialects.nearest(request.path, request.headers), None
        try:
            if request.headers.get("upgrade", "").lower() == "websocket":
                status = 426
                raise MethodNotAllowed("no WebSockets here", hint="use POST")
            dialect, target = dialects.find(request.method, request.path, request.headers)
            await self._answer(request, dialect, target, receive, out)
        except Gone:
            return
        except RollserveError as error:
            await refuse(out, error, dialect, request.client, status)
        except Exception as error:  # the edge: recorded, and answered as ours
            _log.exception("gateway.request_failed", path=request.path)
            if out.started:
                await out.break_off()
            else:
                internal = RollserveError(f"internal error: {type(error).__name__}")
                await refuse(out, internal, dialect, request.client)

    async def _answer(
        self, request: _Request, dialect: Dialect, target: Target, receive: Receive, out: Answering
    ) -> None:
        session = self._service.session(_secret(request.headers), request.session_id)
        created_s = int(time.time())
        if target.operation == "models":
            if target.model:
                await out.whole(200, dialect.model(target.model, created_s=created_s))
            else:
                await out.whole(200, dialect.models(session.model_names, created_s=created_s))
            return
        async with self._bodies.read(session.id, request.headers, receive) as body:
            asked, key = await self._read(request, dialect, target, body)
            del body  # a call may take long
        asked = session.routed(session.continued(asked))
        if target.operation == "count":
            prompt_tokens = await session.conversation_state.count(asked.request)
            await out.whole(200, dialect.counted(asked, prompt_tokens))
            return
        await self._generate(request, session, dialect, asked, key, created_s, receive, out)

    async def _read(
        self, request: _Request, dialect: Dialect, target: Target, body: bytes
    ) -> tuple[Asked, Hashable]:
        if len(body) > _LARGE_BYTES:
            return await asyncio.to_thread(request.read, dialect, target, body)
        return request.read(dialect, target, body)

    async def _generate(
        self,
        request: _Request,
        session: GatewaySession,
        dialect: Dialect,
        asked: Asked,
        key: Hashable,
        created_s: int,
        receive: Receive,
        out: Answering,
    ) -> None:
        """The exchange that answers the request, from its beginning, for as long as the client is there."""
        bell, arrived = Bell(), False
        exchange = await session.exchanges.enter(key, asked, bell, created_s)
        gone = asyncio.ensure_future(disconnected(receive))
        gone.add_done_callback(bell.ring)
        try:
            await Sender(out, dialect, request.client, self._waits, exchange, bell, gone).send()
            arrived = True
        finally:
            gone.cancel()
            session.exchanges.leave(exchange, bell, arrived=arrived, grace_s=self._grace_s(request.client))

    def _grace_s(self, client: Client) -> float:
        return client.grace_s if self._waits.grace_s is None else self._waits.grace_s


def _secret(headers: dict[str, str]) -> str:
    """Wherever the clients of any dialect put it. Raises ``Unauthenticated`` where there is none."""
    kind, _, token = headers.get("authorization", "").partition(" ")
    found = [token if kind.lower() == "bearer" else "", *(headers.get(name, "") for name in _KEY_HEADERS)]
    secret = next((text for each in found if (text := each.strip())), None)
    if secret is None:
        raise Unauthenticated(
            "the session's secret is missing",
            hint="send it as 'Authorization: Bearer SECRET', or as x-api-key or x-goog-api-key",
        )
    return secret
