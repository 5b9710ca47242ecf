from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The same examples each time, however long one takes: a run fails by what was changed, not by chance or load.
# `--hypothesis-profile default` looks for others.
settings.register_profile(
    "same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same")


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A folder that the sandboxes' user can enter, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="rollserve-test-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()
