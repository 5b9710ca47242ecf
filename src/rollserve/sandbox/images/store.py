"""The cache of images on disk, shared by every process of this machine that is given the same folder.

::

    FOLDER/uid-N/            what sandboxes that run as user N start from
      cache.lock             held shared while something is added, exclusively while something is removed
      images/ID.json         one image; held shared by whoever has a sandbox of it; its time is its last use
      layers/NAME/fs         one unpacked layer, NAME/size its size; never changed once it has its name
      refs/DIGEST.json       which image a reference, or a name, led to
      locks/KEY              so that what several want at once is made once
      tmp/…                  what is being made; renamed when it is whole, removed with the next clean-up

Whatever dies at whatever moment leaves something below ``tmp`` at most.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import msgspec

from rollserve.errors import InvalidInput
from rollserve.sandbox.image import first_barred
from rollserve.sandbox.images.base import Image, ImageConfig, Job, Layer, bad_image
from rollserve.sandbox.images.disk import merge, settle
from rollserve.sandbox.images.locks import holding, try_lock
from rollserve.sandbox.images.stack import Stack
from rollserve.sandbox.removal import remove_tree

T = TypeVar("T", bound=msgspec.Struct)

_NAME_DIGITS = 32
_OPTION_BYTES = 3800
"""What the kernel takes as an overlay's options, less the rest of them."""

_PER_LAYER_BYTES = 10
"""bubblewrap's own prefix and a colon."""


class Ref(msgspec.Struct, frozen=True, kw_only=True):
    """``key`` is what was looked up, ``text`` how people write it."""

    key: str
    text: str
    image_id: str


@dataclass(frozen=True)
class Lease:
    """An image that is not removed until ``close``."""

    image: Image
    fd: int

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class ImageStore:
    """``user`` is who sandboxes run as, ``max_bytes`` what all layers may take before those least recently
    used go. Everything here blocks. Thread-safe: what it knows is on disk."""

    def __init__(self, folder: Path, *, user: int, max_bytes: int) -> None:
        self.root = folder.absolute() / f"uid-{user}"
        self.user = user
        self.owner = user if user != os.geteuid() else None
        self.max_bytes = max_bytes

    # -- looking ------------------------------------------------------------------------------

    def find(self, key: str) -> Image | None:
        """The image that a reference led to, as far as it is still there."""
        ref = self._read(self._ref_path(key), Ref)
        return None if ref is None else self.get(ref.image_id)

    def get(self, image_id: str) -> Image | None:
        return self._read(self._image_path(image_id), Image)

    def stored(self, name: str) -> Image | None:
        """By its name, or by the first digits of its id. Raises ``InvalidInput`` when several fit."""
        found = self.find(name_key(name))
        if found is not None or set(name) - set("0123456789abcdef") or len(name) < 12:
            return found
        fitting = [path.stem for path in self._images() if path.stem.startswith(name)]
        if len(fitting) > 1:
            raise InvalidInput(f"{len(fitting)} images begin with {name}", field="image")
        return self.get(fitting[0]) if fitting else None

    def images(self) -> list[tuple[Image, float]]:
        """With the time of its last use, the latest first."""
        found = []
        for path in self._images():
            image = self._read(path, Image)
            if image is not None:
                found.append((image, _used_at(path)))
        return sorted(found, key=lambda one: -one[1])

    def refs(self) -> list[Ref]:
        found = (self._read(path, Ref) for path in sorted((self.root / "refs").glob("*.json")))
        return [ref for ref in found if ref is not None]

    def folder(self, layer: Layer) -> Path:
        return self.root / "layers" / layer.name / "fs"

    def stack(self, layers: tuple[Layer, ...]) -> Stack:
        return Stack(self.folder(layer) for layer in layers)

    def used_bytes(self) -> int:
        """Of all layers, those of no image too: a build that failed leaves its steps for the next try."""
        found = (self.stored_layer(path.name) for path in (self.root / "layers").glob("*"))
        return sum(layer.size_bytes for layer in found if layer is not None)

    def lease(self, image: Image) -> Lease | None:
        """Keep it while it is in use; None when it was removed meanwhile."""
        if image.base and not image.layers:
            return Lease(image, -1)
        path = self._image_path(image.id)
        try:
            fd = try_lock(path, shared=True)
            if fd is not None:
                os.utime(fd)
        except FileNotFoundError:
            return None
        return None if fd is None else Lease(image, fd)

    @property
    def empty(self) -> Path:
        """A folder that stays empty, for an overlay that has nothing below."""
        return self.root / "empty"

    # -- adding -------------------------------------------------------------------------------

    @contextmanager
    def adding(self, key: str, job: Job) -> Iterator[None]:
        """Alone with ``key``, and safe from clean-ups."""
        self.make_folders()
        with (
            holding(self.root / "cache.lock", shared=True, job=job),
            holding(self.root / "locks" / short(key), shared=False, job=job),
        ):
            yield

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A fresh folder that goes when it is left. Only within ``adding``."""
        folder = self.root / "tmp" / uuid4().hex
        folder.mkdir(mode=0o755)
        try:
            yield folder
        finally:
            remove_tree(folder)

    def make_writable(self, folder: Path) -> None:
        """A folder that a sandbox may write to."""
        folder.mkdir(mode=0o755)
        if self.owner is not None:
            os.chown(folder, self.owner, self.owner)

    def layer(self, name: str, fill: Callable[[Path], int], job: Job) -> Layer:
        """The layer ``name`` (a digest in hexadecimal), filled by ``fill(folder)``, which returns its size,
        unless it is there. Only within ``adding``."""
        name = name[:_NAME_DIGITS]
        with holding(self.root / "locks" / f"layer-{name}", shared=False, job=job):
            found = self.stored_layer(name)
            if found is not None:
                return found
            with self.scratch() as folder:
                (folder / "fs").mkdir()
                size = fill(folder / "fs")
                return self._keep_layer(name, folder, size)

    def adopt(self, name: str, upper: Path) -> Layer:
        """Make the upper folder of an overlay, in a scratch folder, a layer."""
        name = name[:_NAME_DIGITS]
        found = self.stored_layer(name)
        if found is not None:
            return found
        with self.scratch() as folder:
            upper.rename(folder / "fs")
            return self._keep_layer(name, folder, settle(folder / "fs", owner=self.owner))

    def keep(
        self,
        image_id: str,
        layers: tuple[Layer, ...],
        *,
        config: ImageConfig,
        source: str,
        base: str = "",
        job: Job,
    ) -> Image:
        """Record an image whose layers are there; one of that id that is known stays as it is. Too many
        layers for one overlay are merged into one."""
        known = self.get(image_id)
        if known is not None:
            return known
        if not base:
            layers = self._fitting(layers, job)
        image = Image(
            id=image_id, layers=layers, base=base, config=config, source=source, created_at=time.time()
        )
        self._write(self._image_path(image_id), image)
        return image

    def flat(self, image: Image, job: Job) -> Image:
        """An image of one folder that shows what ``image`` does. Raises ``SandboxError``."""
        if len(image.layers) + bool(image.base) <= 1:
            return image
        if image.base:
            raise bad_image(
                f"prepare steps on {image.source} make no single folder",
                hint="`rollserve image add` an archive of it, or use bubblewrap",
            )
        name = short(f"flat:{image.id}")
        with self.adding(name, job):
            layer = self._merged(image.layers, job)
            return self.keep(name, (layer,), config=image.config, source=image.source, job=job)

    def refer(self, key: str, text: str, image: Image) -> None:
        self._write(self._ref_path(key), Ref(key=key, text=text, image_id=image.id))

    def make_folders(self) -> None:
        """Raises ``SandboxError`` where sandboxes could not enter."""
        for name in ("images", "layers", "refs", "locks", "tmp", "empty"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        barred = first_barred(self.root / "layers", uid=self.user)
        if barred is not None:
            raise bad_image(
                f"the image cache {self.root} can't be entered by user {self.user}, as whom sandboxes run",
                hint=f"chmod o+x {barred}, or set images.dir to another place",
            )

    def fit(self, layers: tuple[Layer, ...], *, below: str = "") -> bool:
        """Whether one overlay can hold so many, each by the folder ``below`` in it."""
        more = len(below) + _PER_LAYER_BYTES
        length = sum(len(str(self.folder(layer))) + more for layer in layers)
        return length <= _OPTION_BYTES

    def _fitting(self, layers: tuple[Layer, ...], job: Job) -> tuple[Layer, ...]:
        if self.fit(layers):
            return layers
        return (self._merged(layers, job),)

    def _merged(self, layers: tuple[Layer, ...], job: Job) -> Layer:
        """One layer that shows what ``layers`` do. Only within ``adding``."""
        name = short("merged:" + ":".join(layer.name for layer in layers))
        folders = [self.folder(layer) for layer in layers]

        def fill(folder: Path) -> int:
            merge(folders, folder, owner=self.owner)
            return sum(layer.size_bytes for layer in layers)

        return self.layer(name, fill, job)

    def stored_layer(self, name: str) -> Layer | None:
        name = name[:_NAME_DIGITS]
        try:
            return Layer(name=name, size_bytes=int((self.root / "layers" / name / "size").read_text()))
        except FileNotFoundError:
            return None

    def _keep_layer(self, name: str, folder: Path, size_bytes: int) -> Layer:
        (folder / "size").write_text(str(size_bytes))
        folder.rename(self.root / "layers" / name)
        folder.mkdir()  # for who removes the scratch folder
        return Layer(name=name, size_bytes=size_bytes)

    # -- removing -----------------------------------------------------------------------------

    def trim(self) -> int:
        """Back under ``max_bytes``, unless somebody is adding or removing; returns how many images went."""
        if self.used_bytes() <= self.max_bytes:
            return 0
        with self._alone() as alone:
            return self._evict(self.max_bytes) if alone else 0

    def reap(self) -> int:
        """Remove what the dead were making, unless somebody is adding or removing; returns how many things
        that were."""
        with self._alone() as alone:
            return self._sweep_unfinished() if alone else 0

    def prune(self, max_bytes: int, job: Job) -> int:
        """Remove what is not in use, least recently used first, until all takes ``max_bytes``; and what
        nobody refers to. Waits until nobody is adding. Returns how many images went."""
        self.make_folders()
        with holding(self.root / "cache.lock", shared=False, job=job):
            return self._evict(max_bytes)

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Whether nobody else adds or removes, and nobody will meanwhile."""
        try:
            fd = try_lock(self.root / "cache.lock", shared=False)
        except FileNotFoundError:
            fd = None
        try:
            yield fd is not None
        finally:
            if fd is not None:
                os.close(fd)

    def _evict(self, max_bytes: int) -> int:
        known = [image for image, _ in self.images()]
        removed = 0
        while known and sum(layer.size_bytes for layer in self._layers_of(known)) > max_bytes:
            gone = next((image for image in reversed(known) if self._drop(image)), None)
            if gone is None:
                break
            known.remove(gone)
            removed += 1
        self._sweep()
        return removed

    def _drop(self, image: Image) -> bool:
        """True when nobody uses it and it is gone."""
        path = self._image_path(image.id)
        fd = try_lock(path, shared=False)
        if fd is None:
            return False
        path.unlink()
        os.close(fd)
        return True

    def _sweep(self) -> None:
        """Layers and references of no image, and what the dead were making."""
        known = [image for image, _ in self.images()]
        wanted = {layer.name for layer in self._layers_of(known)}
        for folder in (self.root / "layers").iterdir():
            if folder.name not in wanted:
                doomed = self.root / "tmp" / uuid4().hex
                folder.rename(doomed)
        ids = {image.id for image in known}
        for ref in self.refs():
            if ref.image_id not in ids:
                self._ref_path(ref.key).unlink()
        self._sweep_unfinished()
        for lock in (self.root / "locks").iterdir():
            lock.unlink()

    def _sweep_unfinished(self) -> int:
        found = list((self.root / "tmp").iterdir())
        for rest in found:
            if rest.is_dir():
                remove_tree(rest)
            else:
                rest.unlink()
        return len(found)

    # -- files --------------------------------------------------------------------------------

    def _layers_of(self, images: Iterator[Image] | list[Image]) -> list[Layer]:
        return list({layer.name: layer for image in images for layer in image.layers}.values())

    def _images(self) -> list[Path]:
        return sorted((self.root / "images").glob("*.json"))

    def _image_path(self, image_id: str) -> Path:
        return self.root / "images" / f"{image_id}.json"

    def _ref_path(self, key: str) -> Path:
        return self.root / "refs" / f"{short(key)}.json"

    def _read(self, path: Path, kind: type[T]) -> T | None:
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _write(self, path: Path, value: msgspec.Struct) -> None:
        fresh = self.root / "tmp" / f"{uuid4().hex}.json"
        fresh.write_bytes(msgspec.json.encode(value))
        fresh.rename(path)


def name_key(name: str) -> str:
    return f"name:{name}"


def short(text: str) -> str:
    """A name for a file from any text."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def _used_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
