from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import uvicorn

from rollserve.api.app import make_app
from rollserve.api.auth import Auth
from rollserve.config import ApiSettings
from rollserve.testing.fake_payloads import FakePayloads
from rollserve.testing.fakes_server import FakeExecutor, completes
from rollserve.testing.server_room import Room, a_room, migrate_empty


@pytest.fixture(scope="session")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return asyncio.run(migrate_empty(tmp_path_factory.mktemp("empty") / "rollserve.db"))


@pytest.fixture
async def room(tmp_path: Path, empty: Path) -> AsyncIterator[Room]:
    """Every attempt completes at once; set ``executor.play`` to None to end them by hand."""
    payloads = FakePayloads()
    async with a_room(
        tmp_path, FakeExecutor(play=completes(payloads)), payloads=payloads, empty=empty
    ) as room:
        yield room


@pytest.fixture
async def api(room: Room) -> AsyncIterator[httpx.AsyncClient]:
    """The application, without a socket."""
    app = make_app(room.core, ApiSettings(max_body_mb=1), Auth(room.store, required=False))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


@pytest.fixture
async def served(room: Room) -> AsyncIterator[httpx.AsyncClient]:
    """The application behind a real socket."""
    app = make_app(room.core, ApiSettings(max_body_mb=1), Auth(room.store, required=False))
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    await room.until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        yield client
    room.core.begin_stop()
    server.should_exit = True
    await serving
