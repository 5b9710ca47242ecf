"""SIF images (Apptainer, Singularity): the squashfs in one is found here and unpacked by ``unsquashfs``."""

from __future__ import annotations

import hashlib
import shutil
import struct
import subprocess
import time
from pathlib import Path

from rollserve.errors import InvalidInput
from rollserve.sandbox.images.base import Job, bad_image
from rollserve.sandbox.images.disk import settle
from rollserve.sandbox.images.streams import READ_BYTES

TOOL = "unsquashfs"
_MAGIC = b"SIF_MAGIC\0"
_MAGIC_AT = 32
_TABLE = struct.Struct("<qqqq")
"""At byte 80: free and all descriptors, where their table begins and how long it is."""

_TABLE_AT = 80
_DESCRIPTOR = struct.Struct("<i?IIIqqqqqqq128sii376x")
_PARTITION = 0x4004
_SQUASHFS = 1
_PRIMARY = 2
_MAX_DESCRIPTORS = 1024
_POLL_S = 0.1


def check_tool() -> str:
    """Raises ``InvalidInput`` where the tool is missing."""
    tool = shutil.which(TOOL)
    if tool is None:
        raise InvalidInput(
            f"a SIF image needs {TOOL}, which is not here",
            field="image",
            hint="install squashfs-tools, or name the image it was made from",
        )
    return tool


def unpack_sif(path: Path, scratch: Path, *, owner: int | None, job: Job) -> str:
    """Unpack its root file system to ``scratch/fs``; returns the file's digest. Raises ``SandboxError``."""
    tool = check_tool()
    offset = partition_offset(path)
    command = [tool, "-quiet", "-no-progress", "-no-xattrs", "-ignore-errors", "-offset", str(offset)]
    log = scratch / "log"
    with log.open("wb") as said:
        process = subprocess.Popen(
            [*command, "-dest", str(scratch / "fs"), str(path)],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        )
        try:
            while process.poll() is None:
                job.check()
                time.sleep(_POLL_S)
        finally:
            process.kill()
            process.wait()
    if not (scratch / "fs").is_dir() or process.returncode not in (0, 2):  # 2: devices it could not make
        raise bad_image(f"{path}: {TOOL} fails: {log.read_text(errors='replace').strip()[-500:]}")
    settle(scratch / "fs", owner=owner)
    return _digest(path, job)


def partition_offset(path: Path) -> int:
    """Where the primary squashfs begins. Raises ``SandboxError``."""
    with path.open("rb") as file:
        head = file.read(128)
        if head[_MAGIC_AT : _MAGIC_AT + len(_MAGIC)] != _MAGIC:
            raise bad_image(f"{path} is no SIF image")
        _, count, at, _ = _TABLE.unpack_from(head, _TABLE_AT)
        file.seek(max(at, 0))
        table = file.read(min(max(count, 0), _MAX_DESCRIPTORS) * _DESCRIPTOR.size)
    for start in range(0, len(table) - _DESCRIPTOR.size + 1, _DESCRIPTOR.size):
        kind, used, _, _, _, offset, *_, system, part = _DESCRIPTOR.unpack_from(table, start)
        if used and kind == _PARTITION and system == _SQUASHFS and part == _PRIMARY:
            return int(offset)
    raise bad_image(f"{path} holds no squashfs root file system (an encrypted one can't be read)")


def _digest(path: Path, job: Job) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            job.check()
            found.update(piece)
    return f"sha256:{found.hexdigest()}"
