"""The gateway's HTTP side on a real socket, and clients for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

import httpx

from rollserve.build.http import HttpServer, bind, url_of
from rollserve.gateway.http import make_app
from rollserve.gateway.sending import Waits
from rollserve.gateway.service import GatewayService
from rollserve.gateway.sessions import GatewaySession

QUICK = Waits(hold_s=0.02, keep_alive_s=0.02, grace_s=0.0)
PATIENT = Waits(grace_s=600.0)


class HasService(Protocol):
    @property
    def service(self) -> GatewayService: ...


@asynccontextmanager
async def serving(world: HasService, waits: Waits = QUICK) -> AsyncIterator[str]:
    """Its base URL, which is the sessions', too."""
    sock = bind("127.0.0.1", 0)
    app: Any = make_app(world.service, max_body_bytes=1_000_000, waits=waits)
    server = HttpServer(app, sock)
    await server.start()
    world.service.base_url = url_of(sock)
    try:
        yield world.service.base_url
    finally:
        await world.service.close()
        await server.stop()


def http_client(**settings: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(verify=False, timeout=30, **settings)


def of_session(session: GatewaySession, **headers: str) -> httpx.AsyncClient:
    return http_client(
        base_url=session.base_url, headers={"authorization": f"Bearer {session.secret}", **headers}
    )
