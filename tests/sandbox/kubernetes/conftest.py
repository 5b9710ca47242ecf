from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollserve.testing.kubernetes_server import FakeCluster


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    cluster = FakeCluster()
    cluster.start()
    yield cluster
    cluster.close()
