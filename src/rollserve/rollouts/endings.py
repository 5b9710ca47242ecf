"""The end of an attempt: decided, committed, and only then acknowledged to its worker.

A worker sends an end again until it is acknowledged, so every step here may happen twice. An attempt
that was fenced (its rollout was given to a newer one) is history and no more; one that died with its
worker keeps in that history what it had recorded until then.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from rollserve.errors import Conflict, FailureKind, NotFound, RollserveError
from rollserve.executor.base import AckAttempt
from rollserve.records.rollout import Attempt, Failure, Rollout, RolloutState
from rollserve.rollouts.bell import Bell
from rollserve.rollouts.board import Board, Running
from rollserve.rollouts.fleet import Fleet
from rollserve.rollouts.pages import every
from rollserve.rollouts.patience import patiently
from rollserve.rollouts.ports import Ports
from rollserve.rollouts.retries import INTERRUPTIONS, WORKER_LOST, Past, decide
from rollserve.rollouts.runs import RunSpecs
from rollserve.rollouts.salvage import salvaged
from rollserve.rollouts.stops import GroupEnds
from rollserve.rollouts.tally import Tally
from rollserve.store.values import Finish, Finished

T = TypeVar("T")

log = logging.getLogger(__name__)


class Endings:
    """``freed`` is rung when there is room for another attempt, ``happened`` on any event."""

    _REMEMBERED = 16_384
    _FIRST_DELAY_S = 0.1
    _MAX_DELAY_S = 10.0

    def __init__(
        self,
        ports: Ports,
        specs: RunSpecs,
        board: Board,
        fleet: Fleet,
        ends: GroupEnds,
        tally: Tally,
        *,
        freed: Bell,
        happened: Bell,
    ) -> None:
        self._store = ports.store
        self._payloads = ports.payloads
        self._executor = ports.executor
        self._clock = ports.clock
        self._jitter = ports.jitter
        self._specs = specs
        self._board = board
        self._fleet = fleet
        self._tally = tally
        self._ends = ends
        self._freed = freed
        self._happened = happened
        self._recent: OrderedDict[str, bool] = OrderedDict()

    async def reported(self, worker_id: str, attempt: Attempt) -> None:
        """A worker says that an attempt has ended; perhaps not for the first time."""
        accepted = self._recent.get(attempt.id)
        if accepted is None:
            if attempt.id in self._board.ending:
                return
            accepted = await self._settle_once(attempt)
            self._remember(attempt.id, accepted)
        self._fleet.release(worker_id, attempt.id)
        self._executor.send(worker_id, AckAttempt(attempt_id=attempt.id, accepted=accepted))
        self._freed.ring()

    async def lost(self, running: Running, code: str, detail: str) -> None:
        """An attempt that will not report: its worker is gone, or it is long overdue."""
        attempt = lost_attempt(running, code, detail, self._clock.now())
        if code == WORKER_LOST and self._waits(running):  # else its worker may still be writing
            attempt = await self._salvaged(running, attempt)
        if self._waits(running):
            await self._settle_once(attempt)
            self._freed.ring()

    def _waits(self, running: Running) -> bool:
        """Whether nobody has begun to settle it."""
        attempt_id = running.start.attempt_id
        return attempt_id not in self._board.ending and self._board.get(attempt_id) is running

    async def _salvaged(self, running: Running, attempt: Attempt) -> Attempt:
        """With the calls and the log it left; a disk that refuses costs them, and nothing else."""
        try:
            payload = await salvaged(self._payloads, running.start.rollout.run_id, attempt.id)
        except RollserveError as error:
            log.warning("the record of lost attempt %s can't be kept: %s", attempt.id, error)
            return attempt
        return attempt if payload is None else payload.of(attempt)

    async def _settle_once(self, attempt: Attempt) -> bool:
        self._board.ending.add(attempt.id)
        try:
            running = self._board.get(attempt.id)
            if running is not None:
                accepted = await self._conclude(running.start.rollout, attempt)
            else:
                accepted = await self._settle_late(attempt)
        finally:
            self._board.ending.discard(attempt.id)
        self._board.remove(attempt.id)
        return accepted

    def _remember(self, attempt_id: str, accepted: bool) -> None:
        self._recent[attempt_id] = accepted
        while len(self._recent) > self._REMEMBERED:
            self._recent.popitem(last=False)

    async def _settle_late(self, attempt: Attempt) -> bool:
        """Not on the board: settled before this server started, or fenced since."""
        try:
            stored = await self._patiently(partial(self._store.get_attempt, attempt.id))
            rollout = await self._patiently(partial(self._store.get_rollout, stored.rollout_id))
        except NotFound:
            await self._drop(attempt)
            return False
        if stored.finished_at is not None and stored.payload == attempt.payload:
            return True
        return await self._conclude(rollout, attempt)

    async def _conclude(self, rollout: Rollout, attempt: Attempt) -> bool:
        try:
            run, _ = await self._patiently(partial(self._specs.get, rollout.run_id))
        except NotFound:  # pruned
            await self._drop(attempt)
            return False
        past = Past(
            tries=rollout.attempts,
            interruptions=await self._interruptions(attempt),
            cancelled=self._board.asked(rollout.id) is not None,
        )
        finish = decide(attempt, run, past, now=self._clock.now(), jitter=self._jitter())
        finished = await self._commit(finish)
        if not finished.accepted:
            self._tally.add("attempts_fenced")
            return await self._kept(attempt)
        await self._book(finished, finish)
        return True

    async def _kept(self, attempt: Attempt) -> bool:
        """Whether the history of a fenced attempt keeps its payload, which goes otherwise."""
        try:
            stored = await self._patiently(partial(self._store.get_attempt, attempt.id))
            kept = stored.payload == attempt.payload
        except NotFound:
            kept = False
        if not kept:
            await self._drop(attempt)
        return kept

    async def _interruptions(self, attempt: Attempt) -> int:
        """How often the rollout's earlier attempts were interrupted; asked only when it matters."""
        failure = attempt.failure
        if failure is None or not (failure.code in INTERRUPTIONS or failure.kind is FailureKind.CANCELLED):
            return 0
        listed = partial(self._store.list_attempts, attempt.rollout_id)
        history = await self._patiently(partial(every, listed))
        return sum(
            1
            for earlier in history
            if earlier.id != attempt.id and earlier.failure and earlier.failure.code in INTERRUPTIONS
        )

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        return await patiently(self._clock, ask)

    async def _commit(self, finish: Finish) -> Finished:
        """Until the store has it: a result is not lost to a full disk or a database that is away.
        Meanwhile the attempt keeps its place, so that nothing piles up behind it."""
        delay_s = self._FIRST_DELAY_S
        while True:
            try:
                return await self._store.finish_attempt(finish)
            except (NotFound, Conflict) as error:
                log.info("end of attempt %s not taken: %s", finish.attempt.id, error)
                return Finished(accepted=False)
            except Exception:
                log.exception("end of attempt %s not stored; again in %g s", finish.attempt.id, delay_s)
                self._tally.add("store_errors")
            await self._clock.sleep(delay_s)
            delay_s = min(delay_s * 2, self._MAX_DELAY_S)

    async def _book(self, finished: Finished, finish: Finish) -> None:
        rollout = finished.rollout
        state = finish.target if rollout is None else rollout.state
        rollout_id = finish.attempt.rollout_id
        if state is RolloutState.QUEUED and self._board.asked(rollout_id):
            # The cancel came while the retry was being committed.
            cancel = partial(self._store.cancel_rollouts, rollout_id=rollout_id)
            ended, _ = await self._patiently(cancel)
            state = RolloutState.CANCELLED if ended else state
            for other in ended:
                self._ends.unknown(other.run_id)
        self._tally.add("retries" if state is RolloutState.QUEUED else f"rollouts_{state.value}")
        for name, count in finish.attempt.counts.items():
            self._tally.add(f"attempts_{name}", count)
        if state.final:
            self._board.forget_cancel(rollout_id)
            self._ends.tell(finished.others)
        self._happened.ring()

    async def _drop(self, attempt: Attempt) -> None:
        """Delete a payload that no attempt in the store refers to."""
        if attempt.payload is None:
            return
        try:
            await self._payloads.delete([attempt.payload])
        except (RollserveError, OSError) as error:
            log.warning(
                "payload %s of a fenced attempt stays until the next start: %s", attempt.payload, error
            )


def lost_attempt(running: Running, code: str, detail: str, now: float) -> Attempt:
    start = running.start
    return Attempt(
        id=start.attempt_id,
        rollout_id=start.rollout.id,
        epoch=start.rollout.epoch,
        worker_id=running.worker_id,
        started_at=running.since,
        finished_at=now,
        outcome=RolloutState.FAILED,
        failure=Failure(kind=FailureKind.INFRASTRUCTURE, code=code, message=detail, operation=running.stage),
    )
