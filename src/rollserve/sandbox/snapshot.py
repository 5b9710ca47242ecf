"""From a running bubblewrap sandbox to a folder with what it has written."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from rollserve.errors import SandboxError
from rollserve.sandbox import copy_upper
from rollserve.sandbox.base import WORKDIR
from rollserve.sandbox.namespace import run_helper
from rollserve.sandbox.rootfs import Rootfs
from rollserve.sandbox.writable import layer_name

COPY_TIMEOUT_S = 120.0
_TMP = "/tmp"


def copy_written(pid: int, rootfs: Rootfs, *, uid: int, most_bytes: int, target: Path) -> None:
    """Fill the folder ``target``, which the user ``uid`` may write to, with what was written in the sandbox
    whose pid 1 is ``pid``: laid out as the root is, deleted entries marked as overlays do. Blocking.
    Raises ``SandboxError``."""
    fd = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        text = Path(copy_upper.__file__).read_text(encoding="utf-8")
        pairs = [f"{source}={place}" for source, place in _written(rootfs)]
        arguments = [str(pid), str(uid), str(fd), str(most_bytes), *pairs]
        said = run_helper(
            [sys.executable, "-I", "-S", "-c", text, *arguments], fd=fd, timeout_s=COPY_TIMEOUT_S
        )
    finally:
        os.close(fd)
    if said is not None:
        raise SandboxError(f"the sandbox can't be kept: {said}", operation="sandbox.snapshot")


def _written(rootfs: Rootfs) -> Iterator[tuple[str, str]]:
    """Folders of the writable layer, and where in the image they belong."""
    for number, overlay in enumerate(rootfs.overlays):
        yield f"upper{number}", overlay.place.strip("/")
    own = [*([] if rootfs.workspace else [WORKDIR]), *([] if rootfs.keeps_tmp else [_TMP])]
    for place in own:
        yield layer_name(place), place.strip("/")
