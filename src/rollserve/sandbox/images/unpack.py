"""From a layer's tar archive to a layer's folder."""

from __future__ import annotations

from pathlib import Path

from rollserve.errors import SandboxError
from rollserve.sandbox.images.base import bad_image
from rollserve.sandbox.images.layer import LayerWriter, checked_parts
from rollserve.sandbox.images.stack import Stack
from rollserve.sandbox.images.streams import Readable
from rollserve.sandbox.images.tar import Entry, TarReader

WHITEOUT = ".wh."
OPAQUE_MARK = ".wh..wh..opq"
_RESERVED = ".wh..wh."
"""What old layer stores kept for themselves begins so."""


def unpack(
    source: Readable,
    root: Path,
    *,
    what: str,
    owner: int | None,
    lower: Stack,
    budget_bytes: int,
    whiteouts: bool,
    lenient: bool,
) -> int:
    """Unpack into the fresh folder ``root``; returns what the layer takes in bytes. ``whiteouts`` says that
    this is a layer, in which ``.wh.`` names hide what lies below; ``lenient`` see ``TarReader``.

    Raises ``SandboxError`` that names the member at fault. Device nodes are left out: a sandbox brings its
    own, and an archive could not make them as a user.
    """
    reader = TarReader(source, what, lenient=lenient)
    with LayerWriter(root, owner=owner, lower=lower, budget_bytes=budget_bytes) as writer:
        for entry in reader:
            try:
                _put(writer, reader, entry, whiteouts=whiteouts)
            except SandboxError as error:
                raise bad_image(f"{what}: {_shown(entry.name)}: {error.message}", hint=error.hint) from error
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) and error.strerror else error
                raise bad_image(f"{what}: {_shown(entry.name)} can't be unpacked: {reason}") from error
        return writer.size_bytes


def _put(writer: LayerWriter, reader: TarReader, entry: Entry, *, whiteouts: bool) -> None:
    parts = checked_parts(entry.name)
    if whiteouts and any(part.startswith(WHITEOUT) for part in parts):
        _hide(writer, parts)
    elif entry.kind == "file":
        writer.file(parts, reader.data(), size_bytes=entry.size_bytes, mode=entry.mode, mtime=entry.mtime)
    elif entry.kind == "folder":
        writer.folder(parts, entry.mode)
    elif entry.kind == "symlink":
        writer.symlink(parts, entry.link, entry.mtime)
    elif entry.kind == "hardlink":
        target = checked_parts(entry.link)
        if not target:
            raise bad_image("a hard link to the root folder")
        writer.hardlink(parts, target)
    elif entry.kind == "fifo":
        writer.fifo(parts, entry.mode, entry.mtime)


def _hide(writer: LayerWriter, parts: tuple[str, ...]) -> None:
    *folder, name = parts
    if any(part.startswith(WHITEOUT) for part in folder):
        if folder[0].startswith(_RESERVED):
            return
        raise bad_image("a path through a whiteout")
    if name == OPAQUE_MARK:
        writer.opaque(tuple(folder))
    elif not name.startswith(_RESERVED):
        hidden = name.removeprefix(WHITEOUT)
        if hidden in ("", ".", ".."):
            raise bad_image("a whiteout that hides no entry")
        writer.whiteout((*folder, hidden))


def _shown(name: str) -> str:
    return repr(name if len(name) <= 200 else f"{name[:200]}…")
