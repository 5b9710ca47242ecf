"""SIF images: found without a tool, unpacked with one."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from rollserve.errors import InvalidInput, SandboxError
from rollserve.sandbox.images.base import Job
from rollserve.sandbox.images.importing import Importer
from rollserve.sandbox.images.reference import RegistryAccess, parse
from rollserve.sandbox.images.sif import partition_offset
from rollserve.sandbox.images.store import ImageStore


def write_sif(path: Path, content: bytes, *, part: int = 2) -> Path:
    """One unused descriptor, one definition, one partition at byte 4096."""
    head = bytearray(4096)
    head[32:42] = b"SIF_MAGIC\0"
    head[80:112] = struct.pack("<qqqq", 0, 3, 128, 3 * 585)
    rows = [(0x4004, False, 1), (0x4001, True, 2), (0x4004, True, part)]
    for number, (kind, used, role) in enumerate(rows):
        at = 128 + number * 585
        head[at : at + 585] = struct.pack(
            "<i?IIIqqqqqqq128sii376x", kind, used, 1, 1, 0, 4096, len(content), 0, 0, 0, 0, 0, b"", 1, role
        )
    path.write_bytes(bytes(head) + content)
    return path


def test_the_root_file_system_is_found(open_dir: Path) -> None:
    assert partition_offset(write_sif(open_dir / "a.sif", b"hsqs")) == 4096
    with pytest.raises(SandboxError, match="holds no squashfs"):
        partition_offset(write_sif(open_dir / "b.sif", b"", part=3))
    (open_dir / "c.sif").write_bytes(b"#!/bin/sh")
    with pytest.raises(SandboxError, match="no SIF image"):
        partition_offset(open_dir / "c.sif")


def test_a_missing_tool_is_named(store: ImageStore, open_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(open_dir))
    path = write_sif(open_dir / "a.sif", b"")
    with pytest.raises(InvalidInput, match="needs unsquashfs") as caught:
        Importer(store, RegistryAccess()).add(parse(str(path)), Job())
    assert "squashfs-tools" in (caught.value.hint or "")


_TOOL = """#!/bin/sh
while [ "$1" != -dest ]; do [ "$1" = -offset ] && offset=$2; shift; done
[ "$offset" = 4096 ] || exit 9
mkdir -p "$2/etc"; echo a > "$2/etc/a"; chmod 4000 "$2/etc/a"; mkfifo "$2/pipe"; ln -s /etc "$2/link"
[ "$(tail -c 4 "$3")" = fail ] && { echo "no good" >&2; exit 1; }
exit 0
"""


def test_it_is_unpacked_by_the_tool(
    store: ImageStore, open_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (open_dir / "unsquashfs").write_text(_TOOL)
    (open_dir / "unsquashfs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{open_dir}:{os.environ['PATH']}")
    importer = Importer(store, RegistryAccess())
    image = importer.add(parse(str(write_sif(open_dir / "a.sif", b"hsqs"))), Job())
    root = store.folder(image.layers[0])
    assert sorted(os.listdir(root)) == ["etc", "link", "pipe"]
    assert (root / "etc" / "a").stat().st_mode & 0o7777 == 0o600
    with pytest.raises(SandboxError, match="unsquashfs fails: no good"):
        importer.add(parse(str(write_sif(open_dir / "b.sif", b"fail"))), Job())
    assert os.listdir(store.root / "tmp") == []
