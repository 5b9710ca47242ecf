"""Snapshots: what a sandbox has written so far, as a layer on its image."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import msgspec

from rollserve.cancelling import uninterrupted
from rollserve.sandbox.base import WORKDIR
from rollserve.sandbox.images.base import OPAQUE, Image, Job, bad_image
from rollserve.sandbox.images.bench import in_thread, writing
from rollserve.sandbox.images.store import ImageStore, short

_TMP = "tmp"


async def snapshotted(
    store: ImageStore, image: Image, copy: Callable[[Path], None], *, whole_tmp: bool
) -> Image:
    """``copy`` fills a folder with what was written on ``image`` (blocking, with a deadline of its own);
    ``whole_tmp`` says that its ``/tmp`` is all there is in ``/tmp``, whatever the image has there. When this
    is cancelled, the copying ends first. Raises ``SandboxError``."""
    job = Job()
    image_id = short(json.dumps(["snapshot", image.id, uuid4().hex]))
    async with (
        in_thread(store.adding(image_id, job), job),
        writing(store, job, network=False) as writes,
    ):
        await uninterrupted(asyncio.to_thread(copy, writes.upper))
        if whole_tmp and not image.base:
            await asyncio.to_thread(_hide_below, writes.upper / _TMP)
        layer = await asyncio.to_thread(store.adopt, image_id, writes.upper)
        layers = (*image.layers, layer)
        if image.base and not store.fit(layers, below=WORKDIR):
            raise bad_image(
                f"{len(layers)} layers upon each other are too many",
                hint="take snapshots of fewer forks of forks",
            )
        made = await asyncio.to_thread(
            store.keep,
            image_id,
            layers,
            config=msgspec.structs.replace(image.config, keeps_tmp=True),
            source=f"snapshot of {image.source or image.id}",
            base=image.base,
            job=job,
        )
    await asyncio.to_thread(store.trim)
    return made


def _hide_below(folder: Path) -> None:
    folder.mkdir(mode=0o1777, exist_ok=True)
    os.setxattr(folder, OPAQUE, b"y", follow_symlinks=False)
