"""The server without HTTP: the parts, wired, and their life.

``policies``, ``updates``, ``runs``, ``groups``, ``deliveries``, ``callbacks``, ``evaluations``,
``trajectories``, ``drifts``, ``verifier``, ``events`` and ``status`` are what the API offers; ``machinery``
works behind them.
"""

from __future__ import annotations

import asyncio
import logging

from rollserve.errors import Unavailable
from rollserve.rollouts.callbacks import Callbacks, PushBounds
from rollserve.rollouts.cancel import Canceller
from rollserve.rollouts.delivery import Deliveries, SampleMaker
from rollserve.rollouts.drift import Drifts
from rollserve.rollouts.evaluation import Evaluations
from rollserve.rollouts.events import EventFeed
from rollserve.rollouts.exports import Exports
from rollserve.rollouts.groups import Groups
from rollserve.rollouts.machinery import Machinery, Shared
from rollserve.rollouts.policies import Policies
from rollserve.rollouts.ports import Ports
from rollserve.rollouts.recovery import Recovery, expire_leases, recover
from rollserve.rollouts.runs import Runs, RunSpecs
from rollserve.rollouts.status import Status
from rollserve.rollouts.tally import LoopLag
from rollserve.rollouts.templates import Templates
from rollserve.rollouts.trajectories import Trajectories
from rollserve.rollouts.updates import Updates
from rollserve.rollouts.verify import Verifier

log = logging.getLogger(__name__)

_SETTLE_S = 5.0
"""For committing what workers reported just before they stopped."""

_WRITABLE_WITHIN_S = 5.0
"""For the database, when somebody asks whether it takes writes."""


class Coordinator:
    """``start`` needs an open store and starts the executor; ``begin_stop`` lets waiting requests go
    and starts nothing more; ``stop`` stops the executor and the loops. The store outlives it."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        self.closing = asyncio.Event()
        self.failed = asyncio.Event()
        """A loop of ours has ended with an error, which is a bug: whoever runs the server should end it."""
        self._shared = shared = Shared(ports=ports, specs=RunSpecs(ports))
        specs, tally, wake, happened = shared.specs, shared.tally, shared.wake, shared.happened
        self.tally = tally
        self._lag = LoopLag()
        self._maker = SampleMaker(ports, specs, tally)
        self._templates = Templates(ports, happened=happened)
        self.policies = Policies(ports, self._templates, changed=wake, happened=happened)
        self.updates = Updates(ports, self.policies, shared.fleet)
        self._behind = behind = Machinery(shared, self.policies)
        self.regrades = behind.regrades
        canceller = Canceller(ports, behind.stops, behind.ends, tally, happened=happened)
        self.runs = Runs(
            ports,
            specs,
            canceller,
            self._templates,
            opened=behind.sources.opened,
            changed=wake,
            happened=happened,
        )
        self.groups = Groups(ports, specs, canceller, tally, self._templates, queued=wake, happened=happened)
        self.deliveries = Deliveries(
            ports,
            specs,
            self.groups,
            self.policies,
            self._maker,
            tally,
            finished=shared.finished,
            freed=wake,
            happened=happened,
        )
        self.callbacks = Callbacks(
            ports, _push_bounds(ports), self.deliveries, tally, finished=shared.finished
        )
        self.evaluations = Evaluations(ports, specs)
        self.trajectories = Trajectories(ports, self._maker)
        self.exports = Exports(ports, self.groups, self._maker)
        self.drifts = Drifts(ports, self.trajectories)
        self.verifier = Verifier(ports, self.trajectories)
        self.events = EventFeed(ports, happened=happened)
        self.status = Status(
            ports, shared.board, shared.fleet, behind.checkups, self.deliveries, self.events, tally, self._lag
        )
        self._life: asyncio.Task[None] | None = None

    async def start(self) -> Recovery:
        """Recover, start the workers, and begin to schedule. Raises what the executor raises."""
        recovery = await recover(self._ports, self.deliveries)
        await self._ports.executor.start()
        await self.policies.tell_all()
        self._life = asyncio.create_task(self._live(), name="coordinator")
        return recovery

    async def _live(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                self._behind.start(tasks)
                tasks.create_task(self.events.run(), name="events")
                tasks.create_task(self._templates.run(), name="templates")
                tasks.create_task(self.updates.run(), name="updates")
                tasks.create_task(self.callbacks.run(), name="callbacks")
                tasks.create_task(self._lag.run(), name="loop lag")
                tasks.create_task(expire_leases(self._ports, self.deliveries), name="leases")
        except BaseExceptionGroup:
            log.exception("a loop has failed: nothing is scheduled any more")
            self.failed.set()
            raise

    def begin_stop(self) -> None:
        """Answer waiting leases, end streams, start no attempt. Idempotent."""
        self.closing.set()
        self._behind.scheduler.begin_stop()
        self.deliveries.close()

    async def stop(self, grace_s: float) -> None:
        """Stop the workers within ``grace_s``; ends they report meanwhile are committed. What still
        ran is run again at the next start. Idempotent."""
        self.begin_stop()
        try:
            await self._ports.executor.stop(grace_s)
            if self._life is not None:
                await self._behind.scheduler.settle(_SETTLE_S)
        finally:
            await self.updates.close()
            await self._end_life()
            self._maker.close()
            self.verifier.close()

    async def _end_life(self) -> None:
        life, self._life = self._life, None
        if life is None:
            return
        life.cancel()
        try:
            await life
        except asyncio.CancelledError:
            log.debug("stopped")
        except BaseExceptionGroup:
            log.debug("stopped after a loop had failed")

    @property
    def workers(self) -> int:
        return len(self._shared.fleet)

    def stage_of(self, rollout_id: str) -> str | None:
        """Where a running rollout is; None when it does not run."""
        running = self._shared.board.of_rollout(rollout_id)
        return None if running is None else running.stage

    async def check_ready(self) -> None:
        """Raises ``Unavailable`` unless rollouts can be run now. Bounded."""
        if self.closing.is_set():
            raise Unavailable("the server is stopping", retry_after_s=5.0)
        if self._life is None or self._life.done():
            raise Unavailable("the server has not started, or one of its loops has failed", retry_after_s=1.0)
        if not self.workers:
            raise Unavailable("no worker is up", retry_after_s=1.0)
        try:
            async with asyncio.timeout(_WRITABLE_WITHIN_S):
                await self._ports.store.check_writable()
        except TimeoutError as error:
            raise Unavailable("the database does not answer", retry_after_s=5.0) from error


def _push_bounds(ports: Ports) -> PushBounds:
    given = ports.settings.delivery
    return PushBounds(
        timeout_s=given.callback_timeout_s,
        lease_s=given.lease_ttl_s,
        at_once=given.callback_in_flight,
        tries=given.callback_tries,
        age_s=given.callback_age_s,
    )
