"""The end of an attempt: by report (``finish_attempt``) or by the server's death (``recover``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from rollserve.errors import FailureKind
from rollserve.records.rollout import Attempt, Failure, Rollout, RolloutState, move
from rollserve.records.run import RunState
from rollserve.store.ops.bins import Outcome, moved, outcome_of
from rollserve.store.ops.cancel import end_cancelled, end_run_step
from rollserve.store.ops.closing import Ended, settle
from rollserve.store.ops.rollouts import rollout_of
from rollserve.store.ops.tx import Tx
from rollserve.store.payload import SealedPayload
from rollserve.store.schema import ATTEMPT_UNTOLD, Fate, Queue, attempts, rollouts, run_counts, runs
from rollserve.store.values import Finish, Finished, Stopped

SAMPLED = "sampled_tokens"
"""Among an attempt's counts."""

_CURRENT = (
    sa.select(rollouts, runs.c.state.label("run_state"))
    .join_from(rollouts, runs, runs.c.id == rollouts.c.run_id)
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
        fate=sa.bindparam("now_fate"),
        sampled=sa.bindparam("now_sampled"),
    )
)
_ENDS = {
    RolloutState.QUEUED: Fate.RETRIED,
    RolloutState.COMPLETED: Fate.WAITING,
    RolloutState.FAILED: Fate.FAILED,
    RolloutState.CANCELLED: Fate.CANCELLED,
}


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
    now = Outcome(Fate.WAITING if rollout.reward is not None else _ENDS[target], _sampled(attempt))
    tx.conn.execute(_RECORD, _recording(attempt, now, accepted=True))
    moved(tx, rollout.run_id, [(Outcome(None), now)])
    tx.count(rollout.run_id, running=-1, **{target.value: 1})
    _tell(tx, attempt, rollout)
    if not target.final:
        return Finished(accepted=True, rollout=rollout)
    others = _settle(tx, rollout, now)
    return Finished(
        accepted=True, rollout=rollout, group_finished=bool(others.finished.get(row.run_id)), others=others
    )


def _sampled(attempt: Attempt) -> int:
    return max(0, attempt.counts.get(SAMPLED, 0))


def _settle(tx: Tx, rollout: Rollout, outcome: Outcome) -> Stopped:
    """Count the end in the group, which may be over by it."""
    usable = rollout.reward is not None
    end = Ended(
        rollouts=1,
        cancelled=int(rollout.state is RolloutState.CANCELLED),
        usable=int(usable),
        sampled=outcome.sampled if usable else 0,
    )
    return settle(tx, rollout.run_id, {rollout.group_id: end}).told()


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


def _recording(attempt: Attempt, outcome: Outcome, *, accepted: bool) -> dict[str, Any]:
    return {
        "recorded_id": attempt.id,
        "new_record": attempt.model_dump_json(),
        "new_payload": attempt.payload,
        "now_accepted": accepted,
        "now_fate": outcome.fate,
        "now_sampled": outcome.sampled,
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
    query = sa.select(attempts).where(
        attempts.c.id == attempt.id, attempts.c.rollout_id == attempt.rollout_id
    )
    known = tx.conn.execute(query).one_or_none()
    if known is None:
        return Finished(accepted=False, rollout=rollout_of(row))
    stored = Attempt.model_validate_json(known.record)
    if known.accepted and stored.payload == attempt.payload:
        return Finished(accepted=True, rollout=rollout_of(row))
    before = outcome_of(known)
    now = replace(before, fate=before.fate or Fate.RETRIED, sampled=max(before.sampled, _sampled(attempt)))
    tx.conn.execute(_RECORD, _recording(_fenced(attempt, stored, row), now, accepted=bool(known.accepted)))
    moved(tx, row.run_id, [(before, now)])
    tx.emit(
        "attempt.fenced",
        run_id=row.run_id,
        group_id=row.group_id,
        rollout_id=row.id,
        data={"attempt_id": attempt.id, "epoch": attempt.epoch},
    )
    return Finished(accepted=False, rollout=rollout_of(row))


def _fenced(attempt: Attempt, stored: Attempt, row: Any) -> Attempt:
    """Where the server had ended it (its worker was lost, or overdue), only what it recorded is news."""
    if stored.finished_at is not None:
        news: dict[str, Any] = {"counts": attempt.counts or stored.counts, "timings": attempt.timings}
        if stored.payload is None:
            news |= {"payload": attempt.payload, "payload_bytes": attempt.payload_bytes}
        attempt = stored.model_copy(update=news)
    why = f"epoch {row.epoch} is {row.state}"
    return attempt.model_copy(update={"detail": {**attempt.detail, "fenced": why}})


def list_interrupted(conn: sa.Connection) -> list[tuple[str, str]]:
    """Those whose worker never told their end, be their rollout over or not."""
    query = sa.select(attempts.c.run_id, attempts.c.id).where(ATTEMPT_UNTOLD)
    return [(run_id, attempt_id) for run_id, attempt_id in conn.execute(query)]


def recover(tx: Tx, now: float, payloads: Mapping[str, SealedPayload]) -> int:
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
    _record_lost(tx, {row.attempt_id for row in lost if _may_run_again(row)}, now, payloads)
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


def _record_lost(tx: Tx, again: set[str], now: float, payloads: Mapping[str, SealedPayload]) -> None:
    """``again`` are attempts whose rollouts are tried again; the others were being stopped."""
    failure = Failure(
        kind=FailureKind.INFRASTRUCTURE,
        code="server_restart",
        message="the server went away while this attempt ran",
        operation="recover",
    )
    update = {"finished_at": now, "failure": failure, "outcome": RolloutState.QUEUED}
    for row in tx.conn.execute(sa.select(attempts).where(ATTEMPT_UNTOLD)).all():
        ended = Attempt.model_validate_json(row.record).model_copy(update=update)
        if ended.id in payloads:
            ended = payloads[ended.id].of(ended)
        before = outcome_of(row)
        fate = before.fate or (Fate.RETRIED if ended.id in again else Fate.CANCELLED)
        after = Outcome(fate, _sampled(ended))
        tx.conn.execute(_RECORD, _recording(ended, after, accepted=False))
        moved(tx, row.run_id, [(before, after)])
