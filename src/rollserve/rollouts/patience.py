"""Patience with a busy store, for work of ours that nobody would ask for again.

A request that finds the store's queue full is told so and comes back. The end of an attempt, or the news
of a policy that is committed already, must not be lost to the same crowd.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rollserve.errors import QueueFull, Unavailable
from rollserve.rollouts.clock import Clock

T = TypeVar("T")

log = logging.getLogger(__name__)

_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 5.0


async def patiently(clock: Clock, ask: Callable[[], Awaitable[T]]) -> T:
    """What ``ask`` returns or raises, asked again for as long as the store is too busy or away. ``ask``
    must be harmless when done twice. Until cancelled."""
    delay_s = _FIRST_DELAY_S
    while True:
        try:
            return await ask()
        except (QueueFull, Unavailable) as error:
            log.warning("the store is busy (%s); again in %g s", error, delay_s)
        await clock.sleep(delay_s)
        delay_s = min(delay_s * 2, _MAX_DELAY_S)
