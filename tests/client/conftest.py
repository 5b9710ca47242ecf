from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from rollserve.api.app import make_app
from rollserve.api.auth import Auth
from rollserve.build.http import HttpServer, bind, url_of
from rollserve.client import Client
from rollserve.config import ApiSettings
from rollserve.testing.server_room import Room
from rollserve.wire import CreatePolicy
from tests.integration.conftest import backend_url, engine, make_server, runtime, server

__all__ = ["backend_url", "client", "engine", "make_server", "runtime", "server"]


@pytest.fixture
async def client(room: Room) -> AsyncIterator[Client]:
    """Of a server over the module's ``room``, which has the policy ``pol``."""
    sock = bind("127.0.0.1", 0)
    server = HttpServer(make_app(room.core, ApiSettings(), Auth(room.store, required=False)), sock)
    await server.start()
    async with Client(url_of(sock)) as client:
        await client.create_policy(CreatePolicy(name="pol", model="m", tokenizer="tiny"))
        yield client
    await server.stop()
