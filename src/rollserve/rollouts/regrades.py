"""Re-grading, as the server sees it: gradings go to workers as these have grade slots, and what they come to
is written beside the rollouts' own grades.

A grading belongs to a try: one that a lost worker had is queued again, and what that worker still says of
it is not taken. Failures of graders and of the infrastructure are tried again as often as the run says.
What a grader's models sampled is counted from what the worker recorded, so that it is also known of workers
that were lost.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from functools import partial

from rollserve.backoff import backoff_s
from rollserve.errors import FailureKind, InvalidInput, NotFound, RollserveError
from rollserve.executor.base import RegradingEnded, StartRegrading
from rollserve.records.base import new_id
from rollserve.records.regrade import Graded, JudgeRoute, Regrade, Regrading, RegradingState
from rollserve.records.rollout import Failure
from rollserve.records.run import RunSpec
from rollserve.records.task import GraderSpec
from rollserve.rollouts.bell import Bell, heard_by
from rollserve.rollouts.fleet import Fleet
from rollserve.rollouts.patience import patiently
from rollserve.rollouts.policies import Policies
from rollserve.rollouts.ports import Ports
from rollserve.rollouts.retries import WORKER_LOST
from rollserve.rollouts.routes import check_judges, judge_routes
from rollserve.rollouts.runs import WORKERS_LEAVE_OUT, RunSpecs, checked_key
from rollserve.rollouts.salvage import salvaged, sampled_in
from rollserve.rollouts.tally import Tally
from rollserve.store.payload import SealedPayload
from rollserve.store.values import Page, RegradingStart

log = logging.getLogger(__name__)

_BATCH = 64
_RETRY_S = 1.0


class Regrades:
    def __init__(
        self,
        ports: Ports,
        specs: RunSpecs,
        policies: Policies,
        fleet: Fleet,
        tally: Tally,
        *,
        happened: Bell,
    ) -> None:
        self._store = ports.store
        self._payloads = ports.payloads
        self._executor = ports.executor
        self._clock = ports.clock
        self._jitter = ports.jitter
        self._check_task = ports.check_task
        self._specs = specs
        self._policies = policies
        self._fleet = fleet
        self._tally = tally
        self._happened = happened
        self._queued = Bell()
        self._running: dict[tuple[str, str, int], tuple[str, RegradingStart]] = {}
        """By regrade, rollout and try: the worker, and what it was given."""
        self._settling: set[tuple[str, str, int]] = set()
        """Of these: the end is known, and being written; another is not taken."""

    # -- what the API offers
    async def begin(
        self,
        run_id: str,
        grader: GraderSpec,
        key: str | None = None,
        *,
        routes: Mapping[str, JudgeRoute] | None = None,
    ) -> Regrade:
        """Durable when this returns. The grader may ask ``routes``; None: those that the run has for graders.
        With ``key`` the request may be sent again: the regrade of then comes back, though its judges may be
        away by now. Raises ``InvalidInput`` for a grader that the run's tasks can't have or a route that
        nothing answers, ``Conflict``."""
        regrade_id = _named(run_id, checked_key(key))
        run, _ = await self._specs.get(run_id)
        routes = judge_routes(run) if routes is None else dict(routes)
        if key is None or not await self._begun(regrade_id):
            await self._check(run_id, grader)
            await check_judges(routes, self._policies)
        made = Regrade(
            id=regrade_id, run_id=run_id, grader=grader, routes=routes, created_at=self._clock.now()
        )
        regrade = await self._store.create_regrade(made)
        self._queued.ring()
        self._happened.ring()
        return regrade

    async def _begun(self, regrade_id: str) -> bool:
        try:
            await self._store.get_regrade(regrade_id)
        except NotFound:
            return False
        return True

    async def _check(self, run_id: str, grader: GraderSpec) -> None:
        """By the run's first task: tasks of a run differ in what they say, seldom in where they run."""
        groups = (await self._store.list_groups(run_id, limit=1)).items
        if not groups:
            raise InvalidInput("the run has no group yet: there is nothing to grade", field="run_id")
        await self._check_task(groups[0].task.model_copy(update={"grader": grader}), "")

    async def get(self, regrade_id: str) -> tuple[Regrade, dict[str, int]]:
        """With its gradings by state."""
        return await self._store.get_regrade(regrade_id), await self._store.regrading_counts(regrade_id)

    async def of_run(self, run_id: str, *, cursor: str | None, limit: int) -> Page[Regrade]:
        await self._specs.get(run_id)
        return await self._store.list_regrades(run_id, cursor=cursor, limit=limit)

    async def regradings(
        self, regrade_id: str, *, state: RegradingState | None, cursor: str | None, limit: int
    ) -> Page[Regrading]:
        return await self._store.list_regradings(regrade_id, state=state, cursor=cursor, limit=limit)

    async def cancel(self, regrade_id: str) -> int:
        """What has not begun is not graded; what runs ends by itself. Returns how many."""
        cancelled = await self._store.cancel_regrade(regrade_id)
        self._happened.ring()
        return cancelled

    # -- the loop
    def ring(self) -> None:
        """There is room on a worker, perhaps."""
        self._queued.ring()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            rung = self._queued.listen()
            try:
                due_s = await self._send_due()
            except Exception:
                log.exception("gradings could not be started; again in %g s", _RETRY_S)
                self._tally.add("store_errors")
                due_s = _RETRY_S
            await heard_by(rung, self._clock, due_s)

    async def _send_due(self) -> float | None:
        """Start what there is room for; returns in how many seconds to look again by itself."""
        while free := sum(self._free().values()):
            due = await self._store.next_regrading_due()
            now = self._clock.now()
            if due is None or due > now:
                return None if due is None else due - now
            for start in await self._store.take_regradings(now, min(free, _BATCH)):
                await self._send(start)
        return None

    def _free(self) -> dict[str, int]:
        """Grade slots that no grading has, by worker. Attempts share them, and wait for each other there."""
        slots = self._fleet.grade_slots()
        for worker_id, _ in self._running.values():
            if worker_id in slots:
                slots[worker_id] -= 1
        return {worker_id: left for worker_id, left in slots.items() if left > 0}

    async def _send(self, start: RegradingStart) -> None:
        free = self._free()
        worker_id = max(free, key=lambda each: free[each], default=None)
        run = await self._run_of(start)
        if run is None:
            return
        if worker_id is not None and self._executor.send(worker_id, _message(start, run)):
            self._running[_try(start)] = (worker_id, start)
            return
        await self._store.finish_regrading(start, None)

    # -- what workers say
    async def ended(self, worker_id: str, message: RegradingEnded) -> None:
        key = (message.regrade_id, message.rollout_id, message.tries)
        _, start = self._running.get(key, (worker_id, None))
        if start is None:  # of a try that was given up
            return
        await self._settle(start, message.graded())

    async def _settle(self, start: RegradingStart, graded: Graded) -> None:
        """The first end of a try is taken; one that comes while this waits, or later, is not."""
        key = _try(start)
        if key not in self._running or key in self._settling:
            return
        self._settling.add(key)
        try:
            await self._write(start, graded)
        finally:
            self._settling.discard(key)

    async def _write(self, start: RegradingStart, graded: Graded) -> None:
        again_at = await self._again_at(start, graded)
        kept = None if again_at is not None else graded
        asked = await self._asked(start)
        finish = partial(
            self._store.finish_regrading,
            start,
            kept,
            not_before=again_at or 0.0,
            sampled_tokens=sampled_in(asked),
        )
        taken = await patiently(self._clock, finish)
        if asked is not None:
            await self._forget(asked)
        self._running.pop(_try(start), None)
        if taken and kept is not None:
            self._tally.add(f"gradings_{kept.state.value}")
        self._queued.ring()
        self._happened.ring()

    async def _asked(self, start: RegradingStart) -> SealedPayload | None:
        """What models of the routes were asked in a try that is over, by its record."""
        if not start.routes:
            return None
        try:
            return await salvaged(self._payloads, start.run_id, start.owner)
        except RollserveError as error:
            log.warning("what was sampled for grading %s can't be counted: %s", start.owner, error)
            return None

    async def _forget(self, asked: SealedPayload) -> None:
        try:
            await self._payloads.delete([asked.ref])
        except RollserveError:  # the sweep at the next start removes it
            log.warning("the record %s of a grading can't be removed", asked.ref)

    async def _again_at(self, start: RegradingStart, graded: Graded) -> float | None:
        """When to try it again; None when it has ended."""
        if graded.state is not RegradingState.FAILED or not (graded.failure and graded.failure.retryable):
            return None
        run = await self._run_of(start)
        if run is None or start.tries >= run.retry.max_attempts:
            return None
        retry = run.retry
        wait_s = backoff_s(start.tries, retry.backoff_s, retry.max_backoff_s, jitter=self._jitter())
        return self._clock.now() + wait_s

    async def _run_of(self, start: RegradingStart) -> RunSpec | None:
        """None once it is pruned."""
        try:
            run, _ = await patiently(self._clock, partial(self._specs.get, start.run_id))
        except NotFound:
            return None
        return run

    async def lost(self, worker_id: str) -> None:
        """A worker is gone, and what it had is tried again; not for ever, as it may be what ended it."""
        message = f"worker {worker_id} was lost"
        failure = Failure(kind=FailureKind.INFRASTRUCTURE, code=WORKER_LOST, message=message)
        for whose, start in list(self._running.values()):
            if whose == worker_id:
                await self._settle(start, Graded(state=RegradingState.FAILED, failure=failure))


def _named(run_id: str, key: str | None) -> str:
    """The regrade's id: the same for the same key."""
    if key is None:
        return new_id("reg")
    return f"reg_{hashlib.sha256(f'{run_id}/{key}'.encode()).hexdigest()[:20]}"


def _try(start: RegradingStart) -> tuple[str, str, int]:
    return (start.regrade_id, start.rollout_id, start.tries)


def _message(start: RegradingStart, run: RunSpec) -> StartRegrading:
    task = start.task.model_copy(update={"grader": start.grader})
    routes = {name: route.route() for name, route in start.routes.items()}
    run = run.model_copy(update={"routes": routes})
    return StartRegrading(
        regrade_id=start.regrade_id,
        run_id=start.run_id,
        rollout_id=start.rollout_id,
        tries=start.tries,
        run_json=run.model_dump_json(exclude=WORKERS_LEAVE_OUT).encode(),
        task_json=task.model_dump_json().encode(),
        attempt_json=start.attempt.model_dump_json().encode(),
    )
