"""What names an image, the same for every runtime.

=============================== =====================================================================
``host``                        this machine's own ``/usr`` and ``/etc``
``/a/folder``                   a root file system; an OCI layout where it holds one (``:TAG`` may follow)
``/an/archive.tar``             an OCI archive, ``docker save``'s archive, or a root file system; may be
                                compressed (gzip, zstd, xz, bzip2)
``/a/Dockerfile``               a recipe: a file named so, or ``*.Dockerfile``, or ``Containerfile``
``/an/image.sif``               a SIF image; needs ``unsquashfs``
``docker://HOST/NAME:TAG``      an image of a registry, also ``@sha256:…``
``sha256:…``                    one that is in the cache, by its id (12 digits are enough)
``NAME``                        one that is in the cache, as ``rollserve image add --name`` called it
=============================== =====================================================================
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rollserve.errors import InvalidInput

HOST = "host"
DEFAULT_REGISTRY = "docker.io"
_REGISTRY = "docker://"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ID = re.compile(r"sha256:([0-9a-f]{12,64})")
_PLACE = re.compile(
    r"(?:(?P<host>localhost(?::\d+)?|[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*(?::\d+)?|\[[0-9a-f:]+\](?::\d+)?)/)?"
    r"(?P<name>[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_HINT = (
    "'host', the absolute path of a root file system, archive or Dockerfile, docker://HOST/NAME:TAG, or the "
    "name of an image that `rollserve image list` shows"
)


class Kind(StrEnum):
    HOST = "host"
    FOLDER = "folder"
    LAYOUT = "layout"
    ARCHIVE = "archive"
    SIF = "sif"
    RECIPE = "recipe"
    REGISTRY = "registry"
    STORED = "stored"


@dataclass(frozen=True)
class RegistryPlace:
    """``reference`` is a tag or a digest."""

    host: str
    name: str
    reference: str

    def __str__(self) -> str:
        sign = "@" if self.reference.startswith("sha256:") else ":"
        return f"{self.host}/{self.name}{sign}{self.reference}"


@dataclass(frozen=True)
class RegistryAccess:
    """``auth_file`` is Docker's ``config.json``; ``insecure`` are hosts (with port) spoken to in plain HTTP,
    as those of the loopback network are."""

    auth_file: Path | None = None
    insecure: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reference:
    """``path`` of what is a file or a folder, ``tag`` of a layout or archive, ``name`` of what is stored."""

    kind: Kind
    text: str
    path: Path = Path("/")
    tag: str | None = None
    name: str = ""
    place: RegistryPlace | None = None


def parse(text: str) -> Reference:
    """Blocking: looks at files. Raises ``InvalidInput`` (field ``image``)."""
    if text == HOST:
        return Reference(Kind.HOST, text)
    if text.startswith(_REGISTRY):
        return Reference(Kind.REGISTRY, text, place=registry_place(text.removeprefix(_REGISTRY)))
    if text.startswith("/") and "\0" not in text:
        return _on_disk(text)
    found = _ID.fullmatch(text)
    if found is not None or _NAME.fullmatch(text):
        return Reference(Kind.STORED, text, name=found[1] if found else text)
    raise InvalidInput(f"no image {text!r}", field="image", hint=_HINT)


def registry_place(text: str) -> RegistryPlace:
    """``[HOST/]NAME[:TAG][@DIGEST]``; as Docker has it, a first word without dot or port is no host."""
    match = _PLACE.fullmatch(text)
    if match is None:
        raise InvalidInput(f"{text!r} names no image of a registry", field="image", hint="HOST/NAME:TAG")
    host, name = match["host"] or DEFAULT_REGISTRY, match["name"]
    if not ("." in host or ":" in host or host == "localhost"):
        if host != host.lower():
            raise InvalidInput(f"{text!r} names no image of a registry", field="image", hint="HOST/NAME:TAG")
        host, name = DEFAULT_REGISTRY, f"{host}/{name}"
    if host == DEFAULT_REGISTRY and "/" not in name:
        name = f"library/{name}"
    return RegistryPlace(host, name, match["digest"] or match["tag"] or "latest")


def is_recipe_name(name: str) -> bool:
    return name in ("Dockerfile", "Containerfile") or name.endswith(".Dockerfile")


def _on_disk(text: str) -> Reference:
    path, tag = Path(text), None
    if not os.path.lexists(path) and ":" in path.name:
        plain, _, tag = path.name.partition(":")
        path = path.parent / plain
    if path.is_dir():
        kind = Kind.LAYOUT if (path / "index.json").is_file() else Kind.FOLDER
    elif not path.is_file():
        raise InvalidInput(f"{text} is neither a folder nor a file", field="image", hint=_HINT)
    elif is_recipe_name(path.name):
        kind = Kind.RECIPE
    else:
        kind = Kind.SIF if path.suffix == ".sif" else Kind.ARCHIVE
    if tag is not None and kind not in (Kind.LAYOUT, Kind.ARCHIVE):
        raise InvalidInput(f"{path} takes no tag", field="image")
    return Reference(kind, text, path=path, tag=tag)
