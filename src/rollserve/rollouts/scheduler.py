"""Admission: queued rollouts become attempts on workers as there is room, and nothing here polls.

One loop starts what is due and then sleeps until a bell rings (a submit, an end, a resume, a new
worker) or the earliest back-off is over. One loop listens to the workers. One looks, every few
seconds, for attempts whose worker has forgotten them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from rollserve.executor.base import (
    AttemptEnded,
    BackendReport,
    FromWorker,
    RegradingEnded,
    StageChanged,
    StartAttempt,
    WorkerHello,
    WorkerLost,
    WorkerStats,
)
from rollserve.records.rollout import Attempt, RolloutState
from rollserve.rollouts.bell import Bell, heard_by
from rollserve.rollouts.board import Board, Running
from rollserve.rollouts.endings import Endings
from rollserve.rollouts.fleet import Fleet
from rollserve.rollouts.patience import patiently
from rollserve.rollouts.ports import Ports
from rollserve.rollouts.regrades import Regrades
from rollserve.rollouts.retries import NOT_SENT, OVERDUE, STRAGGLER, WORKER_LOST
from rollserve.rollouts.runs import RunSpecs
from rollserve.rollouts.stops import Stops
from rollserve.rollouts.tally import Tally
from rollserve.store.values import Start

log = logging.getLogger(__name__)


class Scheduler:
    """``wake`` is rung by whatever may let a rollout start."""

    _BATCH = 64
    _PER_TURN = 16
    """Starts or reports handled before other work of the event loop gets its turn."""
    _GATHER_S = 0.003
    """Ends that come together are answered by one transaction of starts."""
    _RETRY_S = 1.0
    _WATCH_S = 5.0
    _OVERDUE_S = 120.0
    """Past its ``wall_s``, or past its cancel, before an attempt is given up on."""

    def __init__(
        self,
        ports: Ports,
        specs: RunSpecs,
        board: Board,
        fleet: Fleet,
        endings: Endings,
        stops: Stops,
        regrades: Regrades,
        tally: Tally,
        *,
        wake: Bell,
        dated: Bell,
        on_backend: Callable[[BackendReport], Awaitable[None]],
    ) -> None:
        self._store = ports.store
        self._executor = ports.executor
        self._clock = ports.clock
        self._specs = specs
        self._board = board
        self._fleet = fleet
        self._endings = endings
        self._stops = stops
        self._regrades = regrades
        self._tally = tally
        self._wake = wake
        self._dated = dated
        self._on_backend = on_backend
        self._stopping = False
        self._tasks: asyncio.TaskGroup | None = None
        self._handling: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(self._admit(), name="admission")
            tasks.create_task(self._listen(), name="reports")
            tasks.create_task(self._watch(), name="overdue")

    def begin_stop(self) -> None:
        """Start nothing more. What workers do not finish from here on is for the next start: it is
        neither an interruption nor a cancel."""
        self._stopping = True

    async def settle(self, timeout_s: float) -> None:
        """After the workers stopped: let the ends that they had reported be committed."""
        await asyncio.sleep(self._GATHER_S)  # the last of them are still being heard
        if self._handling:
            await asyncio.wait(self._handling, timeout=timeout_s)

    # -- admission
    async def _admit(self) -> None:
        while True:
            rung = self._wake.listen()
            try:
                due_s = await self._admit_due()
            except Exception:
                log.exception("could not start rollouts; again in %g s", self._RETRY_S)
                self._tally.add("store_errors")
                due_s = self._RETRY_S
            await heard_by(rung, self._clock, due_s)
            await asyncio.sleep(self._GATHER_S)

    async def _admit_due(self) -> float | None:
        """Start what there is room for; returns in how many seconds to look again by itself."""
        while not self._stopping and (free := self._fleet.free) > 0:
            limit = min(free, self._BATCH)
            starts = await self._store.start_rollouts(self._clock.now(), limit)
            if any(start.rule.deadline_s is not None for start in starts):
                self._dated.ring()
            for index, start in enumerate(starts):
                await self._dispatch(start)
                if index % self._PER_TURN == self._PER_TURN - 1:
                    await asyncio.sleep(0)
            if len(starts) < limit:
                due = await self._store.next_due(self._clock.now())
                return None if due is None else max(0.0, due - self._clock.now())
        return None

    async def _dispatch(self, start: Start) -> None:
        running = Running(start=start, worker_id="", since=self._clock.now())
        self._board.put(running)
        try:
            _, run_json = await patiently(self._clock, partial(self._specs.get, start.rollout.run_id))
        except Exception as error:  # started in the store, so it must end there
            self._spawn(self._endings.lost(running, NOT_SENT, f"not sent: {error}"))
            return
        message = _message(start, run_json)
        while (worker_id := self._fleet.choose()) is not None and not self._asked(start):
            if self._executor.send(worker_id, message):
                running.worker_id = worker_id
                self._fleet.hold(worker_id, start.attempt_id)
                self._tally.add("attempts_started")
                return
            self._worker_lost(worker_id, "not reachable")
        self._spawn(self._endings.lost(running, NOT_SENT, "no worker took it"))

    def _asked(self, start: Start) -> bool:
        """Cancelled between the store's start and the worker's."""
        return self._board.asked(start.rollout.id) is not None

    # -- reports
    async def _listen(self) -> None:
        heard = 0
        async for worker_id, message in self._executor.reports():
            try:
                self._hear(worker_id, message)
            except ValueError:  # a report that does not parse: the attempt will be overdue
                log.exception("unreadable report of worker %s", worker_id)
            heard += 1
            if heard % self._PER_TURN == 0:
                await asyncio.sleep(0)

    def _hear(self, worker_id: str, message: FromWorker | WorkerLost) -> None:
        match message:
            case AttemptEnded():
                self._ended(worker_id, message.attempt())
            case StageChanged():
                self._board.moved(message.attempt_id, message.stage)
            case WorkerStats():
                self._fleet.heard(worker_id, message)
            case WorkerHello():
                self._fleet.greet(message)
                self._wake.ring()
                self._regrades.ring()
            case RegradingEnded():
                self._spawn(self._regrades.ended(worker_id, message))
            case BackendReport():
                self._spawn(self._on_backend(message))
            case WorkerLost() if not self._stopping:
                self._worker_lost(worker_id, message.detail)

    def _ended(self, worker_id: str, attempt: Attempt) -> None:
        abandoned = attempt.outcome is RolloutState.CANCELLED and not self._board.asked(attempt.rollout_id)
        if not (self._stopping and abandoned):
            self._spawn(self._endings.reported(worker_id, attempt))

    def _worker_lost(self, worker_id: str, detail: str) -> None:
        attempts = self._fleet.lose(worker_id)
        log.warning("worker %s lost with %d attempts: %s", worker_id, len(attempts), detail)
        self._tally.add("workers_lost")
        self._spawn(self._regrades.lost(worker_id))
        for attempt_id in attempts:
            running = self._board.get(attempt_id)
            if running is not None:
                self._spawn(self._endings.lost(running, WORKER_LOST, f"worker {worker_id}: {detail}"))
        self._wake.ring()

    # -- overdue
    async def _watch(self) -> None:
        while True:
            await self._clock.sleep(self._WATCH_S)
            now = self._clock.now()
            for attempt_id, running in self._board:
                if attempt_id in self._board.ending:
                    continue
                if now > self._deadline(running):
                    self._stops.stop(running, "overdue")
                    self._spawn(self._endings.lost(running, OVERDUE, "its worker did not report its end"))
                elif self._late(running, now):
                    self._spawn(self._replace(running))
            self._board.forget_old_cancels(now - self._OVERDUE_S)

    def _deadline(self, running: Running) -> float:
        asked = self._board.asked(running.start.rollout.id)
        end = running.since + running.start.task.limits.wall_s
        return (end if asked is None else min(end, asked.at)) + self._OVERDUE_S

    def _late(self, running: Running, now: float) -> bool:
        """Whether it is a straggler that is to be tried anew."""
        rule = running.start.rule
        late_s = rule.straggler_s if rule.stragglers == "replace" else None
        return late_s is not None and now > running.since + late_s and not self._asked(running.start)

    async def _replace(self, running: Running) -> None:
        """Stop the attempt and try its rollout anew, if that may be tried again."""
        rollout, late_s = running.start.rollout, running.start.rule.straggler_s
        run, _ = await patiently(self._clock, partial(self._specs.get, rollout.run_id))
        if rollout.attempts + 1 < run.retry.max_attempts:
            self._stops.stop(running, "straggler")
            self._tally.add("stragglers_replaced")
            await self._endings.lost(running, STRAGGLER, f"it had not ended after {late_s:g} s")

    def _spawn(self, work: Awaitable[None]) -> None:
        if self._tasks is None:
            raise RuntimeError("the scheduler does not run")
        task = self._tasks.create_task(_guarded(work))
        self._handling.add(task)
        task.add_done_callback(self._handling.discard)


async def _guarded(work: Awaitable[None]) -> None:
    """One report's handling may fail without ending the others'."""
    try:
        await work
    except Exception:
        log.exception("a worker's report could not be handled")


def _message(start: Start, run_json: bytes) -> StartAttempt:
    rollout = start.rollout
    return StartAttempt(
        attempt_id=start.attempt_id,
        rollout_id=rollout.id,
        group_id=rollout.group_id,
        run_id=rollout.run_id,
        index=rollout.index,
        epoch=rollout.epoch,
        run_json=run_json,
        task_json=start.task.model_dump_json().encode(),
    )
