"""Images in files: an OCI layout (a folder, or the same in a tar archive) and ``docker save``'s archive."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rollserve.sandbox.images.base import Job, bad_image
from rollserve.sandbox.images.oci import (
    MAX_DOCUMENT_BYTES,
    Blobs,
    Descriptor,
    Manifest,
    check_digest,
    choose,
    decode_document,
    parse_configuration,
    read_manifest,
)
from rollserve.sandbox.images.streams import READ_BYTES, Checked, Chunks, Readable, decompressed, read_small
from rollserve.sandbox.images.tar import Entry, TarReader

NAME = "org.opencontainers.image.ref.name"
_INDEX = "index.json"
_DOCKER = "manifest.json"
_MAX_MEMBERS = 20_000


class LayoutBlobs:
    """``Blobs`` of an OCI layout in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def open(self, blob: Descriptor) -> Iterator[Readable]:
        path = self._folder / "blobs" / "sha256" / check_digest(blob.digest)
        with _open_file(path, f"the blob {blob.digest}") as file:
            yield file


class _Members:
    """A plain tar archive by the names of its files; links between members are followed once."""

    def __init__(self, path: Path, job: Job) -> None:
        self.path = path
        self._places: dict[str, tuple[int, int]] = {}
        self._links: dict[str, str] = {}
        with path.open("rb") as file:
            for entry in TarReader(_Stoppable(file, job), str(path)):
                self._note(entry)
                if len(self._places) + len(self._links) > _MAX_MEMBERS:
                    raise bad_image(f"{path} has more than {_MAX_MEMBERS} members, more than an image needs")

    def _note(self, entry: Entry) -> None:
        name = os.path.normpath(entry.name)
        if entry.kind == "file":
            self._places[name] = (entry.offset, entry.size_bytes)
        elif entry.kind in ("symlink", "hardlink"):
            folder = os.path.dirname(name) if entry.kind == "symlink" else ""
            self._links[name] = os.path.normpath(os.path.join(folder, entry.link))

    def __contains__(self, name: str) -> bool:
        return os.path.normpath(name) in self._places

    @contextmanager
    def open(self, name: str) -> Iterator[Readable]:
        path = os.path.normpath(name)
        place = self._places.get(self._links.get(path, path))
        if place is None:
            raise bad_image(f"{self.path} holds no {name}")
        with self.path.open("rb") as file:
            file.seek(place[0])
            yield Chunks(_pieces(file, place[1]))

    def read(self, name: str) -> bytes:
        with self.open(name) as source:
            return read_small(source, MAX_DOCUMENT_BYTES, name)


class _Stoppable:
    """A file whose long stretches are read in pieces that a job can stop between."""

    def __init__(self, source: Readable, job: Job) -> None:
        self._source = source
        self._job = job

    def read(self, size: int = -1, /) -> bytes:
        self._job.check()
        return self._source.read(size)


@dataclass(frozen=True)
class ArchiveBlobs:
    """``Blobs`` of an OCI layout in an archive."""

    members: _Members

    @contextmanager
    def open(self, blob: Descriptor) -> Iterator[Readable]:
        with self.members.open(f"blobs/sha256/{check_digest(blob.digest)}") as source:
            yield source


@dataclass(frozen=True)
class DockerBlobs:
    """``Blobs`` of ``docker save``: a blob's media type holds the name of its member."""

    members: _Members

    @contextmanager
    def open(self, blob: Descriptor) -> Iterator[Readable]:
        with self.members.open(blob.media_type) as source:
            yield source


class _Saved(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    config: str
    layers: list[str]
    repo_tags: list[str] | None = None


def open_layout(folder: Path, tag: str | None) -> tuple[Blobs, Manifest]:
    with _open_file(folder / _INDEX, f"{folder / _INDEX}") as file:
        data = read_small(file, MAX_DOCUMENT_BYTES, _INDEX)
    blobs = LayoutBlobs(folder)
    return blobs, read_manifest(blobs, _tagged(data, tag))


def open_archive(path: Path, tag: str | None, job: Job, scratch: Path) -> tuple[Blobs, Manifest] | None:
    """The image in an archive; None when it is no image but a root file system. A compressed archive is
    unpacked to ``scratch`` first."""
    if not _is_image(path):
        return None
    members = _Members(_uncompressed(path, job, scratch), job)
    if _INDEX in members:
        blobs = ArchiveBlobs(members)
        return blobs, read_manifest(blobs, _tagged(members.read(_INDEX), tag))
    return _open_saved(members, tag)


def _is_image(path: Path) -> bool:
    """By the first entry that tells: a layout's files lie at the top beside folders of digests."""
    with path.open("rb") as file:
        reader = TarReader(decompressed(file, str(path)), str(path), lenient=True)
        for entry in reader:
            name = os.path.normpath(entry.name)
            if name in (_INDEX, "oci-layout", _DOCKER, "repositories"):
                return True
            digest = name.removesuffix(".json").split("/")[0]
            if name.split("/")[0] != "blobs" and name != "." and len(digest) != 64:
                return False
    return False


def _uncompressed(path: Path, job: Job, scratch: Path) -> Path:
    with path.open("rb") as file:
        source = Checked(file, job=job, what=f"reading {path.name}", total_bytes=path.stat().st_size)
        plain = decompressed(source, str(path))
        head = plain.read(READ_BYTES)
        file_head = os.pread(file.fileno(), len(head), 0)
        if file_head == head:
            return path
        unpacked = scratch / "archive.tar"
        with unpacked.open("wb") as out:
            out.write(head)
            while piece := plain.read(READ_BYTES):
                out.write(piece)
    return unpacked


def _open_saved(members: _Members, tag: str | None) -> tuple[Blobs, Manifest]:
    try:
        saved = msgspec.json.decode(members.read(_DOCKER), type=list[_Saved])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise bad_image(f"{_DOCKER} can't be read: {error}") from error
    fitting = [one for one in saved if tag is None or any(name == tag for name in one.repo_tags or [])]
    if len(fitting) != 1:
        names = sorted(name for one in saved for name in one.repo_tags or [])
        raise bad_image(f"{len(fitting)} images fit, of {', '.join(names) or 'none with a tag'}")
    data = members.read(fitting[0].config)
    checked = Checked(Chunks(iter([data])))
    checked.drain()
    layers = [Descriptor(media_type=name) for name in fitting[0].layers]
    return DockerBlobs(members), parse_configuration(data, layers, check_digest(checked.digest))


def _tagged(index: bytes, tag: str | None) -> Descriptor:
    manifests = decode_document(index).manifests or []
    if tag is not None:
        names = [(one.annotations or {}).get(NAME, "") for one in manifests]
        manifests = [one for one, name in zip(manifests, names, strict=True) if name == tag]
        if not manifests:
            known = ", ".join(name for name in names if name) or "none"
            raise bad_image(f"there is no image {tag!r} in it, only {known}")
    if not manifests:
        raise bad_image("its index names no image")
    return choose(manifests)


@contextmanager
def _open_file(path: Path, what: str) -> Iterator[Readable]:
    """A regular file, not through a link: a layout may be another's."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise bad_image(f"{what} can't be read: {error.strerror}") from error
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise bad_image(f"{what} is no file")
        yield file


def _pieces(file: Readable, size_bytes: int) -> Iterator[bytes]:
    while size_bytes and (piece := file.read(min(size_bytes, READ_BYTES))):
        size_bytes -= len(piece)
        yield piece
