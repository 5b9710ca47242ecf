from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """Short: a Unix socket's path has 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="rs") as folder:
        yield Path(folder)


@pytest.fixture
def child_env() -> dict[str, str]:
    """The environment of worker processes, with this package importable."""
    source = str(Path(__file__).parents[2] / "src")
    return {**os.environ, "PYTHONPATH": source}
