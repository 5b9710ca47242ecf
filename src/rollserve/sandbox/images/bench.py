"""Where an image is worked on: a sandbox of it whose writes are kept. The runtime's part, seen from here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from rollserve.sandbox.base import Sandbox
from rollserve.sandbox.capture import Capture
from rollserve.sandbox.images.base import Image, Job, bad_image
from rollserve.sandbox.images.store import ImageStore

T = TypeVar("T")

_SAID_BYTES = 4000
_SHOWN_CHARS = 200


@dataclass(frozen=True)
class Writes:
    """Folders of one file system: what the sandbox writes lands in ``upper``, laid out as the root is;
    ``work`` is the overlay's own; ``empty`` holds nothing. ``network`` gives it the machine's."""

    upper: Path
    work: Path
    empty: Path
    network: bool = False


@dataclass(frozen=True)
class BenchWork:
    """``commands`` one after the other, each in a shell of its own, in the image's working directory."""

    image: Image
    commands: tuple[str, ...]
    timeout_s: float
    env: dict[str, str]
    on_output: Callable[[bytes], None]
    what: str


class Bench(Protocol):
    async def work(self, work: BenchWork, writes: Writes) -> None:
        """Raises ``SandboxError`` with what the command said when one fails or takes too long. However it
        ends, nothing runs on."""


async def run_work(sandbox: Sandbox, work: BenchWork) -> None:
    """Do ``work`` in a sandbox that stands ready. Raises ``SandboxError``."""
    deadline = time.monotonic() + work.timeout_s
    for number, command in enumerate(work.commands, 1):
        said = Capture(_SAID_BYTES)

        def hear(data: bytes, said: Capture = said) -> None:
            said.feed(data)
            work.on_output(data)

        left_s = max(0.1, deadline - time.monotonic())
        code = await sandbox.run(command, timeout_s=left_s, on_output=hear)
        if code == 0:
            continue
        count = f" {number} of {len(work.commands)}" if len(work.commands) > 1 else ""
        ended = f"ended with code {code}" if code is not None else f"was not done in {work.timeout_s:g} s"
        shown = command if len(command) <= _SHOWN_CHARS else f"{command[:_SHOWN_CHARS]}…"
        raise bad_image(
            f"{work.what}{count} ({shown}) {ended}:\n{said.text().strip() or '(it said nothing)'}"
        )


@asynccontextmanager
async def in_thread(manager: AbstractContextManager[T], job: Job) -> AsyncIterator[T]:
    """A blocking context manager; when its entering is cancelled, ``job`` is stopped."""
    entering = asyncio.ensure_future(asyncio.to_thread(manager.__enter__))
    try:
        entered = await asyncio.shield(entering)
    except asyncio.CancelledError:
        job.stop.set()
        await asyncio.wait([entering])
        if entering.exception() is None:
            await asyncio.to_thread(manager.__exit__, None, None, None)
        raise
    try:
        yield entered
    finally:
        await asyncio.shield(asyncio.to_thread(manager.__exit__, None, None, None))


@asynccontextmanager
async def writing(store: ImageStore, job: Job, *, network: bool) -> AsyncIterator[Writes]:
    """Fresh folders for ``Writes``, which go when it is left. Only within ``store.adding``."""
    async with in_thread(store.scratch(), job) as scratch:
        writes = Writes(scratch / "upper", scratch / "work", store.empty, network)
        await asyncio.to_thread(_make, writes, store)
        yield writes


def _make(writes: Writes, store: ImageStore) -> None:
    for folder in (writes.upper, writes.work):
        store.make_writable(folder)
