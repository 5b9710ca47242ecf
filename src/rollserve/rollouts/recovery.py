"""After a death: what was running runs again, what was being cancelled ends, what is nobody's goes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from rollserve.errors import RollserveError
from rollserve.rollouts.delivery import Deliveries
from rollserve.rollouts.ports import Ports
from rollserve.rollouts.salvage import salvaged, sampled_in
from rollserve.store.payload import SealedPayload

log = logging.getLogger(__name__)

EXPIRE_EVERY_S = 2.0
_SALVAGED_AT_ONCE = 4


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What a start found: rollouts put back in the queue, leases expired, payloads removed."""

    requeued: int
    leases_expired: int
    payloads_removed: int


async def recover(ports: Ports, deliveries: Deliveries) -> Recovery:
    """Before any worker starts: there is no attempt yet that could be mistaken for a dead one."""
    attempts = await ports.store.list_interrupted()
    requeued = await ports.store.recover(ports.clock.now(), await _salvage(ports, attempts))
    await ports.store.end_due_groups(ports.clock.now())  # before they are started in vain
    expired = await deliveries.expire()
    interrupted = await _salvage(ports, await ports.store.list_interrupted_regradings())
    await ports.store.recover_regradings({name: sampled_in(each) for name, each in interrupted.items()})
    await ports.store.recover_callback_messages(ports.clock.now())
    removed = await ports.payloads.sweep(await ports.store.list_payloads())
    if requeued or removed:
        log.info("after the last stop: %d rollouts run again, %d payloads removed", requeued, removed)
    return Recovery(requeued=requeued, leases_expired=expired, payloads_removed=removed)


async def _salvage(ports: Ports, interrupted: Sequence[tuple[str, str]]) -> dict[str, SealedPayload]:
    """What interrupted attempts (of a run, by name) had recorded; sealed before the store hears of their
    end, so that a start which is cut short finds them again."""
    places = asyncio.Semaphore(_SALVAGED_AT_ONCE)
    found: dict[str, SealedPayload] = {}

    async def salvage(run_id: str, attempt_id: str) -> None:
        try:
            async with places:
                payload = await salvaged(ports.payloads, run_id, attempt_id)
        except RollserveError as error:
            log.warning("the record of interrupted attempt %s can't be kept: %s", attempt_id, error)
            return
        if payload is not None:
            found[attempt_id] = payload

    async with asyncio.TaskGroup() as tasks:
        for run_id, attempt_id in interrupted:
            tasks.create_task(salvage(run_id, attempt_id))
    return found


async def expire_leases(ports: Ports, deliveries: Deliveries) -> None:
    """Every few seconds, until cancelled."""
    while True:
        await ports.clock.sleep(EXPIRE_EVERY_S)
        try:
            await deliveries.expire()
        except Exception:
            log.exception("expired leases could not be given back")
