"""A strict, streaming tar reader of bounded memory.

``tarfile`` keeps every member it has seen, takes damage in the middle for the end, and reads extended headers
of any size; an archive from elsewhere gets none of that here. One header is parsed by ``tarfile`` itself.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass

from rollserve.sandbox.images.base import bad_image
from rollserve.sandbox.images.streams import READ_BYTES, Readable

BLOCK_BYTES = 512
MAX_HEADER_BYTES = 1 << 20
_ZEROS = bytes(BLOCK_BYTES)
_FILES = frozenset({tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE})
_KINDS = {
    tarfile.DIRTYPE: "folder",
    tarfile.SYMTYPE: "symlink",
    tarfile.LNKTYPE: "hardlink",
    tarfile.FIFOTYPE: "fifo",
    tarfile.CHRTYPE: "device",
    tarfile.BLKTYPE: "device",
}


@dataclass(slots=True)
class Entry:
    """``kind`` is file, folder, symlink, hardlink, fifo or device; ``link`` is where a link leads."""

    name: str
    kind: str
    mode: int
    mtime: float
    size_bytes: int
    link: str
    offset: int


class TarReader:
    """``for entry in reader`` with ``reader.data()`` in between. Raises ``SandboxError`` for what is no
    whole tar archive. ``lenient`` accepts one that ends without its end mark (a digest proves it whole)."""

    def __init__(self, source: Readable, what: str, *, lenient: bool = False) -> None:
        self._source = source
        self._what = what
        self._lenient = lenient
        self._left = 0
        self._padding = 0
        self._offset = 0

    def __iter__(self) -> Iterator[Entry]:
        extended: dict[str, str] = {}
        while (header := self._header()) is not None:
            kind = header.type
            if kind in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
                key = "path" if kind == tarfile.GNUTYPE_LONGNAME else "linkpath"
                extended[key] = _text(self._extension(header).rstrip(b"\0"))
            elif kind in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE):
                extended |= self._records(header)
            elif kind == tarfile.XGLTYPE:
                self._extension(header)
            else:
                yield self._entry(header, extended)
                extended = {}

    def data(self) -> Iterator[bytes]:
        """The content of the entry that was yielded last."""
        while self._left:
            part = self._source.read(min(self._left, READ_BYTES))
            if not part:
                raise bad_image(f"{self._what} is truncated: it ends within a file")
            self._left -= len(part)
            self._offset += len(part)
            yield part

    def _header(self) -> tarfile.TarInfo | None:
        for _ in self.data():
            pass
        self._exactly(self._padding)
        self._padding = 0
        block = self._block()
        if block is None:
            return None
        try:
            return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError) as error:
            raise bad_image(f"{self._what} is no tar archive, or damaged: {error}") from error

    def _block(self) -> bytes | None:
        """The next header, or None at the end."""
        block = self._at_most(BLOCK_BYTES)
        if not block and self._lenient:
            return None
        if len(block) < BLOCK_BYTES:
            raise bad_image(f"{self._what} is truncated: it ends without an end mark")
        if block == _ZEROS:
            while rest := self._source.read(READ_BYTES):
                if rest.strip(b"\0"):
                    raise bad_image(f"{self._what} goes on after its end mark")
            return None
        return block

    def _entry(self, header: tarfile.TarInfo, extended: dict[str, str]) -> Entry:
        name = extended.get("path", header.name)
        if header.type == tarfile.GNUTYPE_SPARSE or any(key.startswith("GNU.sparse") for key in extended):
            raise bad_image(f"{self._what}: {name} is a sparse file, which is not supported")
        kind = "file" if header.type in _FILES else _KINDS.get(header.type)
        if kind is None:
            raise bad_image(f"{self._what}: {name} is of the unknown type {header.type!r}")
        size = _number(extended["size"], self._what) if "size" in extended else header.size
        if size < 0:
            raise bad_image(f"{self._what}: {name} has a negative size")
        if kind == "file":
            self._left, self._padding = size, -size % BLOCK_BYTES
        return Entry(
            name=name,
            kind=kind,
            mode=header.mode,
            mtime=_time(extended.get("mtime"), header.mtime),
            size_bytes=size if kind == "file" else 0,
            link=extended.get("linkpath", header.linkname),
            offset=self._offset,
        )

    def _extension(self, header: tarfile.TarInfo) -> bytes:
        if not 0 <= header.size <= MAX_HEADER_BYTES:
            raise bad_image(f"{self._what}: an extended header of {header.size} bytes")
        data = self._exactly(header.size)
        self._exactly(-header.size % BLOCK_BYTES)
        return data

    def _records(self, header: tarfile.TarInfo) -> dict[str, str]:
        """``LENGTH KEY=VALUE NEWLINE`` each, in POSIX's extended header."""
        data, found = self._extension(header), {}
        while data.strip(b"\0"):
            length, space, _ = data.partition(b" ")
            size = int(length) if length.isdigit() else 0
            record = data[len(length) + 1 : size - 1]
            key, equals, value = record.partition(b"=")
            if not space or not equals or size > len(data) or data[size - 1 : size] != b"\n":
                raise bad_image(f"{self._what}: a damaged extended header")
            found[_text(key)] = _text(value)
            data = data[size:]
        return found

    def _exactly(self, size: int) -> bytes:
        data = self._at_most(size)
        if len(data) < size:
            raise bad_image(f"{self._what} is truncated")
        return data

    def _at_most(self, size: int) -> bytes:
        data = b""
        while len(data) < size and (part := self._source.read(size - len(data))):
            data += part
        self._offset += len(data)
        return data


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _number(text: str, what: str) -> int:
    if not text.isdigit() or len(text) > 18:
        raise bad_image(f"{what}: a damaged extended header")
    return int(text)


def _time(text: str | None, otherwise: float) -> float:
    """Seconds; what is out of range is the epoch."""
    try:
        value = float(text if text is not None else otherwise)
    except ValueError:
        return 0.0
    return value if 0 <= value < 1 << 33 else 0.0
