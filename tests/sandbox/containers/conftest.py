"""An image for engines, and whether the engines of this machine start containers at all."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from rollserve.testing.image_files import make_root

TIMEOUT_S = 60
ROOT_IMAGE = "localhost/rollserve-tests:root"
PLAIN = ("--network", "none", "--ulimit", "nofile=1000:1000", "--ulimit", "nproc=1000:1000")
"""Options that every engine can give here."""


@pytest.fixture(scope="session")
def small_root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rollserve-root-") as name:
        os.chmod(name, 0o755)
        yield make_root(Path(name) / "root")


def refusal(engine: str, root: Path) -> str:
    """Why a container can't be started here at all, by the engine's own word; empty when it can."""
    if shutil.which(engine) is None:
        return f"there is no {engine}"
    archive = subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE)
    with archive:
        said = _said([engine, "import", "-", ROOT_IMAGE], archive.stdout)
    return said or _said([engine, "run", "--rm", *PLAIN, ROOT_IMAGE, "ls"])


def _said(command: list[str], stdin: IO[bytes] | None = None) -> str:
    done = subprocess.run(command, stdin=stdin, capture_output=True, timeout=TIMEOUT_S, check=False)
    return done.stderr.decode(errors="replace").strip()[-300:] if done.returncode else ""


@pytest.fixture
def plain() -> tuple[str, ...]:
    """The end of a command line that starts something of the small root."""
    return (*PLAIN, ROOT_IMAGE)


@pytest.fixture(scope="session")
def refusals(small_root: Path) -> dict[str, str]:
    return {engine: refusal(engine, small_root) for engine in ("podman", "docker")}
