"""After a death: what was running runs again, what was being cancelled ends, what is nobody's goes."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from rollserve.rollouts.delivery import Deliveries
from rollserve.rollouts.ports import Ports

log = logging.getLogger(__name__)

EXPIRE_EVERY_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What a start found: rollouts put back in the queue, leases expired, payloads removed."""

    requeued: int
    leases_expired: int
    payloads_removed: int


async def recover(ports: Ports, deliveries: Deliveries) -> Recovery:
    """Before any worker starts: there is no attempt yet that could be mistaken for a dead one."""
    requeued = await ports.store.recover(ports.clock.now())
    expired = await deliveries.expire()
    removed = await ports.payloads.sweep(await ports.store.list_payloads())
    if requeued or removed:
        log.info("after the last stop: %d rollouts run again, %d payloads removed", requeued, removed)
    return Recovery(requeued=requeued, leases_expired=expired, payloads_removed=removed)


async def expire_leases(ports: Ports, deliveries: Deliveries) -> None:
    """Every few seconds, until cancelled."""
    while True:
        await ports.clock.sleep(EXPIRE_EVERY_S)
        try:
            await deliveries.expire()
        except Exception:
            log.exception("expired leases could not be given back")
