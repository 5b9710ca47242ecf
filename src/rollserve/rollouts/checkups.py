"""How the backends are while nobody uses them: workers see only what their calls meet.

The server looks at each of them when it starts and every so often. One that does not answer is marked as
failed and one that answers again as active, by the same way as a worker's report. What works is left alone:
an answer that does not come from a backend with calls in flight, or of a policy that is paused or being
updated, says nothing, for it may be busy or stand still. An active one is asked for its health and its
models, which samples nothing and shows where another server stands there now; a failed one is probed as at
its registration.
"""

from __future__ import annotations

import asyncio
import logging
import random

from rollserve.errors import NotFound
from rollserve.executor.base import BackendReport
from rollserve.records.policy import Backend, BackendState, Policy
from rollserve.records.update import UpdateState
from rollserve.rollouts.fleet import Fleet
from rollserve.rollouts.pages import every
from rollserve.rollouts.policies import Policies
from rollserve.rollouts.ports import Ports

log = logging.getLogger(__name__)

_WITHIN_S = 10.0
"""Of one look."""

_AT_ONCE = 16

_PLACE_S = 0.25
"""How long a look keeps one of those places: those that don't answer wait on without, and hold nobody up."""


class Checkups:
    """``run`` until cancelled; ``report`` takes what a worker saw."""

    def __init__(self, ports: Ports, policies: Policies, fleet: Fleet) -> None:
        self._store = ports.store
        self._open_backend = ports.open_backend
        self._clock = ports.clock
        self._every_s = ports.settings.backends.check_s
        self._policies = policies
        self._fleet = fleet
        self._seen: dict[str, float] = {}
        self._rng = random.Random()

    def age_s(self, backend_id: str) -> float | None:
        """Seconds since its state was last seen to be so; None before that."""
        seen = self._seen.get(backend_id)
        return None if seen is None else max(0.0, self._clock.monotonic() - seen)

    async def report(self, report: BackendReport) -> None:
        self._seen[report.backend_id] = self._clock.monotonic()
        await self._policies.report(report)

    async def run(self) -> None:
        while True:
            try:
                await self._round()
            except Exception:  # an edge: a look that fails is logged, and made again
                log.exception("the backends could not be looked at; again in %g s", self._every_s)
            await self._clock.sleep(self._every_s * self._rng.uniform(0.8, 1.2))

    async def _round(self) -> None:
        backends = await every(self._store.list_backends)
        ids = {backend.id for backend in backends}
        self._seen = {each: at for each, at in self._seen.items() if each in ids}
        places = asyncio.Semaphore(_AT_ONCE)  # of this round: none is lost to the next where it is cut off
        async with asyncio.TaskGroup() as tasks:
            for backend in backends:
                if backend.state in (BackendState.ACTIVE, BackendState.FAILED):
                    await places.acquire()
                    tasks.create_task(_placed(places, tasks.create_task(self._look(backend))))

    async def _look(self, backend: Backend) -> None:
        try:
            async with asyncio.timeout(_WITHIN_S):
                ok, detail = await self._answer(backend)
        except TimeoutError:
            ok, detail = False, f"no answer within {_WITHIN_S:g} s"
        except NotFound:
            return
        except Exception as error:  # an edge: a third-party backend may raise anything
            log.warning("backend %s could not be looked at: %r", backend.id, error)
            ok, detail = False, str(error) or repr(error)
        if ok or await self._idle(backend):
            await self.report(BackendReport(backend_id=backend.id, ok=ok, detail=detail))

    async def _answer(self, backend: Backend) -> tuple[bool, str]:
        """Whether it is well, and what it says if not."""
        if backend.state is BackendState.FAILED:
            check = await self._policies.check(backend.policy, backend.id)
            return check.ok, check.detail or ""
        policy = await self._store.get_policy(backend.policy)
        client = self._open_backend(backend.spec, policy.spec.model)
        try:
            health = await client.look()
        finally:
            await client.close()
        return health.ok, health.detail

    async def _idle(self, backend: Backend) -> bool:
        if self._fleet.backends().get(backend.id, {}).get("in_flight"):
            return False
        try:
            return not _stands_still(await self._store.get_policy(backend.policy))
        except NotFound:
            return False


async def _placed(places: asyncio.Semaphore, looking: asyncio.Task[None]) -> None:
    try:
        await asyncio.wait([looking], timeout=_PLACE_S)
    finally:
        places.release()


def _stands_still(policy: Policy) -> bool:
    updating = policy.update is not None and policy.update.state in (UpdateState.PAUSING, UpdateState.READY)
    return policy.paused or updating
