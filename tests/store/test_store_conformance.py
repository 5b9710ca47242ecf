"""The SQL store passes the suite that ships for stores."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollserve.store.base import Store
from rollserve.store.sql import SqlStore
from rollserve.testing.store_conformance import StoreConformance


class TestSqlStore(StoreConformance):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[Store]:
        store = SqlStore(f"sqlite:///{tmp_path / 'store.db'}")
        await store.open()
        yield store
        await store.close()
