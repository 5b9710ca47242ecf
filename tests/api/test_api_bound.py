"""The bound on requests in flight."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest

from rollserve.api import bound
from rollserve.api.app import make_app
from rollserve.api.auth import Auth
from rollserve.build.http import HttpServer, bind, url_of
from rollserve.config import ApiSettings
from rollserve.testing.server_room import Room

MOST = 3
POLICY = {"name": "pol", "model": "m", "tokenizer": "tiny"}


@asynccontextmanager
async def serving(room: Room, *, required: bool = False) -> AsyncIterator[httpx.AsyncClient]:
    app = make_app(room.core, ApiSettings(max_requests=MOST), Auth(room.store, required=required))
    sock = bind("127.0.0.1", 0)
    server = HttpServer(app, sock)
    await server.start()
    try:
        async with httpx.AsyncClient(base_url=url_of(sock), timeout=30) as client:
            yield client
    finally:
        room.core.begin_stop()
        await server.stop()


async def full(api: httpx.AsyncClient, room: Room, stack: AsyncExitStack) -> None:
    """Event streams on every place."""
    for _ in range(MOST):
        await stack.enter_async_context(api.stream("GET", "/v1/events"))
    await room.until(lambda: room.core.events.readers == MOST)


async def test_one_request_too_many_is_told_at_once_and_the_watchers_are_answered(room: Room) -> None:
    async with serving(room) as api:
        async with AsyncExitStack() as stack:
            await full(api, room, stack)
            for refused in (
                await api.get("/v1/policies"),
                await api.post("/v1/policies", json=POLICY),
                await api.post("/v1/policies", content=b"x" * (8 << 20)),
            ):
                assert (refused.status_code, refused.json()["code"]) == (429, "queue_full")
                assert refused.headers["content-type"] == "application/problem+json"
                assert int(refused.headers["retry-after"]) >= 1
            for path in ("/healthz", "/readyz", "/metrics"):
                assert (await api.get(path)).status_code == 200, path
            metrics = (await api.get("/metrics")).text
            assert 'status="429"' in metrics
        await room.until(lambda: not room.core.events.readers)

        async def answered() -> bool:
            return (await api.get("/v1/policies")).status_code == 200

        await room.until(answered)


async def test_watchers_have_a_bound_too(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound, "WATCHERS", 0)
    async with serving(room) as api, AsyncExitStack() as stack:
        await full(api, room, stack)
        assert (await api.get("/healthz")).status_code == 429


async def test_who_has_no_key_takes_no_place(room: Room) -> None:
    async with serving(room, required=True) as api:
        answers = await asyncio.gather(*(api.get("/v1/events") for _ in range(4 * MOST)))
        assert {answer.status_code for answer in answers} <= {401, 429}
        assert (await api.get("/v1/events")).status_code == 401
