"""The server without its HTTP, wired."""

from __future__ import annotations

import fcntl
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

from rollserve.backend.engine_control import make_control
from rollserve.backend.registry import make_backend
from rollserve.build.callbacks import CallbackPoster
from rollserve.build.catalogs import make_catalogs, make_hosts
from rollserve.build.probes import check_tokenizer, probe, probe_template
from rollserve.build.worker import make_payloads, stage_slots, worker_command
from rollserve.config import Settings
from rollserve.errors import ConfigError
from rollserve.executor.channel import MAX_UNSENT_BYTES
from rollserve.executor.local import LocalExecutor
from rollserve.gateway.samples import build_samples
from rollserve.rollouts.coordinator import Coordinator
from rollserve.rollouts.ports import Ports
from rollserve.store.base import Store
from rollserve.store.ops.groups import MAX_TASK_CHARS
from rollserve.store.sql import SqlStore
from rollserve.store.task_file import open_task_file
from rollserve.usercode.curriculum import HostedCurriculum
from rollserve.usercode.filters import HostedFilters

MAX_SOCKET_PATH = 80
"""Of the folder of a Unix socket: the kernel takes 107 bytes in all."""


@contextmanager
def owned(data_dir: Path) -> Iterator[None]:
    """One server a data folder. Raises ``ConfigError`` when another one has it, or it can't be made."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (data_dir / "server.lock").open("w")
    except OSError as error:
        raise ConfigError(f"can't use {data_dir}: {error}", field="data_dir") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"another server is running on {data_dir}",
                field="data_dir",
                hint="stop it, or give this one another --data-dir",
            ) from error
        yield


@contextmanager
def socket_folder(data_dir: Path) -> Iterator[Path]:
    """A private folder for the workers' socket; emptied of what a killed server left."""
    folder = data_dir.absolute() / "run"
    short = len(str(folder)) <= MAX_SOCKET_PATH
    place = folder if short else Path(tempfile.mkdtemp(prefix="rollserve-"))
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(mode=0o700)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def make_executor(settings: Settings, sockets: Path) -> LocalExecutor:
    """A worker that is sent as many large tasks as it holds at once must not be taken for one that does
    not read."""
    settings_file = sockets / "worker.json"
    settings_file.write_text(settings.model_dump_json(exclude={"store": {"url"}}))
    return LocalExecutor(
        count=settings.workers.count,
        command=worker_command(sys.executable, settings_file),
        socket_dir=sockets,
        log_dir=settings.data_dir.absolute() / "logs",
        max_unsent_bytes=max(MAX_UNSENT_BYTES, stage_slots(settings).capacity * MAX_TASK_CHARS),
    )


@asynccontextmanager
async def open_coordinator(settings: Settings) -> AsyncIterator[tuple[Coordinator, Store]]:
    """The server without its HTTP, running; leaving stops it. Raises ``ConfigError`` before anything is
    started."""
    async with AsyncExitStack() as stack:
        stack.enter_context(owned(settings.data_dir))
        sockets = stack.enter_context(socket_folder(settings.data_dir))
        hosts = make_hosts(settings)
        stack.push_async_callback(hosts.close)
        await hosts.start()
        store = SqlStore(
            settings.store_url,
            synchronous=settings.store.synchronous,
            keep_events=settings.store.keep_events,
        )
        await store.open()
        stack.push_async_callback(store.close)
        filters = HostedFilters(hosts)
        poster = CallbackPoster(settings.delivery.callback_networks)
        stack.push_async_callback(poster.close)
        coordinator = Coordinator(
            Ports(
                store=store,
                payloads=make_payloads(settings),
                executor=make_executor(settings, sockets),
                settings=settings,
                check_task=make_catalogs(settings, hosts).check_task,
                probe_backend=probe,
                open_backend=make_backend,
                open_control=make_control,
                check_tokenizer=check_tokenizer,
                probe_template=probe_template,
                build_samples=build_samples,
                open_tasks=partial(open_task_file, settings.source_dir),
                check_function=filters.check,
                keeps=filters.keeps,
                next_tasks=HostedCurriculum(hosts).next_tasks,
                poster=poster,
            )
        )
        stack.push_async_callback(coordinator.stop, settings.workers.shutdown_grace_s)
        await coordinator.start()
        yield coordinator, store
