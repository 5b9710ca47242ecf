"""Images of the cache in the store of a container engine: each is imported once, flat."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from rollserve.errors import SandboxError
from rollserve.sandbox.base import WORKDIR
from rollserve.sandbox.containers.engine import Engine
from rollserve.sandbox.images.base import Image, Job
from rollserve.sandbox.images.flat import write_tar
from rollserve.sandbox.images.shelf import ImageShelf
from rollserve.sandbox.rootfs import Rootfs, rootfs_of

IMPORT_TIMEOUT_S = 1800.0
_REPOSITORY = "localhost/rollserve-image"
_ID_DIGITS = 32
_FOLDERS = ("/tmp", "/proc", "/dev", "/sys", "/etc", "/run", WORKDIR)


@dataclass(frozen=True)
class Prepared:
    """An image that the engine has, by ``name``, and how a sandbox of it is set up."""

    name: str
    ids: tuple[int, int]
    workdir: str
    env: Mapping[str, str]


class EngineImages:
    """One process imports an image once; two may at the same time, and get the same."""

    def __init__(self, engine: Engine, shelf: ImageShelf) -> None:
        self._engine = engine
        self._shelf = shelf
        self._known: dict[str, Prepared] = {}
        self._lock = asyncio.Lock()

    async def prepared(self, image: Image) -> Prepared:
        """Raises ``SandboxError``. When this is cancelled, the next who asks begins anew."""
        known = self._known.get(image.id)
        if known is not None:
            return known
        async with self._lock:
            if image.id not in self._known:
                self._known[image.id] = await self._bring(image)
        return self._known[image.id]

    async def _bring(self, image: Image) -> Prepared:
        store = self._shelf.store
        layers = [store.folder(layer) for layer in image.layers]
        rootfs = await asyncio.to_thread(
            partial(rootfs_of, image, layers, uid=os.geteuid(), overlays=True, empty=store.empty)
        )
        prepared = _prepared(image, rootfs)
        if not await self._has(prepared.name):
            job = Job()
            folders = (*_FOLDERS, prepared.workdir)
            shown = [*([Path(image.base)] if image.base else ()), *layers]

            def write(stream: IO[bytes]) -> None:
                write_tar(shown, stream, ids=prepared.ids, folders=folders, job=job)

            try:
                await self._engine.feed(
                    "import",
                    "--change",
                    f"LABEL rollserve.image={image.id}",
                    "-",
                    prepared.name,
                    write=write,
                    timeout_s=IMPORT_TIMEOUT_S,
                )
            finally:
                job.stop.set()
        return prepared

    async def _has(self, name: str) -> bool:
        try:
            await self._engine.call("image", "inspect", "--format", "{{.Id}}", name)
        except SandboxError:
            return False
        return True


def _prepared(image: Image, rootfs: Rootfs) -> Prepared:
    return Prepared(
        name=f"{_REPOSITORY}:{image.id[:_ID_DIGITS]}",
        ids=rootfs.ids or (0, 0),
        workdir=rootfs.workdir,
        env=rootfs.env,
    )
