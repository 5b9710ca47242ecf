"""The state of the whole, at a glance: what the live view and the metrics show."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from rollserve.errors import QueueFull, Unavailable
from rollserve.records.policy import Backend, BackendState, Policy
from rollserve.rollouts.board import Board
from rollserve.rollouts.checkups import Checkups
from rollserve.rollouts.delivery import Deliveries
from rollserve.rollouts.events import EventFeed
from rollserve.rollouts.fleet import Fleet
from rollserve.rollouts.ports import Ports
from rollserve.rollouts.tally import LoopLag, Tally
from rollserve.store.values import Bin, Page

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Counters only grow; ``stages`` and ``slots`` are summed over all workers; ``backends`` and
    ``policies`` are the first 1000; ``age_s`` of a backend is how long ago its state was last seen to be so
    (None: not since the start); ``callbacks`` are messages by state; ``bins`` are the histograms of all
    runs together (``store.base.Store.run_bins``)."""

    uptime_s: float
    workers: list[dict[str, Any]]
    stages: dict[str, int]
    slots: dict[str, int]
    counters: dict[str, float]
    queued: int
    running: int
    waiting_leases: int
    event_readers: int
    loop_lag_ms_p99: float
    backends: list[dict[str, Any]]
    policies: list[dict[str, Any]]
    callbacks: dict[str, int]
    bins: dict[str, dict[str, Bin]]


class Status:
    _FRESH_S = 0.5
    """Counts from the store are shared by all who ask within this time."""
    _PATIENCE_S = 2.0
    """For a busy store: after it, what was known before is shown again."""
    _MOST = 1000
    """Backends and policies shown."""

    def __init__(
        self,
        ports: Ports,
        board: Board,
        fleet: Fleet,
        checkups: Checkups,
        deliveries: Deliveries,
        feed: EventFeed,
        tally: Tally,
        lag: LoopLag,
    ) -> None:
        self._store = ports.store
        self._clock = ports.clock
        self._board = board
        self._fleet = fleet
        self._checkups = checkups
        self._deliveries = deliveries
        self._feed = feed
        self._tally = tally
        self._lag = lag
        self._born = ports.clock.monotonic()
        self._asking = asyncio.Lock()
        self._asked_at = float("-inf")
        self._queued = 0
        self._backends: list[dict[str, Any]] = []
        self._policies: list[dict[str, Any]] = []
        self._callbacks: dict[str, int] = {}
        self._bins: dict[str, dict[str, Bin]] = {}

    async def snapshot(self) -> Snapshot:
        await self._refresh()
        live = self._fleet.backends()
        return Snapshot(
            uptime_s=self._clock.monotonic() - self._born,
            workers=self._fleet.describe(),
            stages=self._fleet.stages(),
            slots=self._fleet.slots(),
            counters=_sum(self._tally.counts(), self._fleet.counters()),
            queued=self._queued,
            running=len(self._board),
            waiting_leases=self._deliveries.waiting,
            event_readers=self._feed.readers,
            loop_lag_ms_p99=max(self._lag.p99_ms, self._fleet.loop_lag_ms_p99),
            backends=[
                live.get(backend["id"], {}) | backend | {"age_s": self._checkups.age_s(backend["id"])}
                for backend in self._backends
            ],
            policies=self._policies,
            callbacks=self._callbacks,
            bins=self._bins,
        )

    async def _refresh(self) -> None:
        async with self._asking:
            if self._clock.monotonic() - self._asked_at < self._FRESH_S:
                return
            try:
                async with asyncio.timeout(self._PATIENCE_S):
                    self._queued = await self._store.count_queued()
                    listed = await self._store.list_backends(limit=self._MOST)
                    policies = await self._store.list_policies(limit=self._MOST)
                    self._callbacks = await self._store.count_callback_messages()
                    self._bins = await self._store.run_bins(None)
                    self._backends = [_described(backend) for backend in listed.items]
                    self._policies = _policies(policies.items, listed)
            except (TimeoutError, QueueFull, Unavailable) as error:
                log.warning("the store is too busy to be counted: %r", error)
            self._asked_at = self._clock.monotonic()


def _described(backend: Backend) -> dict[str, Any]:
    return {
        "id": backend.id,
        "policy": backend.policy,
        "url": backend.spec.url,
        "kind": backend.spec.kind.value,
        "state": backend.state.value,
        "error": backend.error,
    }


def _policies(policies: list[Policy], backends: Page[Backend]) -> list[dict[str, Any]]:
    """With their backends counted, where all of them are on the page."""
    states: dict[str, list[BackendState]] = {}
    for backend in backends.items:
        states.setdefault(backend.policy, []).append(backend.state)
    whole = backends.next is None
    return [
        {
            "name": policy.spec.name,
            "version": policy.version,
            "paused": policy.paused,
            "backends": len(states.get(policy.spec.name, [])) if whole else None,
            "active": states.get(policy.spec.name, []).count(BackendState.ACTIVE) if whole else None,
        }
        for policy in policies
    ]


def _sum(*counts: dict[str, float]) -> dict[str, float]:
    total: dict[str, float] = {}
    for some in counts:
        for name, count in some.items():
            total[name] = total.get(name, 0.0) + count
    return total
