from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollserve.sandbox.images.store import ImageStore


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A folder that the sandboxes' user can enter, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="rollserve-test-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture
def store(open_dir: Path) -> ImageStore:
    return ImageStore(open_dir / "images", user=os.geteuid(), max_bytes=1 << 30)
