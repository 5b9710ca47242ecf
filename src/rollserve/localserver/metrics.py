"""``GET /metrics``: the engine's counters under the names that vLLM gives them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollserve.localserver.engine import Engine


class EngineCollector(Collector):
    """Reads the engine when it is scraped; plain integers, so no lock."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        engine, counters = self._engine, self._engine.counters
        gauges = (
            ("vllm:num_requests_running", "Requests in the running batch.", len(engine.running)),
            ("vllm:num_requests_waiting", "Requests waiting for a slot.", len(engine.waiting)),
        )
        totals = (
            ("vllm:prompt_tokens", "Prompt tokens processed.", counters.prompt_tokens),
            ("vllm:generation_tokens", "Tokens sampled.", counters.generated_tokens),
            ("vllm:request_success", "Requests ended, aborted ones included.", counters.finished),
            ("rollserve_local:aborted", "Requests ended by an abort.", counters.aborted),
            ("rollserve_local:steps", "Engine steps.", counters.steps),
            ("rollserve_local:weight_updates", "Weight updates applied.", counters.weight_updates),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        for name, text, value in totals:
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter


def render(engine: Engine, model_name: str) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(engine, model_name))
    return generate_latest(registry)
