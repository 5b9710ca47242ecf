"""What a rollout did, for people: its calls, conversation, log and artifacts, while it runs and after."""

from __future__ import annotations

from dataclasses import dataclass

from rollserve.errors import NotFound
from rollserve.records.rollout import Attempt
from rollserve.rollouts.delivery import SampleMaker
from rollserve.rollouts.ports import Ports
from rollserve.rollouts.staleness import FinishedRollout
from rollserve.store.payload import AttemptPayload


@dataclass(frozen=True, kw_only=True, eq=False)
class Recorded:
    """``live``: the attempt still runs, and this is what it has recorded so far. ``attempt`` None: it
    has not been tried yet."""

    attempt: Attempt | None
    live: bool
    payload: AttemptPayload


class Trajectories:
    def __init__(self, ports: Ports, maker: SampleMaker) -> None:
        self._store = ports.store
        self._payloads = ports.payloads
        self._maker = maker

    async def of_rollout(self, rollout_id: str, attempt_id: str | None = None) -> Recorded:
        """Of its newest attempt, or the one named."""
        rollout = await self._store.get_rollout(rollout_id)
        if attempt_id is None:
            attempt = await self._store.last_attempt(rollout_id)
        else:
            attempt = await self._store.get_attempt(attempt_id)
            if attempt.rollout_id != rollout_id:
                raise NotFound(f"rollout {rollout_id!r} has no attempt {attempt_id!r}", field="attempt_id")
        if attempt is None:
            return Recorded(attempt=None, live=False, payload=AttemptPayload())
        return await self._recorded(rollout.run_id, attempt)

    async def of_attempt(self, attempt_id: str) -> Recorded:
        attempt = await self._store.get_attempt(attempt_id)
        rollout = await self._store.get_rollout(attempt.rollout_id)
        return await self._recorded(rollout.run_id, attempt)

    async def _recorded(self, run_id: str, attempt: Attempt) -> Recorded:
        if attempt.finished_at is None:
            payload = await self._payloads.read_live(run_id, attempt.id)
            return Recorded(attempt=attempt, live=True, payload=payload)
        if attempt.payload is None:
            return Recorded(attempt=attempt, live=False, payload=AttemptPayload())
        return Recorded(attempt=attempt, live=False, payload=await self._payloads.read(attempt.payload))

    async def samples(self, rollout_id: str) -> FinishedRollout:
        """As a delivery would hand them over."""
        return await self._maker.make(await self._store.get_rollout(rollout_id))
