from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollserve.sandbox.images.store import ImageStore


@pytest.fixture
def store(open_dir: Path) -> ImageStore:
    return ImageStore(open_dir / "images", user=os.geteuid(), max_bytes=1 << 30)
