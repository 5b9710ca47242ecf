"""Who may call: bearer keys, stored as SHA-256 only.

Bound to a loopback address the server also takes requests without a key, and then guards against what
a web page in the user's browser could send there: the Host must be a loopback name (no DNS rebinding)
and the Origin the server's own. A key that is sent is always checked.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rollserve.api.problems import problem_response
from rollserve.build.http import is_loopback
from rollserve.config import ApiSettings
from rollserve.errors import Forbidden, RollserveError, Unauthenticated
from rollserve.store.base import Store

ADMIN = "admin"
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/docs", "/openapi.json"})
_KNOWN_FOR_S = 10.0
_MAX_KNOWN = 256


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


async def ensure_admin_key(store: Store) -> str | None:
    """Make the admin key at the first start. Returns it this once; None when there is one."""
    if await store.has_admin_key():
        return None
    key = f"rsk_{secrets.token_urlsafe(32)}"
    await store.put_key(name=ADMIN, digest=digest_of(key), role=ADMIN)
    return key


def key_required(settings: ApiSettings) -> bool:
    return settings.require_key or not is_loopback(settings.host)


class Auth:
    """``required``: a request without a key is refused."""

    def __init__(self, store: Store, *, required: bool) -> None:
        self.required = required
        self._store = store
        self._known: dict[str, float] = {}

    async def check(self, headers: Headers) -> None:
        """Raises ``Unauthenticated`` or ``Forbidden``."""
        given = headers.get("authorization")
        if given is None:
            self._check_keyless(headers)
            return
        scheme, _, key = given.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthenticated("send the key as `Authorization: Bearer KEY`")
        await self._check_key(digest_of(key.strip()))

    async def _check_key(self, digest: str) -> None:
        now = time.monotonic()
        for known, until in self._known.items():
            if hmac.compare_digest(known, digest) and now < until:
                return
        role = await self._store.find_key(digest)
        if role is None:
            raise Unauthenticated("unknown key", hint="session secrets are no API keys")
        if role != ADMIN:
            raise Forbidden(f"a key of role {role!r} may not do this")
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[digest] = now + _KNOWN_FOR_S

    def _check_keyless(self, headers: Headers) -> None:
        if self.required:
            raise Unauthenticated(
                "a key is needed", hint="send `Authorization: Bearer KEY`; the first start printed it"
            )
        host = headers.get("host", "")
        if not is_loopback(urlsplit(f"//{host}").hostname or ""):
            raise Forbidden(f"without a key only by a loopback name, not {host!r}", field="Host")
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            raise Forbidden(f"without a key not from the web page {origin!r}", field="Origin")


class AuthMiddleware:
    """In front of everything, so that nothing of an unauthenticated request is read."""

    def __init__(self, app: ASGIApp, auth: Auth) -> None:
        self._app = app
        self._auth = auth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                await self._auth.check(Headers(scope=scope))
            except RollserveError as error:
                await problem_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)
