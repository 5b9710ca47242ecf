"""Telling workers that attempts are over, and everybody else that groups are."""

from __future__ import annotations

from collections.abc import Sequence

from rollserve.executor.base import CancelAttempt
from rollserve.records.rollout import Rollout
from rollserve.rollouts.bell import Bell, Bells
from rollserve.rollouts.board import Board, Running
from rollserve.rollouts.ports import Ports
from rollserve.rollouts.tally import Tally
from rollserve.store.values import Stopped


class Stops:
    """Whoever knows where rollouts run."""

    def __init__(self, ports: Ports, board: Board) -> None:
        self._executor = ports.executor
        self._clock = ports.clock
        self._board = board

    def stop_rollouts(self, rollouts: Sequence[Rollout], reason: str) -> None:
        """Running rollouts are to end; their workers are told, the rest follows from their report."""
        for rollout in rollouts:
            new = self._board.ask_cancel(rollout.id, reason, self._clock.now())
            running = self._board.of_rollout(rollout.id)
            if new and running is not None:
                self.stop(running, reason)

    def stop(self, running: Running, reason: str) -> None:
        self._executor.send(
            running.worker_id, CancelAttempt(attempt_id=running.start.attempt_id, reason=reason)
        )


class GroupEnds:
    """``finished`` is rung by run when a group has entered its log, ``judging`` when one waits for the
    run's filters, ``dated`` when something has a date, ``freed`` when work may start that could not
    before, ``happened`` on any event."""

    def __init__(
        self,
        stops: Stops,
        tally: Tally,
        *,
        finished: Bells,
        judging: Bell,
        dated: Bell,
        freed: Bell,
        happened: Bell,
    ) -> None:
        self._stops = stops
        self._tally = tally
        self._finished = finished
        self._judging = judging
        self._dated = dated
        self._freed = freed
        self._happened = happened

    def tell(self, ended: Stopped, *runs: str) -> None:
        """What the end of groups means for everybody; who waits for one of ``runs`` looks again in any
        case."""
        for rollout in ended.running:
            code = rollout.failure.code if rollout.failure else "stopped"
            self._stops.stop_rollouts([rollout], f"its group is over: {code}")
        self._tally.add("rollouts_stopped", len(ended.running))
        self._tally.add("groups_finished", sum(ended.finished.values()))
        for run_id in {*runs, *(run_id for run_id, count in ended.finished.items() if count)}:
            self._finished.ring(run_id)
        if ended.judging:
            self._judging.ring()
        if ended.held:
            self._dated.ring()
        self._freed.ring()
        self._happened.ring()

    def unknown(self, run_id: str) -> None:
        """Groups of a run may be over, or not."""
        self._finished.ring(run_id)
        self._judging.ring()
        self._dated.ring()
