"""The images of one runtime in one process: each is fetched, built and prepared once, however many ask at
once, and kept from removal while a sandbox of it is open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rollserve.errors import InvalidInput
from rollserve.sandbox.images.base import Image, Job, bad_image
from rollserve.sandbox.images.bench import Bench
from rollserve.sandbox.images.build import Builder, BuildPlan, read_recipe
from rollserve.sandbox.images.importing import Importer
from rollserve.sandbox.images.prepare import prepared
from rollserve.sandbox.images.recipe import parse_recipe
from rollserve.sandbox.images.reference import Kind, Reference, RegistryAccess, parse
from rollserve.sandbox.images.sif import check_tool
from rollserve.sandbox.images.store import ImageStore, Lease

_TRIES = 3
_MOST_KNOWN = 4096
_Key = tuple[str, tuple[str, ...]]


@dataclass(frozen=True)
class ImageSettings:
    """``folder`` is the cache, which several servers may share. ``prepare_s`` is the time-out of a task's
    prepare steps together, ``step_s`` of one RUN of a recipe."""

    folder: Path
    max_bytes: int = 50 << 30
    prepare_s: float = 600.0
    step_s: float = 1800.0
    access: RegistryAccess = field(default_factory=RegistryAccess)


@dataclass
class _Held:
    lease: Lease
    sandboxes: int = 0


class _Once:
    """Of several who let go, the first does."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action

    def __call__(self) -> None:
        action, self._action = self._action, None
        if action is not None:
            action()


class ImageShelf:
    """``bench`` is the runtime's; ``flat`` says that it takes images of one folder only. Call it on one event
    loop; ``check`` and ``add`` block."""

    def __init__(self, settings: ImageSettings, *, user: int, bench: Bench, flat: bool = False) -> None:
        self._settings = settings
        self._flat = flat
        self._bench = bench
        self.store = ImageStore(settings.folder, user=user, max_bytes=settings.max_bytes)
        self._importer = Importer(self.store, settings.access)
        self._builder = Builder(self.store, self._importer, bench)
        self._known: dict[_Key, Image] = {}
        self._making: dict[_Key, tuple[asyncio.Task[Image], Job]] = {}
        self._held: dict[str, _Held] = {}

    def check(self, text: str) -> Reference:
        """Raises ``InvalidInput`` for what can be seen to be no image without fetching anything."""
        reference = parse(text)
        if reference.kind is Kind.STORED and self.store.stored(reference.name) is None:
            raise InvalidInput(
                f"no image {text!r} in the cache",
                field="image",
                hint="`rollserve image list` shows what is there; docker://HOST/NAME:TAG names one elsewhere",
            )
        if reference.kind is Kind.RECIPE:
            parse_recipe(read_recipe(reference.path), {})
        if reference.kind is Kind.SIF:
            check_tool()
        return reference

    async def take(self, text: str, steps: tuple[str, ...] = ()) -> tuple[Image, Callable[[], None]]:
        """The image after the prepare ``steps``, and what to call (once or more often) when its sandbox is
        closed. When this is cancelled, the making goes on for the next who asks. Raises ``InvalidInput``,
        ``SandboxError``."""
        for _ in range(_TRIES):
            image = await self._image((text, steps))
            if await self._hold(image):
                return image, _Once(partial(self._let_go, image))
            self._known.pop((text, steps), None)
        raise bad_image(f"{text} is removed from the cache as fast as it is made", hint="raise images.max_gb")

    async def add(self, text: str, job: Job, *, refresh: bool = False) -> Image:
        reference = await asyncio.to_thread(self.check, text)
        if reference.kind is Kind.RECIPE:
            return await self.build(BuildPlan(reference.path, step_s=self._settings.step_s), job)
        if reference.kind is Kind.STORED:
            found = await asyncio.to_thread(self.store.stored, reference.name)
            if found is None:
                raise bad_image(f"{text} was removed from the cache")
            return found
        return await asyncio.to_thread(self._importer.add, reference, job, refresh=refresh)

    async def build(self, plan: BuildPlan, job: Job) -> Image:
        image = await self._builder.build(plan, job)
        await asyncio.to_thread(self.store.trim)
        return image

    async def close(self) -> None:
        """Stop what is being made."""
        tasks = []
        for task, job in self._making.values():
            job.stop.set()
            task.cancel()
            tasks.append(task)
        await asyncio.gather(*tasks, return_exceptions=True)
        for held in self._held.values():
            held.lease.close()
        self._held.clear()

    async def _image(self, key: _Key) -> Image:
        known = self._known.get(key)
        if known is not None:
            return known
        if key not in self._making:
            job = Job()
            task = asyncio.create_task(self._make(key, job))
            self._making[key] = task, job
            task.add_done_callback(lambda task: self._made(key, task))
        return await asyncio.shield(self._making[key][0])

    async def _make(self, key: _Key, job: Job) -> Image:
        text, steps = key
        image = await self.add(text, job)
        if steps:
            seconds = self._settings.prepare_s
            image = await prepared(self.store, self._bench, image, steps, timeout_s=seconds, job=job)
            await asyncio.to_thread(self.store.trim)
        return await asyncio.to_thread(self.store.flat, image, job) if self._flat else image

    def _made(self, key: _Key, task: asyncio.Task[Image]) -> None:
        del self._making[key]
        if not task.cancelled() and task.exception() is None:
            if len(self._known) >= _MOST_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[key] = task.result()

    async def _hold(self, image: Image) -> bool:
        held = self._held.get(image.id)
        if held is None:
            lease = await asyncio.to_thread(self.store.lease, image) if image.layers else Lease(image, -1)
            if lease is None:
                return False
            held = self._held.setdefault(image.id, _Held(lease))
            if held.lease is not lease:  # somebody was faster
                lease.close()
        held.sandboxes += 1
        return True

    def _let_go(self, image: Image) -> None:
        held = self._held.get(image.id)
        if held is None:
            return
        held.sandboxes -= 1
        if held.sandboxes == 0:
            held.lease.close()
            del self._held[image.id]
