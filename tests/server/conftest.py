from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from rollserve.testing.fakes_server import FakeExecutor
from rollserve.testing.server_room import MakeRoom, Room, a_room, migrate_empty


@pytest.fixture(scope="session")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return asyncio.run(migrate_empty(tmp_path_factory.mktemp("empty") / "rollserve.db"))


@pytest.fixture
def make_room(tmp_path: Path, empty: Path) -> MakeRoom:
    return partial(a_room, tmp_path, empty=empty)


@pytest.fixture
async def room(make_room: MakeRoom) -> AsyncIterator[Room]:
    async with make_room(FakeExecutor()) as room:
        yield room
