"""Admission: queued rollouts become attempts on workers as there is room, and nothing here polls.

One loop starts what is due and then sleeps until a bell rings (a submit, an end, a resume, a new
worker) or the earliest back-off is over. One loop listens to the workers. One looks, every few
seconds, for attempts whose worker has forgotten them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from rollserve.executor.base import (
    AttemptEnded,
    BackendReport,
    CancelAttempt,
    FromWorker,
    StageChanged,
    StartAttempt,
    WorkerHello,
    WorkerLost,
    WorkerStats,
)
from rollserve.records.rollout import Attempt, Rollout, RolloutState
from rollserve.rollouts.bell import Bell
from rollserve.rollouts.board import Board, Running
from rollserve.rollouts.endings import Endings
from rollserve.rollouts.fleet import Fleet
from rollserve.rollouts.ports import Ports
from rollserve.rollouts.retries import NOT_SENT, OVERDUE, WORKER_LOST
from rollserve.rollouts.runs import RunSpecs
from rollserve.rollouts.tally import Tally
from rollserve.store.base import Start

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
        tally: Tally,
        *,
        wake: Bell,
        on_backend: Callable[[BackendReport], Awaitable[None]],
    ) -> None:
        self._store = ports.store
        self._executor = ports.executor
        self._clock = ports.clock
        self._specs = specs
        self._board = board
        self._fleet = fleet
        self._endings = endings
        self._tally = tally
        self._wake = wake
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
            await self._until(rung, due_s)

    async def _admit_due(self) -> float | None:
        """Start what there is room for; returns in how many seconds to look again by itself."""
        while not self._stopping and (free := self._fleet.free) > 0:
            limit = min(free, self._BATCH)
            starts = await self._store.start_rollouts(self._clock.now(), limit)
            for index, start in enumerate(starts):
                await self._dispatch(start)
                if index % self._PER_TURN == self._PER_TURN - 1:
                    await asyncio.sleep(0)
            if len(starts) < limit:
                due = await self._store.next_due(self._clock.now())
                return None if due is None else max(0.0, due - self._clock.now())
        return None

    async def _until(self, rung: asyncio.Event, due_s: float | None) -> None:
        alarm = None if due_s is None else self._clock.call_later(due_s, rung.set)
        try:
            await rung.wait()
        finally:
            if alarm is not None:
                alarm.cancel()
        await asyncio.sleep(self._GATHER_S)

    async def _dispatch(self, start: Start) -> None:
        running = Running(start=start, worker_id="", since=self._clock.now())
        self._board.put(running)
        try:
            _, run_json = await self._specs.get(start.rollout.run_id)
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

    # -- cancelling
    def stop_rollouts(self, rollouts: Sequence[Rollout], reason: str) -> None:
        """Running rollouts are to end; their workers are told, the rest follows from their report."""
        for rollout in rollouts:
            new = self._board.ask_cancel(rollout.id, reason, self._clock.now())
            running = self._board.of_rollout(rollout.id)
            if new and running is not None:
                self._cancel(running, reason)

    def _cancel(self, running: Running, reason: str) -> None:
        self._executor.send(
            running.worker_id, CancelAttempt(attempt_id=running.start.attempt_id, reason=reason)
        )

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
                if attempt_id not in self._board.ending and now > self._deadline(running):
                    self._cancel(running, "overdue")
                    self._spawn(self._endings.lost(running, OVERDUE, "its worker did not report its end"))
            self._board.forget_old_cancels(now - self._OVERDUE_S)

    def _deadline(self, running: Running) -> float:
        asked = self._board.asked(running.start.rollout.id)
        end = running.since + running.start.task.limits.wall_s
        return (end if asked is None else min(end, asked.at)) + self._OVERDUE_S

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
