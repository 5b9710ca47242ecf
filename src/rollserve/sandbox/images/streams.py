"""Byte streams of archives: digests checked as they pass, compression told by its first bytes. Every read is
bounded, whatever the stream expands to."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import zstandard

from rollserve.sandbox.images.base import Job, bad_image

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

READ_BYTES = 1 << 18
_ZSTD_WINDOW_BYTES = 1 << 27


class Readable(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


class Chunks:
    """A ``Readable`` over pieces of bytes, each handed on as it came."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = b""

    def read(self, size: int = -1, /) -> bytes:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return b""
            self._rest = piece
        if size < 0 or size >= len(self._rest):
            part, self._rest = self._rest, b""
        else:
            part, self._rest = self._rest[:size], self._rest[size:]
        return part


class Checked:
    """Passes a stream on and takes its SHA-256. ``job`` is told how far it is."""

    def __init__(
        self, source: Readable, *, job: Job | None = None, what: str = "", total_bytes: int | None = None
    ) -> None:
        self._source = source
        self._hash = hashlib.sha256()
        self._job = job
        self._what = what
        self._total = total_bytes
        self.size_bytes = 0

    def read(self, size: int = -1, /) -> bytes:
        data = self._source.read(READ_BYTES if size < 0 else size)
        self._hash.update(data)
        self.size_bytes += len(data)
        if self._job is not None:
            self._job.tell(self._what, self.size_bytes, self._total)
        return data

    def drain(self) -> None:
        while self.read(READ_BYTES):
            pass

    @property
    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"

    def verify(self, digest: str, what: str, *, size_bytes: int | None = None) -> None:
        """Raises ``SandboxError`` unless this stream, read to its end, is what ``digest`` names."""
        if size_bytes is not None and self.size_bytes != size_bytes:
            raise bad_image(f"{what} has {self.size_bytes} bytes, and should have {size_bytes}")
        if self.digest != digest:
            raise bad_image(f"{what} has the digest {self.digest}, and should have {digest}")


class _Peeked(io.RawIOBase):
    """A stream that begins with what was read of it already."""

    def __init__(self, head: bytes, source: Readable) -> None:
        self._head = head
        self._source = source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        data = self._head[: len(view)] or self._source.read(len(view))
        self._head = self._head[len(view) :]
        view[: len(data)] = data
        return len(data)


class _Named:
    """Says which archive it was whose compression is broken or ends early."""

    def __init__(self, source: Readable, what: str) -> None:
        self._source = source
        self._what = what

    def read(self, size: int = -1, /) -> bytes:
        try:
            return self._source.read(READ_BYTES if size < 0 else size)
        except (EOFError, OSError, lzma.LZMAError, zlib.error, zstandard.ZstdError) as error:
            raise bad_image(f"{self._what} is truncated or damaged: {error}") from error


def decompressed(source: Readable, what: str) -> Readable:
    """``source`` unpacked, should it be gzip, zstd, xz or bzip2; as it is otherwise."""
    head = source.read(6)
    while 0 < len(head) < 6 and (more := source.read(6 - len(head))):
        head += more
    whole = io.BufferedReader(_Peeked(head, source), READ_BYTES)
    if head.startswith(b"\x1f\x8b"):
        return _Named(gzip.GzipFile(fileobj=whole, mode="rb"), what)
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        unpacker = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
        reader = unpacker.stream_reader(whole, read_across_frames=True)
        return _Named(reader, what)
    if head.startswith(b"\xfd7zXZ\0"):
        return _Named(lzma.LZMAFile(whole), what)
    if head.startswith(b"BZh"):
        return _Named(bz2.BZ2File(whole), what)
    return whole


def read_small(source: Readable, limit_bytes: int, what: str) -> bytes:
    """All of a stream that has to be small. Raises ``SandboxError``."""
    parts, size = [], 0
    while part := source.read(READ_BYTES):
        size += len(part)
        if size > limit_bytes:
            raise bad_image(f"{what} is larger than {limit_bytes} bytes")
        parts.append(part)
    return b"".join(parts)
