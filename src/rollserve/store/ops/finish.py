"""The end of an attempt: by report (``finish_attempt``) or by the server's death (``recover``)."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from rollserve.errors import FailureKind
from rollserve.records.rollout import Attempt, Failure, Rollout, RolloutState, move
from rollserve.records.run import RunState
from rollserve.store.base import Finish, Finished
from rollserve.store.ops.cancel import end_cancelled, end_run_step
from rollserve.store.ops.groups import Ended, count_ended, finish_groups
from rollserve.store.ops.rollouts import rollout_of
from rollserve.store.ops.tx import Tx, chunked
from rollserve.store.schema import Queue, attempts, groups, rollouts, run_counts, runs

_CURRENT = (
    sa.select(
        rollouts,
        runs.c.state.label("run_state"),
        groups.c.remaining.label("group_remaining"),
        groups.c.cancelled.label("group_cancelled"),
        groups.c.num_rollouts,
    )
    .join_from(rollouts, runs, runs.c.id == rollouts.c.run_id)
    .join(groups, groups.c.id == rollouts.c.group_id)
    .where(rollouts.c.id == sa.bindparam("of_rollout"))
)
_MOVE = (
    sa.update(rollouts)
    .where(
        rollouts.c.seq == sa.bindparam("moved_seq"),
        rollouts.c.epoch == sa.bindparam("moved_epoch"),
        rollouts.c.state == RolloutState.RUNNING.value,
    )
    .values(
        state=sa.bindparam("new_state"),
        queue=sa.bindparam("new_queue"),
        attempts=sa.bindparam("new_attempts"),
        not_before=sa.bindparam("new_not_before"),
        reward=sa.bindparam("new_reward"),
        truncated_by=sa.bindparam("new_truncated_by"),
        failure=sa.bindparam("new_failure"),
        finished_at=sa.bindparam("new_finished_at"),
    )
)
_RECORD = (
    sa.update(attempts)
    .where(attempts.c.id == sa.bindparam("recorded_id"))
    .values(
        record=sa.bindparam("new_record"),
        payload=sa.bindparam("new_payload"),
        accepted=sa.bindparam("now_accepted"),
    )
)


def finish_attempt(tx: Tx, finish: Finish) -> Finished:
    """A report that comes twice is accepted twice and counted once; one for a rollout that was
    forgotten is not accepted. Where the caller wants another try that can't be (the run is closed, or
    the rollout was cancelled meanwhile), the rollout ends as cancelled."""
    attempt = finish.attempt
    row = tx.conn.execute(_CURRENT, {"of_rollout": attempt.rollout_id}).one_or_none()
    if row is None:
        return Finished(accepted=False)
    running = row.state == RolloutState.RUNNING.value
    if not (running and row.epoch == attempt.epoch and row.attempt_id == attempt.id):
        return _refuse(tx, attempt, row)
    target = move(RolloutState.RUNNING, _possible(row, finish.target))
    rollout = _moved(tx, row, finish, target)
    tx.conn.execute(_MOVE, _moving(row, rollout))
    tx.conn.execute(_RECORD, _recording(attempt, accepted=True))
    tx.count(rollout.run_id, running=-1, **{target.value: 1})
    _tell(tx, attempt, rollout)
    finished = target.final and _settle(tx, row, target)
    return Finished(accepted=True, rollout=rollout, group_finished=finished)


def _settle(tx: Tx, row: Any, target: RolloutState) -> bool:
    """Count the end in the group; whether it was the group's last."""
    cancelled = int(target is RolloutState.CANCELLED)
    count_ended(tx, {row.group_id: Ended(1, cancelled)})
    if row.group_remaining > 1:
        return False
    all_cancelled = row.group_cancelled + cancelled == row.num_rollouts
    finish_groups(tx, row.run_id, [(row.group_id, all_cancelled)])
    return True


def _possible(row: Any, target: RolloutState) -> RolloutState:
    if target is RolloutState.QUEUED and not _may_run_again(row):
        return RolloutState.CANCELLED
    return target


def _may_run_again(row: Any) -> bool:
    return not row.cancelling and row.run_state != RunState.CLOSED.value


def _moved(tx: Tx, row: Any, finish: Finish, target: RolloutState) -> Rollout:
    attempt = finish.attempt
    update: dict[str, Any] = {
        "state": target,
        "attempts": row.attempts + int(finish.counts_as_try),
        "not_before": finish.not_before if target is RolloutState.QUEUED else row.not_before,
        "failure": attempt.failure,
        "truncated_by": attempt.truncated_by,
    }
    if target.final:
        update["reward"] = attempt.reward
        update["finished_at"] = tx.now if attempt.finished_at is None else attempt.finished_at
    return rollout_of(row).model_copy(update=update)


def _moving(row: Any, rollout: Rollout) -> dict[str, Any]:
    queue = Queue.NONE
    if rollout.state is RolloutState.QUEUED:
        queue = Queue.BACKING_OFF if rollout.not_before > 0 else Queue.READY
    return {
        "moved_seq": row.seq,
        "moved_epoch": rollout.epoch,
        "new_state": rollout.state.value,
        "new_queue": queue.value,
        "new_attempts": rollout.attempts,
        "new_not_before": rollout.not_before,
        "new_reward": rollout.reward,
        "new_truncated_by": rollout.truncated_by,
        "new_failure": None if rollout.failure is None else rollout.failure.model_dump_json(),
        "new_finished_at": rollout.finished_at,
    }


def _recording(attempt: Attempt, *, accepted: bool) -> dict[str, Any]:
    return {
        "recorded_id": attempt.id,
        "new_record": attempt.model_dump_json(),
        "new_payload": attempt.payload,
        "now_accepted": accepted,
    }


def _tell(tx: Tx, attempt: Attempt, rollout: Rollout) -> None:
    retried = rollout.state is RolloutState.QUEUED
    data: dict[str, Any] = {"attempt_id": attempt.id, "epoch": rollout.epoch}
    if rollout.failure is not None:
        data |= {"failure": rollout.failure.kind.value, "code": rollout.failure.code}
    data |= {"not_before": rollout.not_before} if retried else {"reward": rollout.reward}
    tx.emit(
        "rollout.retried" if retried else f"rollout.{rollout.state.value}",
        run_id=rollout.run_id,
        group_id=rollout.group_id,
        rollout_id=rollout.id,
        data=data,
    )


def _refuse(tx: Tx, attempt: Attempt, row: Any) -> Finished:
    """Keep what a fenced attempt reported in its history; change nothing else."""
    query = sa.select(attempts.c.accepted).where(
        attempts.c.id == attempt.id, attempts.c.rollout_id == attempt.rollout_id
    )
    known = tx.conn.execute(query).one_or_none()
    if known is not None and known.accepted:
        return Finished(accepted=True, rollout=rollout_of(row))
    if known is not None:
        why = f"epoch {row.epoch} is {row.state}"
        fenced = attempt.model_copy(update={"detail": {**attempt.detail, "fenced": why}})
        tx.conn.execute(_RECORD, _recording(fenced, accepted=False))
        tx.emit(
            "attempt.fenced",
            run_id=row.run_id,
            group_id=row.group_id,
            rollout_id=row.id,
            data={"attempt_id": attempt.id, "epoch": attempt.epoch},
        )
    return Finished(accepted=False, rollout=rollout_of(row))


def recover(tx: Tx, now: float) -> int:
    """Also ends what was being cancelled when the server died, and what is left of closed runs."""
    _end_closed(tx)
    busy = tx.conn.execute(sa.select(run_counts.c.run_id).where(run_counts.c.running > 0)).scalars().all()
    lost: list[Any] = []
    for run_id in busy:
        query = (
            sa.select(rollouts, runs.c.state.label("run_state"))
            .join_from(rollouts, runs, runs.c.id == rollouts.c.run_id)
            .where(rollouts.c.run_id == run_id, rollouts.c.state == RolloutState.RUNNING.value)
        )
        lost += tx.conn.execute(query.order_by(rollouts.c.seq)).all()
    _record_lost(tx, [row.attempt_id for row in lost], now)
    again = [row for row in lost if _may_run_again(row)]
    _requeue(tx, again)
    end_cancelled(tx, [row for row in lost if not _may_run_again(row)])
    return len(again)


def _end_closed(tx: Tx) -> None:
    query = (
        sa.select(runs.c.id)
        .join_from(runs, run_counts, run_counts.c.run_id == runs.c.id)
        .where(runs.c.state == RunState.CLOSED.value, run_counts.c.queued > 0)
    )
    for run_id in tx.conn.execute(query).scalars().all():
        while not end_run_step(tx, run_id):
            continue


def _requeue(tx: Tx, rows: list[Any]) -> None:
    if not rows:
        return
    update = {"state": RolloutState.QUEUED, "not_before": 0.0}
    tx.conn.execute(_MOVE, [_moving(row, rollout_of(row).model_copy(update=update)) for row in rows])
    for row in rows:
        move(RolloutState(row.state), RolloutState.QUEUED)
        tx.count(row.run_id, running=-1, queued=1)
        tx.emit(
            "rollout.retried",
            run_id=row.run_id,
            group_id=row.group_id,
            rollout_id=row.id,
            data={"attempt_id": row.attempt_id, "epoch": row.epoch, "code": "server_restart"},
        )


def _record_lost(tx: Tx, attempt_ids: list[str], now: float) -> None:
    failure = Failure(
        kind=FailureKind.INFRASTRUCTURE,
        code="server_restart",
        message="the server went away while this attempt ran",
        operation="recover",
    )
    update = {"finished_at": now, "failure": failure, "outcome": RolloutState.QUEUED}
    for some in chunked(attempt_ids):
        query = sa.select(attempts.c.record).where(attempts.c.id.in_(some))
        known = [Attempt.model_validate_json(record) for record in tx.conn.execute(query).scalars()]
        ended = [attempt.model_copy(update=update) for attempt in known]
        tx.conn.execute(_RECORD, [_recording(attempt, accepted=False) for attempt in ended])
