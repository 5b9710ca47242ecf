"""Prometheus metrics, made from a snapshot at each scrape: nothing is registered globally."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollserve.rollouts.status import Snapshot

CONTENT_TYPE = "text/plain; version=0.0.4"
_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9_]")


class RequestMeter:
    """Requests by route and status, and the seconds they took. Routes are templates, so that their
    number is bounded."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, str]] = Counter()
        self.seconds: dict[tuple[str, str], float] = {}

    def note(self, method: str, route: str, status: int, seconds: float) -> None:
        self.requests[method, route, str(status)] += 1
        self.seconds[method, route] = self.seconds.get((method, route), 0.0) + seconds


class MeterMiddleware:
    def __init__(self, app: ASGIApp, meter: RequestMeter) -> None:
        self._app = app
        self._meter = meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0
        started = time.monotonic()

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._meter.note(_method(scope), route, status, time.monotonic() - started)


def _method(scope: Scope) -> str:
    known = ("GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH")
    return scope["method"] if scope["method"] in known else "other"


def exposition(snapshot: Snapshot, meter: RequestMeter) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once([*_service(snapshot), *_workers(snapshot), *_bins(snapshot), *_requests(meter)]))
    return generate_latest(registry)


class _Once(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)


def _service(snapshot: Snapshot) -> Iterator[Metric]:
    gauges = {
        "queued_rollouts": ("Rollouts that wait to be started.", snapshot.queued),
        "running_attempts": ("Attempts on workers.", snapshot.running),
        "workers": ("Workers that are up.", len(snapshot.workers)),
        "waiting_leases": ("Trainers that wait for a group.", snapshot.waiting_leases),
        "event_readers": ("Open event streams.", snapshot.event_readers),
        "uptime_seconds": ("Since the server's start.", snapshot.uptime_s),
        "loop_lag_p99_seconds": ("Worst event loop of server and workers.", snapshot.loop_lag_ms_p99 / 1000),
    }
    for name, (text, value) in gauges.items():
        yield GaugeMetricFamily(f"rollserve_{name}", text, value=value)
    for name, count in sorted(snapshot.counters.items()):
        clean = _NOT_A_NAME.sub("_", name)
        yield CounterMetricFamily(f"rollserve_{clean}", f"{name}, since the server's start.", value=count)


def _workers(snapshot: Snapshot) -> Iterator[Metric]:
    stages = GaugeMetricFamily("rollserve_stage_attempts", "Attempts by stage.", labels=["stage"])
    for stage, count in snapshot.stages.items():
        stages.add_metric([stage], count)
    slots = GaugeMetricFamily("rollserve_stage_slots", "Slots by stage.", labels=["stage"])
    for stage, count in snapshot.slots.items():
        slots.add_metric([stage], count)
    memory = GaugeMetricFamily("rollserve_worker_rss_bytes", "Memory of a worker.", labels=["worker"])
    for worker in snapshot.workers:
        memory.add_metric([worker["worker_id"]], worker.get("rss_mb", 0.0) * (1 << 20))
    backends = GaugeMetricFamily(
        "rollserve_backend_active", "1 where a backend takes calls.", labels=["policy", "backend"]
    )
    for backend in snapshot.backends:
        backends.add_metric([backend["policy"], backend["id"]], float(backend["state"] == "active"))
    callbacks = GaugeMetricFamily(
        "rollserve_callback_messages",
        "Messages to callbacks that wait, are on their way or were given up; callbacks that are stopped.",
        labels=["state"],
    )
    for state, count in snapshot.callbacks.items():
        callbacks.add_metric([state], count)
    yield from (stages, slots, memory, backends, callbacks)


_BINS = {
    "tokens": ("sampled_tokens_by_fate", "fate", "What became of every sampled token."),
    "staleness": ("delivered_rollouts_by_staleness", "versions", "Rollouts handed over, by versions behind."),
    "stale_length": ("stale_rollouts_by_length", "tokens", "Too old, by sampled tokens of the episode."),
    "groups": ("groups_by_control", "what", "Groups left out, stopped or carried over; broken lines."),
}


def _bins(snapshot: Snapshot) -> Iterator[Metric]:
    """Gauges: a rewind takes back what was handed over."""
    for kind, (name, label, text) in _BINS.items():
        family = GaugeMetricFamily(f"rollserve_{name}", text, labels=[label])
        for bin_name, found in snapshot.bins.get(kind, {}).items():
            family.add_metric([bin_name], found.tokens if kind == "tokens" else found.count)
        yield family


def _requests(meter: RequestMeter) -> Iterator[Metric]:
    requests = CounterMetricFamily(
        "rollserve_http_requests", "Requests answered.", labels=["method", "route", "status"]
    )
    for labels, count in meter.requests.items():
        requests.add_metric(list(labels), count)
    seconds = CounterMetricFamily(
        "rollserve_http_seconds", "Time from request to end of answer.", labels=["method", "route"]
    )
    for where, total in meter.seconds.items():
        seconds.add_metric(list(where), total)
    yield from (requests, seconds)
