"""From a reference to an image in the cache: whatever its source, one layer after the other, each checked and
whole before it has a name."""

from __future__ import annotations

import os
from pathlib import Path

from rollserve.errors import InvalidInput
from rollserve.sandbox.images.archives import open_archive, open_layout
from rollserve.sandbox.images.base import Image, ImageConfig, Job, Layer, bad_image
from rollserve.sandbox.images.oci import Blobs, Manifest
from rollserve.sandbox.images.oci import Layer as SourceLayer
from rollserve.sandbox.images.reference import Kind, Reference, RegistryAccess
from rollserve.sandbox.images.sif import unpack_sif
from rollserve.sandbox.images.stack import Stack
from rollserve.sandbox.images.store import ImageStore, short
from rollserve.sandbox.images.streams import Checked, decompressed
from rollserve.sandbox.images.unpack import unpack

_HOST_MARKS = ("/usr", "/usr/bin", "/usr/lib", "/etc", "/var/lib/dpkg/status", "/var/lib/rpm")


def reference_key(reference: Reference) -> str:
    """What tells two references apart: a file that changed is another. Blocking."""
    path = reference.path
    if reference.kind is Kind.REGISTRY:
        return f"registry:{reference.place}"
    if reference.kind is Kind.LAYOUT:
        path = path / "index.json"
    info = path.stat()
    return f"{reference.kind}:{path}:{reference.tag or ''}:{info.st_size}:{info.st_mtime_ns}:{info.st_ino}"


def base_image(reference: Reference) -> Image:
    """The image of ``host`` or of a folder: nothing is copied. Its id tells when what lies there changed at
    the top, or packages were installed."""
    places = _HOST_MARKS if reference.kind is Kind.HOST else (str(reference.path),)
    marks = [f"{place}:{_mark(place)}" for place in places]
    base = reference.text if reference.kind is Kind.HOST else str(reference.path)
    return Image(id=short(f"base:{base}\n" + "\n".join(marks)), base=base, source=base)


def _mark(place: str) -> str:
    try:
        info = os.stat(place)
    except OSError:
        return ""
    return f"{info.st_dev}:{info.st_ino}:{info.st_mtime_ns}"


class Importer:
    """Brings archives, layouts, SIF files and images of registries into ``store``. Blocking."""

    def __init__(self, store: ImageStore, access: RegistryAccess) -> None:
        self._store = store
        self._access = access

    def add(self, reference: Reference, job: Job, *, refresh: bool = False) -> Image:
        """The image of ``reference``; from its source where it is not in the cache, or, with ``refresh``, in
        any case. Raises ``SandboxError``."""
        if reference.kind in (Kind.HOST, Kind.FOLDER):
            return base_image(reference)
        key = reference_key(reference)
        found = None if refresh else self._store.find(key)
        if found is not None:
            return found
        try:
            return self._add(reference, key, job, refresh=refresh)
        except OSError as error:
            raise bad_image(f"{reference.text} can't be brought into the cache: {error}") from error

    def _add(self, reference: Reference, key: str, job: Job, *, refresh: bool) -> Image:
        with self._store.adding(key, job):
            found = None if refresh else self._store.find(key)
            if found is None:
                found = self._import(reference, job)
                self._store.refer(key, reference.text, found)
        self._store.trim()
        return found

    def _import(self, reference: Reference, job: Job) -> Image:
        if reference.kind is Kind.REGISTRY and reference.place is not None:
            from rollserve.sandbox.images.registry import Registry  # an HTTP client, for who needs one

            with Registry(reference.place, self._access, job) as registry:
                return self._take(registry, registry.manifest(), reference, job)
        if reference.kind is Kind.LAYOUT:
            return self._take(*open_layout(reference.path, reference.tag), reference, job)
        if reference.kind is Kind.SIF:
            return self._squashed(reference, job)
        if reference.kind is not Kind.ARCHIVE:
            raise InvalidInput(f"{reference.text} can't be imported", field="image")
        with self._store.scratch() as scratch:
            found = open_archive(reference.path, reference.tag, job, scratch)
            if found is not None:
                return self._take(*found, reference, job)
        return self._root_archive(reference, job)

    def _take(self, blobs: Blobs, manifest: Manifest, reference: Reference, job: Job) -> Image:
        layers: list[Layer] = []
        chain = ""
        for number, layer in enumerate(manifest.layers, 1):
            chain = short(f"{chain} {layer.diff_id}")
            what = f"layer {number} of {len(manifest.layers)}"
            fill = _Fill(self._store, blobs, layer, self._store.stack(tuple(layers)), what, job)
            layers.append(self._store.layer(chain, fill, job))
        return self._store.keep(
            manifest.id, tuple(layers), config=manifest.config, source=reference.text, job=job
        )

    def _root_archive(self, reference: Reference, job: Job) -> Image:
        """A root file system is one layer; its own digest is known once it is read."""
        path = reference.path
        with self._store.scratch() as scratch, path.open("rb") as file:
            (scratch / "fs").mkdir()
            what = f"unpacking {path.name}"
            packed = Checked(file, job=job, what=what, total_bytes=path.stat().st_size)
            plain = Checked(decompressed(packed, str(path)))
            unpack(
                plain,
                scratch / "fs",
                what=str(path),
                owner=self._store.owner,
                lower=Stack(()),
                budget_bytes=self._store.max_bytes,
                whiteouts=False,
                lenient=False,
            )
            plain.drain()
            return self._adopt(scratch / "fs", plain.digest, reference, job)

    def _squashed(self, reference: Reference, job: Job) -> Image:
        with self._store.scratch() as scratch:
            job.tell(f"unpacking {reference.path.name}")
            digest = unpack_sif(reference.path, scratch, owner=self._store.owner, job=job)
            return self._adopt(scratch / "fs", digest, reference, job)

    def _adopt(self, folder: Path, digest: str, reference: Reference, job: Job) -> Image:
        name = short(f"root {digest}")
        layer = self._store.adopt(name, folder)
        return self._store.keep(name, (layer,), config=ImageConfig(), source=reference.text, job=job)


class _Fill:
    """Unpacks one layer into a folder, its digests checked."""

    def __init__(
        self, store: ImageStore, blobs: Blobs, layer: SourceLayer, lower: Stack, what: str, job: Job
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._layer = layer
        self._lower = lower
        self._what = what
        self._job = job

    def __call__(self, folder: Path) -> int:
        blob = self._layer.blob
        total = blob.size if blob.size >= 0 else None
        with self._blobs.open(blob) as source:
            packed = Checked(source, job=self._job, what=self._what, total_bytes=total)
            plain = Checked(decompressed(packed, self._what))
            size = unpack(
                plain,
                folder,
                what=self._what,
                owner=self._store.owner,
                lower=self._lower,
                budget_bytes=self._store.max_bytes,
                whiteouts=True,
                lenient=True,
            )
            plain.drain()
            packed.drain()
        if blob.digest:
            packed.verify(blob.digest, self._what, size_bytes=total)
        plain.verify(self._layer.diff_id, f"the content of {self._what}")
        return size
