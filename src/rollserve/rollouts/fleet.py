"""The workers as the server sees them: what each can hold, holds, and last said of itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rollserve.executor.base import WorkerHello, WorkerStats


@dataclass(slots=True)
class Worker:
    hello: WorkerHello
    attempts: set[str] = field(default_factory=set)
    stats: WorkerStats | None = None

    @property
    def free(self) -> int:
        return self.hello.capacity - len(self.attempts)


class Fleet:
    """Counters of lost workers are kept in the sums, so that those only grow."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._past: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def free(self) -> int:
        """Attempts that could be started now."""
        return sum(max(0, worker.free) for worker in self._workers.values())

    def greet(self, hello: WorkerHello) -> None:
        known = self._workers.get(hello.worker_id)
        self._workers[hello.worker_id] = Worker(hello, known.attempts if known else set())

    def choose(self) -> str | None:
        """The worker with the most room; None when none has any."""
        best = max(self._workers.items(), key=lambda item: item[1].free, default=None)
        return best[0] if best is not None and best[1].free > 0 else None

    def hold(self, worker_id: str, attempt_id: str) -> None:
        self._workers[worker_id].attempts.add(attempt_id)

    def release(self, worker_id: str, attempt_id: str) -> None:
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.attempts.discard(attempt_id)

    def lose(self, worker_id: str) -> set[str]:
        """Forget a worker; returns the attempts that went with it."""
        worker = self._workers.pop(worker_id, None)
        if worker is None:
            return set()
        if worker.stats is not None:
            _add(self._past, worker.stats.counters)
        return worker.attempts

    def heard(self, worker_id: str, stats: WorkerStats) -> None:
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.stats = stats

    def grade_slots(self) -> dict[str, int]:
        """Of each worker."""
        return {name: worker.hello.slots.get("grade", 0) for name, worker in self._workers.items()}

    # -- for the live view
    def counters(self) -> dict[str, float]:
        total = dict(self._past)
        for worker in self._workers.values():
            if worker.stats is not None:
                _add(total, worker.stats.counters)
        return total

    def stages(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for worker in self._workers.values():
            if worker.stats is not None:
                total.update(worker.stats.stages)
        return dict(total)

    def slots(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for worker in self._workers.values():
            total.update(worker.hello.slots)
        return dict(total)

    def backends(self) -> dict[str, dict[str, Any]]:
        """What the workers' pools say of each backend; counts are summed."""
        total: dict[str, dict[str, Any]] = {}
        for worker in self._workers.values():
            for backend_id, facts in (worker.stats.backends if worker.stats else {}).items():
                seen = total.setdefault(backend_id, {})
                for name, value in facts.items():
                    adds = isinstance(value, (int, float)) and not isinstance(value, bool)
                    seen[name] = seen.get(name, 0) + value if adds else value
        return total

    def quiet(self, backend_id: str, update_id: str) -> bool:
        """Whether every worker has heard of the update and has nothing in flight on the backend."""
        said = [worker.stats.backends if worker.stats else {} for worker in self._workers.values()]
        facts = [each.get(backend_id, {}) for each in said]
        return all(one.get("held") == update_id and one.get("in_flight") == 0 for one in facts)

    @property
    def loop_lag_ms_p99(self) -> float:
        return max((w.stats.loop_lag_ms_p99 for w in self._workers.values() if w.stats), default=0.0)

    def describe(self) -> list[dict[str, Any]]:
        return [_described(worker) for worker in self._workers.values()]


def _add(total: dict[str, float], counts: dict[str, float]) -> None:
    for name, count in counts.items():
        total[name] = total.get(name, 0.0) + count


def _described(worker: Worker) -> dict[str, Any]:
    hello, stats = worker.hello, worker.stats
    facts: dict[str, Any] = {
        "worker_id": hello.worker_id,
        "pid": hello.pid,
        "capacity": hello.capacity,
        "attempts": len(worker.attempts),
        "slots": hello.slots,
        "runtimes": hello.runtimes,
        "gateway_url": hello.gateway_url,
    }
    if stats is not None:
        facts |= {
            "stages": stats.stages,
            "loop_lag_ms_p99": stats.loop_lag_ms_p99,
            "rss_mb": stats.rss_mb,
            "cpu_s": stats.cpu_s,
        }
    return facts
