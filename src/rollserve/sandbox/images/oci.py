"""Images as the OCI and Docker describe them: index → manifest → configuration and layers, every step named
by its digest. Where the bytes come from is the ``Blobs``' part."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from rollserve.sandbox.images.base import ImageConfig, bad_image
from rollserve.sandbox.images.streams import Checked, Readable, read_small

T = TypeVar("T", bound=msgspec.Struct)

MAX_DOCUMENT_BYTES = 8 << 20
MAX_LAYERS = 1000
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "ppc64le": "ppc64le", "s390x": "s390x"}
_MAX_DEPTH = 4


class Descriptor(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    media_type: str = ""
    digest: str = ""
    size: int = -1
    platform: dict[str, Any] | None = None
    annotations: dict[str, str] | None = None


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """An index or a manifest; which of them, its fields say."""

    manifests: list[Descriptor] | None = None
    config: Descriptor | None = None
    layers: list[Descriptor] | None = None


class _Settings(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    env: list[str] | None = None
    working_dir: str | None = None
    user: str | None = None


class _RootFs(msgspec.Struct, frozen=True, kw_only=True):
    diff_ids: list[str] = []


class _Configuration(msgspec.Struct, frozen=True, kw_only=True):
    config: _Settings | None = None
    rootfs: _RootFs = _RootFs()


class Blobs(Protocol):
    """Content by digest. What is handed out is not checked yet."""

    def open(self, blob: Descriptor) -> AbstractContextManager[Readable]:
        """Raises ``SandboxError`` when there is no such blob."""


@dataclass(frozen=True)
class Layer:
    """``diff_id`` is the digest of the unpacked archive, ``blob`` the stored one (no digest: as unpacked)."""

    diff_id: str
    blob: Descriptor


@dataclass(frozen=True)
class Manifest:
    """``id`` is the digest of the configuration, without its algorithm."""

    id: str
    layers: tuple[Layer, ...]
    config: ImageConfig


def read_manifest(blobs: Blobs, start: Descriptor) -> Manifest:
    """Follow ``start`` (an index or a manifest) to what this machine can run. Raises ``SandboxError``."""
    at = start
    for _ in range(_MAX_DEPTH):
        found = _document(blobs, at)
        if found.config is not None and found.layers is not None:
            return _manifest(blobs, found.config, found.layers)
        if not found.manifests:
            raise bad_image(f"{at.digest} is neither an index nor a manifest of an image")
        at = choose(found.manifests)
    raise bad_image("indexes within indexes within indexes")


def choose(manifests: list[Descriptor]) -> Descriptor:
    """The one for this machine; where none says for which it is, the only one."""
    wanted = machine()
    named = [one for one in manifests if one.platform is not None]
    fitting = [one for one in named if (one.platform or {}).get("architecture") == wanted]
    fitting = [one for one in fitting if (one.platform or {}).get("os", "linux") == "linux"]
    if fitting:
        return fitting[0]
    nameless = [one for one in manifests if one.platform is None]
    if len(nameless) == 1:
        return nameless[0]
    if nameless:
        raise bad_image("it holds several images", hint="name one of them by its tag")
    there = sorted({str((one.platform or {}).get("architecture")) for one in named})
    raise bad_image(f"there is no image for linux/{wanted}, only for {', '.join(there) or 'nothing'}")


def machine() -> str:
    return _MACHINES.get(platform.machine(), platform.machine())


def parse_configuration(data: bytes, layers: list[Descriptor], image_id: str) -> Manifest:
    """Raises ``SandboxError`` when it does not fit its layers."""
    found = _decode(data, _Configuration, "the image's configuration")
    diff_ids = found.rootfs.diff_ids
    if len(diff_ids) != len(layers) or len(layers) > MAX_LAYERS:
        raise bad_image(f"{len(layers)} layers, and {len(diff_ids)} digests of their content")
    for digest in diff_ids:
        check_digest(digest)
    said = found.config or _Settings()
    env = dict(_variables(said.env or []))
    config = ImageConfig(env=env, workdir=said.working_dir or "", user=said.user or "")
    pairs = zip(diff_ids, layers, strict=True)
    return Manifest(id=image_id, layers=tuple(Layer(*pair) for pair in pairs), config=config)


def check_digest(digest: str) -> str:
    """Its hexadecimal digits. Raises ``SandboxError``: it becomes part of paths."""
    algorithm, _, value = digest.partition(":")
    if algorithm != "sha256" or len(value) != 64 or set(value) - set("0123456789abcdef"):
        raise bad_image(f"{digest!r} is no sha256 digest")
    return value


def read_checked(blobs: Blobs, blob: Descriptor, what: str) -> bytes:
    """A small blob, its digest and size checked."""
    check_digest(blob.digest)
    with blobs.open(blob) as source:
        checked = Checked(source)
        data = read_small(checked, MAX_DOCUMENT_BYTES, what)
    checked.verify(blob.digest, what, size_bytes=blob.size if blob.size >= 0 else None)
    return data


def decode_document(data: bytes) -> Document:
    return _decode(data, Document, "the manifest")


def _document(blobs: Blobs, at: Descriptor) -> Document:
    return decode_document(read_checked(blobs, at, f"the manifest {at.digest}"))


def _manifest(blobs: Blobs, config: Descriptor, layers: list[Descriptor]) -> Manifest:
    for layer in layers:
        check_digest(layer.digest)
    data = read_checked(blobs, config, "the image's configuration")
    return parse_configuration(data, layers, check_digest(config.digest))


def _variables(entries: list[str]) -> Iterator[tuple[str, str]]:
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not equals or not name or "\0" in entry:
            raise bad_image(f"{entry!r} in the image's environment is no variable")
        yield name, value


def _decode(data: bytes, kind: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise bad_image(f"{what} can't be read: {error}") from error
