"""The server in the foreground: coordinator and HTTP, from the settings to the last request."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rollserve import stopping
from rollserve.api.app import make_app
from rollserve.api.auth import Auth, ensure_admin_key, key_required
from rollserve.build.catalogs import NO_SANDBOX, check_default_runtime
from rollserve.build.data_dir import check_data_dir
from rollserve.build.http import HttpServer, bind, url_of
from rollserve.build.network import check_reach
from rollserve.build.process import check_open_files
from rollserve.build.server import open_coordinator
from rollserve.build.session_address import check_session_address
from rollserve.config import Settings
from rollserve.errors import InfrastructureFailure
from rollserve.rollouts.coordinator import Coordinator


@dataclass(frozen=True, kw_only=True)
class Ready:
    """What to tell who started the server. ``new_admin_key`` is set at the first start only."""

    url: str
    workers: int
    data_dir: Path
    new_admin_key: str | None
    key_required: bool
    unsafe_runtime: str | None


@asynccontextmanager
async def open_server(settings: Settings) -> AsyncIterator[tuple[Coordinator, Ready]]:
    """A running server; leaving stops it: waiting requests are let go, then HTTP ends, then the
    workers. Raises ``ConfigError`` before anything is started."""
    check_data_dir(settings.data_dir)
    check_reach(settings)
    check_session_address(settings)
    report = check_default_runtime(settings)
    check_open_files(settings)
    async with AsyncExitStack() as stack:
        sock = bind(settings.api.host, settings.api.port)
        stack.callback(sock.close)
        coordinator, store = await stack.enter_async_context(open_coordinator(settings))
        key = await ensure_admin_key(store)
        required = key_required(settings.api)
        http = HttpServer(make_app(coordinator, settings.api, Auth(store, required=required)), sock)
        stack.push_async_callback(http.stop)
        await http.start()
        stack.callback(coordinator.begin_stop)
        unsafe = not report.isolated and report.name != NO_SANDBOX
        yield (
            coordinator,
            Ready(
                url=url_of(sock),
                workers=settings.workers.count,
                data_dir=settings.data_dir,
                new_admin_key=key,
                key_required=required,
                unsafe_runtime=report.name if unsafe else None,
            ),
        )


async def run_server(settings: Settings, announce: Callable[[Ready], None]) -> None:
    """Until SIGINT, SIGTERM or SIGHUP. Raises ``InfrastructureFailure`` when the scheduler has failed: a
    server that takes groups and runs none is worse than one that is started again."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, *stopping.asked_by()):
        loop.add_signal_handler(number, stop.set)
    async with open_server(settings) as (coordinator, ready):
        announce(ready)
        ends = [asyncio.create_task(event.wait()) for event in (stop, coordinator.failed)]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        if coordinator.failed.is_set():
            raise InfrastructureFailure("the server's scheduler has failed; see its log", operation="serve")
