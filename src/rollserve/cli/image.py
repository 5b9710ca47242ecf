"""``rollserve image``: add, build, list and prune the images of this machine."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from rollserve import config
from rollserve.build.data_dir import check_data_dir
from rollserve.build.images import image_runtime
from rollserve.cli.output import counted, err, local_time, out, print_json, table
from rollserve.cli.settings import flags
from rollserve.errors import InvalidInput
from rollserve.sandbox.images.base import Image, Job, Report
from rollserve.sandbox.images.build import BuildPlan
from rollserve.sandbox.images.shelf import ImageShelf
from rollserve.sandbox.images.store import ImageStore, name_key

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SHORT = 12
T = TypeVar("T")


def load(path: Path | None, data_dir: Path | None) -> config.Settings:
    """Raises ``ConfigError``, also for a data folder that can't be used."""
    settings = config.load(config=path, overrides=flags({"data_dir": data_dir}, []))
    check_data_dir(settings.data_dir)
    return settings


def plan(folder: Path, file: Path | None, arguments: Sequence[str], *, network: bool) -> BuildPlan:
    """Raises ``InvalidInput``."""
    pairs = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals:
            raise InvalidInput(f"--build-arg wants NAME=VALUE, got {argument!r}")
        pairs[name] = value
    recipe = (file or folder / "Dockerfile").absolute()
    return BuildPlan(recipe, context=folder.absolute(), arguments=pairs, network=network)


def located(reference: str) -> str:
    """Where one names a file as it lies from here, its whole path."""
    return str(Path(reference).absolute()) if Path(reference).exists() else reference


async def add(
    settings: config.Settings, reference: str, *, name: str | None, refresh: bool, as_json: bool
) -> None:
    text = located(reference)

    async def work(shelf: ImageShelf, job: Job) -> Image:
        image = await shelf.add(text, job, refresh=refresh)
        if image.base and not image.layers:
            raise InvalidInput(f"{text} needs no place in the cache: tasks can name it as it is")
        return image

    await _make(settings, work, name=name, as_json=as_json)


async def build(settings: config.Settings, steps: BuildPlan, *, name: str | None, as_json: bool) -> None:
    await _make(settings, lambda shelf, job: shelf.build(steps, job), name=name, as_json=as_json)


async def show(settings: config.Settings, *, as_json: bool) -> None:
    async with _shelf(settings) as shelf:
        store = shelf.store
        found = [_facts(store, image, used_at) for image, used_at in await asyncio.to_thread(store.images)]
        used = await asyncio.to_thread(store.used_bytes)
    if as_json:
        print_json({"images": found, "used_bytes": used, "max_bytes": store.max_bytes})
        return
    rows = [
        (
            one["id"][:_SHORT],
            _size(one["size_bytes"]),
            local_time(one["used_at"]),
            ", ".join(one["names"]),
            one["source"],
        )
        for one in found
    ]
    table(("image", "size", "last used", "names", "made from"), rows)
    out.print(f"{counted(len(found), 'image')}, {_size(used)} of {_size(store.max_bytes)}")


async def prune(settings: config.Settings, max_gb: float | None, *, as_json: bool) -> None:
    async with _shelf(settings) as shelf:
        store, job = shelf.store, Job()
        before = await asyncio.to_thread(store.used_bytes)
        bound = store.max_bytes if max_gb is None else int(max_gb * 1e9)
        removed = await _stoppable(asyncio.to_thread(store.prune, bound, job), job)
        freed = before - await asyncio.to_thread(store.used_bytes)
    if as_json:
        print_json({"removed": removed, "freed_bytes": freed})
    else:
        out.print(f"{counted(removed, 'image')} removed, {_size(freed)} freed")


async def _make(
    settings: config.Settings,
    work: Callable[[ImageShelf, Job], Awaitable[Image]],
    *,
    name: str | None,
    as_json: bool,
) -> None:
    if name is not None and not _NAME.fullmatch(name):
        raise InvalidInput(f"{name!r} is no name for an image", hint="letters, digits, dot, dash, underscore")
    async with _shelf(settings) as shelf:
        with _progress() as report:
            job = Job(report=report)
            image = await _stoppable(work(shelf, job), job)
        if name is not None:
            await asyncio.to_thread(_call, shelf.store, name, image)
        facts = await asyncio.to_thread(_facts, shelf.store, image, image.created_at)
    if as_json:
        print_json(facts)
    else:
        called = f", called {name}" if name else ""
        layers = counted(len(image.layers), "layer")
        out.print(f"sha256:{image.id[:_SHORT]}{called}: {_size(image.size_bytes)} in {layers}")


async def _stoppable(work: Awaitable[T], job: Job) -> T:
    """Ctrl-C ends the threads of the work too."""
    try:
        return await work
    except asyncio.CancelledError:
        job.stop.set()
        raise


@asynccontextmanager
async def _shelf(settings: config.Settings) -> AsyncIterator[ImageShelf]:
    runtime = image_runtime(settings)
    try:
        yield runtime.images
    finally:
        await runtime.close()


def _call(store: ImageStore, name: str, image: Image) -> None:
    with store.adding(name_key(name), Job()):
        store.refer(name_key(name), name, image)


def _facts(store: ImageStore, image: Image, used_at: float) -> dict[str, Any]:
    texts = [ref for ref in store.refs() if ref.image_id == image.id]
    return {
        "id": image.id,
        "names": [ref.text for ref in texts if ref.key == name_key(ref.text)],
        "references": [ref.text for ref in texts if ref.key != name_key(ref.text)],
        "source": image.source,
        "size_bytes": image.size_bytes,
        "layers": len(image.layers),
        "env": image.config.env,
        "workdir": image.config.workdir,
        "user": image.config.user,
        "created_at": image.created_at,
        "used_at": used_at,
    }


@contextmanager
def _progress() -> Iterator[Report]:
    """A bar on a terminal; elsewhere a line for each new thing that is done. All on stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bars:
        bar = bars.add_task("", total=None)
        last = ""

        def report(what: str, done_bytes: int, total_bytes: int | None) -> None:
            nonlocal last
            if not err.is_terminal and what != last:
                err.print(what, markup=False, soft_wrap=True)
            last = what
            bars.update(bar, description=what, completed=done_bytes, total=total_bytes)

        yield report


def _size(size_bytes: int) -> str:
    if size_bytes >= 10**9:
        return f"{size_bytes / 1e9:.1f} GB"
    return f"{size_bytes / 1e6:.1f} MB"
