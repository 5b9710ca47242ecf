"""The drift of rollouts and runs, read from what their calls recorded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec

from rollserve.errors import NotFound
from rollserve.gateway.lineage import settled
from rollserve.gateway.samples import left_out
from rollserve.records.call import Call, Drift, Label
from rollserve.records.drift import DriftCause, RolloutDrift
from rollserve.records.rollout import Rollout
from rollserve.records.run import RunSpec
from rollserve.rollouts.ports import Ports
from rollserve.rollouts.trajectories import Trajectories
from rollserve.store.values import Page

log = logging.getLogger(__name__)

_MOST_ROLLOUTS = 100
"""Of one page: each is a payload to read."""
_AT_ONCE = 4


class CallDrift(msgspec.Struct, frozen=True, kw_only=True):
    """One place where a call drifted; ``drift`` as it was recorded."""

    call_id: str
    label: Label
    route: str = ""
    drift: Drift


class Drifts:
    def __init__(self, ports: Ports, trajectories: Trajectories) -> None:
        self._store = ports.store
        self._trajectories = trajectories
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def of_rollout(self, rollout_id: str) -> list[CallDrift]:
        """Of its newest attempt, in the order of its calls."""
        recorded = await self._trajectories.of_rollout(rollout_id)
        return await asyncio.to_thread(places, recorded.payload.calls)

    async def of_run(
        self, run_id: str, *, cause: str | None, cursor: str | None, limit: int
    ) -> Page[RolloutDrift]:
        """The run's rollouts that have begun, in pages; with ``cause`` those that met it."""
        run = await self._store.get_run(run_id)
        page = await self._store.list_rollouts(run_id=run_id, cursor=cursor, limit=min(limit, _MOST_ROLLOUTS))
        found = await asyncio.gather(*(self._of(rollout, run.spec) for rollout in page.items))
        items = [each for each in found if each is not None and _met(each, cause)]
        return Page(items=items, next=page.next)

    async def _of(self, rollout: Rollout, run: RunSpec) -> RolloutDrift | None:
        async with self._turns:
            try:
                recorded = await self._trajectories.of_rollout(rollout.id)
            except NotFound:  # pruned meanwhile
                return None
            except Exception as error:  # one payload that can't be read must not hide the others
                log.exception("no drift of rollout %s", rollout.id)
                note = f"{type(error).__name__}: {error}"
                attempt_id = rollout.attempt_id or ""
                return RolloutDrift(
                    rollout_id=rollout.id, attempt_id=attempt_id, calls=0, sampled=0, note=note
                )
            if recorded.attempt is None:
                return None
            calls = recorded.payload.calls
            return RolloutDrift(
                rollout_id=rollout.id,
                attempt_id=recorded.attempt.id,
                calls=len(calls),
                sampled=sum(len(call.sampled_ids) // 4 for call in calls),
                causes=await asyncio.to_thread(causes, calls, run),
            )


def _met(found: RolloutDrift, cause: str | None) -> bool:
    return cause is None or any(each.cause == cause for each in found.causes)


def places(calls: Sequence[Call]) -> list[CallDrift]:
    labels = settled(calls)
    return [
        CallDrift(call_id=call.id, label=labels[call.id], route=call.route, drift=drift)
        for call in calls
        for drift in call.drift
    ]


def causes(calls: Sequence[Call], run: RunSpec) -> list[DriftCause]:
    """By name."""
    drifts = [drift for call in calls for drift in call.drift]
    reasons = left_out(calls, run)
    lost: dict[str, int] = {}
    for call in calls:
        reason = reasons.get(call.id, "")
        lost[reason] = lost.get(reason, 0) + len(call.sampled_ids) // 4
    return [
        DriftCause(
            cause=name,
            times=sum(drift.cause == name for drift in drifts),
            absorbed=sum(drift.cause == name and drift.absorbed for drift in drifts),
            untrainable=lost.get(name, 0),
        )
        for name in sorted({drift.cause for drift in drifts})
    ]
