from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A folder that the sandboxes' user can enter, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="rollserve-test-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()
