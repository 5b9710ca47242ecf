"""A worker, wired; and its process: ``python -m rollserve.build.worker`` (started by an executor)."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop

from rollserve.backend.member import PoolSettings
from rollserve.backend.pool import BackendPool
from rollserve.build.catalogs import Catalogs, make_catalogs, make_hosts
from rollserve.build.http import HttpServer, bind, url_of
from rollserve.build.logs import configure_logs
from rollserve.build.network import make_egress
from rollserve.build.process import tune_process
from rollserve.build.session_address import read_session_addresses
from rollserve.build.session_listener import session_listener
from rollserve.build.session_sockets import session_sockets
from rollserve.config import BackendsSettings, GatewaySettings, Settings
from rollserve.executor.base import BackendReport, FromWorker
from rollserve.executor.channel import Launch
from rollserve.executor.worker_main import follow_parent, read_launch, serve
from rollserve.gateway.bound import bounded
from rollserve.gateway.http import make_app
from rollserve.gateway.images import ImageBounds
from rollserve.gateway.policies import PoolFactory
from rollserve.gateway.service import GatewayService
from rollserve.records.policy import Policy
from rollserve.rollouts.clock import SystemClock
from rollserve.rollouts.stages import StageSlots
from rollserve.rollouts.warm import WarmRuntime
from rollserve.rollouts.worker import Worker
from rollserve.rollouts.worker_ports import WorkerPorts
from rollserve.sandbox.base import Runtime, SpareMaker
from rollserve.store.payload_files import FilePayloadStore

Tell = Callable[[FromWorker], object]

PRELOAD = ("renderers.configs", "renderers.reasoning", "rollserve.backend.vllm", "rollserve.backend.openai")

MIN_CALLS = 16_384
CALLS_PER_AGENT = 16


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """Everything an attempt needs on this machine, open."""

    ports: WorkerPorts
    gateway: GatewayService
    catalogs: Catalogs


def _pools(asked: BackendsSettings, tell: Tell) -> PoolFactory:
    settings = PoolSettings(
        quiet_s=asked.quiet_s,
        silent_s=asked.silent_s,
        slow_start_s=asked.slow_start_s,
        concurrency=asked.concurrency,
        read_cost=asked.read_cost,
        outlier_ratio=asked.outlier_ratio,
        routing=asked.routing,
    )

    def report(backend_id: str, ok: bool, detail: str) -> None:
        tell(BackendReport(backend_id=backend_id, ok=ok, detail=detail))

    def make(policy: Policy) -> BackendPool:
        return BackendPool(model=policy.spec.model, settings=settings, on_report=report)

    return make


@asynccontextmanager
async def open_workplace(settings: Settings, tell: Tell) -> AsyncIterator[Workplace]:
    """``tell`` is handed what the backend pools see. Leaving closes gateway, code hosts, sandboxes. Raises
    ``ConfigError``."""
    addresses = read_session_addresses(settings)
    hosts = make_hosts(settings)
    catalogs = make_catalogs(settings, hosts)
    gateway = GatewayService(_pools(settings.backends, tell), images=image_bounds(settings.gateway))
    sock = bind(settings.workers.gateway_host, 0)
    sessions = make_app(gateway, max_body_bytes=settings.api.max_body_mb << 20)
    app = bounded(sessions, most_calls(settings))
    http = HttpServer(app, sock)
    gateway.base_url = url_of(sock)
    runtimes = with_spares(catalogs.runtimes, most=settings.workers.spare_sandboxes)
    async with session_listener(addresses, bounded(sessions, most_calls(settings))) as address:
        ports = WorkerPorts(
            runtimes=runtimes,
            default_runtime=catalogs.default_runtime,
            gateway=gateway,
            payloads=make_payloads(settings),
            agents=catalogs.agents,
            graders=catalogs.graders,
            open_toolbox=catalogs.tools.open,
            serve_session=session_sockets(app),
            open_network=make_egress(settings).serve,
            session_addresses={} if address is None else dict.fromkeys(those_that_dial(runtimes), address),
        )
        try:
            await hosts.start()
            await http.start()
            yield Workplace(ports=ports, gateway=gateway, catalogs=catalogs)
        finally:
            await gateway.close()
            await http.stop()
            await hosts.close()
            for runtime in runtimes.values():
                await runtime.close()


def those_that_dial(runtimes: Mapping[str, Runtime]) -> list[str]:
    """Whose sandboxes reach their session at an address. Blocking, as the reports of runtimes are."""
    return [name for name, runtime in runtimes.items() if "dial" in runtime.report().can]


def with_spares(runtimes: Mapping[str, Runtime], *, most: int) -> dict[str, Runtime]:
    """Those whose sandboxes can be made ahead do so."""
    clock = SystemClock()
    return {
        name: WarmRuntime(runtime, most=most, clock=clock) if isinstance(runtime, SpareMaker) else runtime
        for name, runtime in runtimes.items()
    }


def image_bounds(settings: GatewaySettings) -> ImageBounds:
    return ImageBounds(
        image_bytes=settings.image_mb << 20,
        request_images=settings.request_images,
        session_bytes=settings.session_images_mb << 20,
    )


def most_calls(settings: Settings) -> int:
    """That a worker's gateway holds at once: an agent may have a few sub-agents, each with a call."""
    return max(MIN_CALLS, settings.workers.run_slots * CALLS_PER_AGENT)


def make_payloads(settings: Settings) -> FilePayloadStore:
    return FilePayloadStore(settings.payload_dir, fsync=settings.store.synchronous == "full")


def stage_slots(settings: Settings) -> StageSlots:
    workers = settings.workers
    return StageSlots(
        init=workers.init_slots, ready=workers.ready_slots, run=workers.run_slots, grade=workers.grade_slots
    )


async def run_worker(settings: Settings, launch: Launch) -> None:
    """Serve the server that launched this process until it has enough of it, or is gone."""
    told: list[Worker] = []

    def tell(message: FromWorker) -> None:
        for worker in told:
            worker.send(message)

    async with open_workplace(settings, tell) as place:
        worker = Worker(
            place.ports,
            worker_id=launch.worker_id,
            slots=stage_slots(settings),
            gateway_url=place.gateway.base_url,
        )
        told.append(worker)
        await serve(launch, worker)


def worker_command(python: str, settings_file: Path) -> list[str]:
    """How an executor starts this module."""
    return [python, "-m", "rollserve.build.worker", "--settings", str(settings_file)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=Path, required=True, help="settings as JSON, by the server")
    arguments = parser.parse_args()
    launch = read_launch()
    follow_parent(launch)
    settings = Settings.model_validate_json(arguments.settings.read_text())
    configure_logs(settings.log_level)
    tune_process(PRELOAD)
    uvloop.run(run_worker(settings, launch))


if __name__ == "__main__":
    main()
