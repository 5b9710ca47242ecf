"""Taking rollouts from the queue, at a cost that depends on how many are taken, not on how many wait.

The order: runs of higher rank first, whatever they have running already. Among runs of equal rank each
place goes to the run with the fewest running rollouts (those just taken included), the one whose oldest
ready rollout was submitted first among equals. Nothing that runs is stopped for another run.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from rollserve.records.base import new_id
from rollserve.records.control import GroupRule
from rollserve.records.rollout import Attempt, Rollout, RolloutState, move
from rollserve.records.run import RunState
from rollserve.records.task import Task
from rollserve.store.ops.closing import rule_of
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
from rollserve.store.values import Start

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
_VERSIONS = sa.case(
    (policies.c.version > runs.c.base_version, policies.c.version - runs.c.base_version), else_=0
)
"""Since the run was opened or rewound; another run's rewind may set the policy back behind that."""

_ELIGIBLE = (
    sa.select(
        runs.c.id,
        runs.c.rank,
        run_counts.c.running,
        (runs.c.max_running - run_counts.c.running).label("room"),
        (
            runs.c.ahead_groups
            + _VERSIONS * runs.c.per_version
            - run_counts.c.groups_good
            - run_counts.c.groups_started
        ).label("new_groups"),
        _HEAD.label("head"),
    )
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
    sa.select(rollouts, groups.c.started_at)
    .join_from(rollouts, groups, groups.c.id == rollouts.c.group_id)
    .where(
        rollouts.c.run_id == sa.bindparam("of_run"),
        rollouts.c.seq > sa.bindparam("after"),
        QUEUE_READY,
    )
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
        first = {row.group_id for row in rows if row.run_id == run_id and row.started_at is None}
        _start_groups(tx, first, now)
        tx.count(run_id, queued=-count, running=count, groups_started=len(first))
    homes = _homes(tx, {item.group_id for item in started})
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
        task, rule = homes[item.group_id]
        answer.append(Start(rollout=item, attempt_id=item.attempt_id, task=task, rule=rule))
    return answer


def next_due(conn: sa.Connection) -> float | None:
    query = sa.select(sa.func.min(rollouts.c.not_before)).where(QUEUE_BACKING_OFF)
    due: float | None = conn.execute(query).scalar_one()
    return due


def _pick(tx: Tx, limit: int) -> list[Any]:
    """Rows of the rollouts to start, at most ``limit``."""
    eligible = [row for row in tx.conn.execute(_ELIGIBLE) if row.head is not None]
    picked: list[Any] = []
    for rank in sorted({row.rank for row in eligible}, reverse=True):
        if len(picked) < limit:
            picked += _share(tx, [row for row in eligible if row.rank == rank], limit - len(picked))
    return picked


def _share(tx: Tx, among: Sequence[Any], limit: int) -> list[Any]:
    """Of runs of equal rank: place by place to the one with the fewest running."""
    picked: list[Any] = []
    lines = {run.id: _Line(tx, run, limit // len(among) + 1) for run in among}
    waiting = [(run.running, run.head, run.id) for run in among]
    heapq.heapify(waiting)
    while waiting and len(picked) < limit:
        running, _, run_id = heapq.heappop(waiting)
        line = lines[run_id]
        if (row := line.first) is not None:
            picked.append(row)
            line.drop()
            if line.first is not None:
                heapq.heappush(waiting, (running + 1, line.first.seq, run_id))
    return picked


class _Line:
    """What a run could start now, in submit order, fetched as it is taken. Groups start in that order
    too, so that those that may not start yet come last."""

    def __init__(self, tx: Tx, run: Any, page: int) -> None:
        self._tx = tx
        self._run = run
        self._page = page
        self._room = run.room
        self._new_groups = run.new_groups
        self._begun: set[str] = set()
        self._after = -1
        self._rows: deque[Any] = deque()

    @property
    def first(self) -> Any | None:
        """The next row; None when there is none, or none that may start."""
        if self._room <= 0:
            return None
        if not self._rows:
            wanted = {"of_run": self._run.id, "after": self._after, "room": min(self._page, self._room)}
            self._rows.extend(self._tx.conn.execute(_READY, wanted).all())
        row = self._rows[0] if self._rows else None
        if row is None or self._new_groups is None or row.started_at is not None:
            return row
        return row if row.group_id in self._begun or len(self._begun) < self._new_groups else None

    def drop(self) -> None:
        """The first one is taken."""
        row = self._rows.popleft()
        self._after = row.seq
        self._room -= 1
        if row.started_at is None:
            self._begun.add(row.group_id)


def _start_groups(tx: Tx, group_ids: set[str], now: float) -> None:
    for some in chunked(sorted(group_ids)):
        tx.conn.execute(
            sa.update(groups)
            .where(groups.c.id.in_(some))
            .values(started_at=now, due_at=now + groups.c.deadline_s)
        )


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


def _homes(tx: Tx, group_ids: set[str]) -> dict[str, tuple[Task, GroupRule]]:
    found: dict[str, tuple[Task, GroupRule]] = {}
    for some in chunked(sorted(group_ids)):
        rows: Sequence[Any] = tx.conn.execute(
            sa.select(groups.c.id, groups.c.task, groups.c.rule).where(groups.c.id.in_(some))
        ).all()
        found.update({row.id: (Task.model_validate_json(row.task), rule_of(row)) for row in rows})
    return found
