"""Prepared layers: what a task's own steps make of an image, made once and kept."""

from __future__ import annotations

import asyncio
import json

from rollserve.sandbox.images.base import Image, Job
from rollserve.sandbox.images.bench import Bench, BenchWork, in_thread, writing
from rollserve.sandbox.images.store import ImageStore, short


def prepared_id(image: Image, steps: tuple[str, ...]) -> str:
    """The same image and the same steps are the same layer."""
    return short(json.dumps(["prepare", image.id, steps]))


async def prepared(
    store: ImageStore, bench: Bench, image: Image, steps: tuple[str, ...], *, timeout_s: float, job: Job
) -> Image:
    """``image`` after ``steps``, from the cache where somebody has made it. ``timeout_s`` is for all steps.
    Raises ``SandboxError`` with the output of the step that failed."""
    image_id = prepared_id(image, steps)
    found = await asyncio.to_thread(store.get, image_id)
    if found is not None:
        return found
    async with in_thread(store.adding(image_id, job), job):
        found = await asyncio.to_thread(store.get, image_id)
        if found is not None:
            return found
        async with writing(store, job, network=False) as writes:
            work = BenchWork(
                image=image,
                commands=steps,
                timeout_s=timeout_s,
                env={},
                on_output=lambda data: job.check(),
                what="prepare step",
            )
            await bench.work(work, writes)
            layer = await asyncio.to_thread(store.adopt, image_id, writes.upper)
        return await asyncio.to_thread(
            store.keep,
            image_id,
            (*image.layers, layer),
            config=image.config,
            source=f"{image.source} + {len(steps)} prepare steps",
            base=image.base,
            job=job,
        )
