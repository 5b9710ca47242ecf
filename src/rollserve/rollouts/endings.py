"""The end of an attempt: decided, committed, and only then acknowledged to its worker.

A worker sends an end again until it is acknowledged, so every step here may happen twice; an attempt
that was fenced (its rollout was given to a newer one) leaves nothing behind.
"""

from __future__ import annotations

import logging
from collections import OrderedDict

from rollserve.errors import Conflict, FailureKind, NotFound, RollserveError
from rollserve.executor.base import AckAttempt
from rollserve.records.rollout import Attempt, Failure, Rollout, RolloutState
from rollserve.rollouts.bell import Bell, Bells
from rollserve.rollouts.board import Board, Running
from rollserve.rollouts.fleet import Fleet
from rollserve.rollouts.ports import Ports
from rollserve.rollouts.retries import INTERRUPTIONS, Past, decide
from rollserve.rollouts.runs import RunSpecs
from rollserve.rollouts.tally import Tally
from rollserve.store.base import Finish, Finished

log = logging.getLogger(__name__)


class Endings:
    """``finished`` is rung by run when one of its groups has finished, ``freed`` when there is room
    for another attempt, ``happened`` on any event."""

    _REMEMBERED = 16_384
    _FIRST_DELAY_S = 0.1
    _MAX_DELAY_S = 10.0

    def __init__(
        self,
        ports: Ports,
        specs: RunSpecs,
        board: Board,
        fleet: Fleet,
        tally: Tally,
        *,
        finished: Bells,
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
        self._finished = finished
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
        attempt_id = running.start.attempt_id
        if attempt_id in self._board.ending or self._board.get(attempt_id) is not running:
            return
        await self._settle_once(lost_attempt(running, code, detail, self._clock.now()))
        self._freed.ring()

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
            stored = await self._store.get_attempt(attempt.id)
            rollout = await self._store.get_rollout(stored.rollout_id)
        except NotFound:
            await self._drop(attempt)
            return False
        if stored.finished_at is None:
            return await self._conclude(rollout, attempt)
        if stored.payload == attempt.payload:
            return True
        await self._drop(attempt)
        return False

    async def _conclude(self, rollout: Rollout, attempt: Attempt) -> bool:
        try:
            run, _ = await self._specs.get(rollout.run_id)
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
            if finished.rollout is None:  # forgotten: nor does its history keep the payload
                await self._drop(attempt)
            return False
        await self._book(finished, finish)
        return True

    async def _interruptions(self, attempt: Attempt) -> int:
        """How often the rollout's earlier attempts were interrupted; asked only when it matters."""
        failure = attempt.failure
        if failure is None or not (failure.code in INTERRUPTIONS or failure.kind is FailureKind.CANCELLED):
            return 0
        history = await self._store.list_attempts(attempt.rollout_id)
        return sum(
            1
            for earlier in history
            if earlier.id != attempt.id and earlier.failure and earlier.failure.code in INTERRUPTIONS
        )

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
            ended, _ = await self._store.cancel_rollouts(rollout_id=rollout_id)
            state = RolloutState.CANCELLED if ended else state
            for other in ended:
                self._finished.ring(other.run_id)
        self._tally.add("retries" if state is RolloutState.QUEUED else f"rollouts_{state.value}")
        for name, count in finish.attempt.counts.items():
            self._tally.add(f"attempts_{name}", count)
        if state.final:
            self._board.forget_cancel(rollout_id)
        if finished.group_finished and rollout is not None:
            self._tally.add("groups_finished")
            self._finished.ring(rollout.run_id)
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
