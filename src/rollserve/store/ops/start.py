"""Taking rollouts from the queue, at a cost that depends on how many are taken, not on how many wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from rollserve.records.base import new_id
from rollserve.records.rollout import Attempt, Rollout, RolloutState, move
from rollserve.records.run import RunState
from rollserve.records.task import Task
from rollserve.store.base import Start
from rollserve.store.ops.rollouts import rollout_of
from rollserve.store.ops.tx import Tx, chunked
from rollserve.store.schema import (
    QUEUE_BACKING_OFF,
    QUEUE_READY,
    Queue,
    attempts,
    groups,
    policies,
    rollouts,
    run_counts,
    runs,
)

_PROMOTE = (
    sa.update(rollouts)
    .where(QUEUE_BACKING_OFF, rollouts.c.not_before <= sa.bindparam("due"))
    .values(queue=sa.literal_column("1"))
)
_HEAD = (
    sa.select(sa.func.min(rollouts.c.seq))
    .where(rollouts.c.run_id == runs.c.id, QUEUE_READY)
    .scalar_subquery()
)
_ELIGIBLE = (
    sa.select(runs.c.id, (runs.c.max_running - run_counts.c.running).label("room"), _HEAD.label("head"))
    .join_from(runs, run_counts, run_counts.c.run_id == runs.c.id)
    .join(policies, policies.c.name == runs.c.policy)
    .where(
        runs.c.state == RunState.OPEN.value,
        sa.not_(policies.c.paused),
        run_counts.c.queued > 0,
        run_counts.c.running < runs.c.max_running,
    )
)
_READY = (
    sa.select(rollouts)
    .where(rollouts.c.run_id == sa.bindparam("of_run"), QUEUE_READY)
    .order_by(rollouts.c.seq)
    .limit(sa.bindparam("room"))
)
_START = (
    sa.update(rollouts)
    .where(
        rollouts.c.seq == sa.bindparam("started_seq"),
        rollouts.c.state == RolloutState.QUEUED.value,
    )
    .values(
        state=RolloutState.RUNNING.value,
        queue=Queue.NONE.value,
        epoch=sa.bindparam("new_epoch"),
        attempt_id=sa.bindparam("new_attempt"),
    )
)


def start_rollouts(tx: Tx, now: float, limit: int) -> list[Start]:
    tx.conn.execute(_PROMOTE, {"due": now})
    rows = _pick(tx, limit)
    if not rows:
        return []
    started = [_started(row) for row in rows]
    tx.conn.execute(
        _START,
        [
            {"started_seq": row.seq, "new_epoch": item.epoch, "new_attempt": item.attempt_id}
            for row, item in zip(rows, started, strict=True)
        ],
    )
    tx.conn.execute(sa.insert(attempts), [_new_attempt(item, now) for item in started])
    for run_id, count in Counter(item.run_id for item in started).items():
        tx.count(run_id, queued=-count, running=count)
    tasks = _tasks(tx, {item.group_id for item in started})
    answer: list[Start] = []
    for item in started:
        assert item.attempt_id is not None
        tx.emit(
            "rollout.started",
            run_id=item.run_id,
            group_id=item.group_id,
            rollout_id=item.id,
            data={"attempt_id": item.attempt_id, "epoch": item.epoch},
        )
        answer.append(Start(rollout=item, attempt_id=item.attempt_id, task=tasks[item.group_id]))
    return answer


def next_due(conn: sa.Connection) -> float | None:
    query = sa.select(sa.func.min(rollouts.c.not_before)).where(QUEUE_BACKING_OFF)
    due: float | None = conn.execute(query).scalar_one()
    return due


def _pick(tx: Tx, limit: int) -> list[Any]:
    """The first ``limit`` ready rollouts of all eligible runs, in submit order."""
    eligible = [row for row in tx.conn.execute(_ELIGIBLE) if row.head is not None]
    picked: list[Any] = []
    for run in sorted(eligible, key=lambda row: int(row.head)):
        if len(picked) >= limit and run.head > picked[limit - 1].seq:
            break
        room = min(limit, run.room)
        picked += tx.conn.execute(_READY, {"of_run": run.id, "room": room}).all()
        picked.sort(key=lambda row: int(row.seq))
    return picked[:limit]


def _started(row: Any) -> Rollout:
    state = move(RolloutState(row.state), RolloutState.RUNNING)
    update = {"state": state, "epoch": row.epoch + 1, "attempt_id": new_id("att")}
    return rollout_of(row).model_copy(update=update)


def _new_attempt(rollout: Rollout, now: float) -> dict[str, Any]:
    assert rollout.attempt_id is not None
    attempt = Attempt(id=rollout.attempt_id, rollout_id=rollout.id, epoch=rollout.epoch, started_at=now)
    return {
        "id": attempt.id,
        "run_id": rollout.run_id,
        "rollout_id": rollout.id,
        "epoch": attempt.epoch,
        "record": attempt.model_dump_json(),
    }


def _tasks(tx: Tx, group_ids: set[str]) -> dict[str, Task]:
    found: dict[str, Task] = {}
    for some in chunked(sorted(group_ids)):
        rows: Sequence[Any] = tx.conn.execute(
            sa.select(groups.c.id, groups.c.task).where(groups.c.id.in_(some))
        ).all()
        found.update({row.id: Task.model_validate_json(row.task) for row in rows})
    return found
