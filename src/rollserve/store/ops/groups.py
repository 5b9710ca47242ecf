"""Groups: looked up, and submitted."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import sqlalchemy as sa

from rollserve.errors import Conflict, InvalidInput, QueueFull, TooLarge
from rollserve.records.base import new_id
from rollserve.records.control import GroupRule
from rollserve.records.rollout import Group, GroupState, RolloutState
from rollserve.records.run import RunSpec, RunState
from rollserve.records.task import Task
from rollserve.store.ops.closing import rule_of
from rollserve.store.ops.missing import no_such
from rollserve.store.ops.pages import page
from rollserve.store.ops.tx import Tx, chunked
from rollserve.store.schema import Queue, groups, rollouts, run_counts, runs
from rollserve.store.values import NewGroup, Page

RETRY_FULL_S = 2.0
MAX_TASK_CHARS = 8 << 20
"""It is sent to a worker for each attempt, and held in memory while that runs."""


def group_of(row: Any, task: Task | None = None) -> Group:
    return Group(
        id=row.id,
        run_id=row.run_id,
        task=task or Task.model_validate_json(row.task),
        num_rollouts=row.num_rollouts,
        rule=rule_of(row),
        total=row.total,
        usable=row.usable,
        state=row.state,
        created_at=row.created_at,
        started_at=row.started_at,
        deadline_at=None if row.started_at is None else _added(row.started_at, row.deadline_s),
        finished_at=row.finished_at,
        finished_seq=row.finished_seq,
        filtered_by=row.filtered_by,
        note=row.note,
        source_seq=row.source_seq,
    )


def _added(at: float, seconds: float | None) -> float | None:
    return None if seconds is None else at + seconds


def get_group(conn: sa.Connection, group_id: str) -> Group:
    row = conn.execute(sa.select(groups).where(groups.c.id == group_id)).one_or_none()
    if row is None:
        raise no_such(conn, "group", group_id)
    return group_of(row)


def group_counts(conn: sa.Connection, group_id: str) -> dict[str, int]:
    get_group(conn, group_id)
    query = sa.select(rollouts.c.state, sa.func.count().label("many")).where(rollouts.c.group_id == group_id)
    found = {row.state: row.many for row in conn.execute(query.group_by(rollouts.c.state))}
    return {state.value: found.get(state.value, 0) for state in RolloutState}


def list_groups(
    conn: sa.Connection, run_id: str, state: str | None, cursor: str | None, limit: int
) -> Page[Group]:
    if conn.execute(sa.select(runs.c.id).where(runs.c.id == run_id)).first() is None:
        raise no_such(conn, "run", run_id)
    query = sa.select(groups).where(groups.c.run_id == run_id)
    if state is not None:
        query = query.where(groups.c.state == state)
    return page(conn, query, groups.c.seq, group_of, cursor=cursor, limit=limit)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A group to submit, with what costs time computed before the writer gets it."""

    new: NewGroup
    task_json: str
    digest: str | None


def prepare(new: Sequence[NewGroup]) -> list[Prepared]:
    """Raises ``InvalidInput`` for a group of fewer than one rollout, ``TooLarge`` for a task that would
    not fit a message to a worker."""
    for position, group in enumerate(new):
        if group.num_rollouts < 1:
            raise InvalidInput("must be 1 or more", field=f"groups.{position}.num_rollouts")
    return [_prepared(group, position) for position, group in enumerate(new)]


def _prepared(group: NewGroup, position: int) -> Prepared:
    task_json = group.task.model_dump_json()
    if len(task_json) > MAX_TASK_CHARS:
        raise TooLarge(
            f"a task may have {MAX_TASK_CHARS} characters as JSON, not {len(task_json)}",
            field=f"groups.{position}.task",
            hint="put large files into the image",
        )
    return Prepared(group, task_json, None if group.key is None else body_digest(group))


def body_digest(group: NewGroup) -> str:
    """SHA-256 of the canonical JSON of what an idempotency key stands for."""
    body = {
        "task": group.task.model_dump(mode="json"),
        "num_rollouts": group.num_rollouts,
        "request_size": group.request_size,
    }
    if group.rule != GroupRule():
        body["rule"] = group.rule.model_dump(mode="json")
    return hashlib.sha256(msgspec.json.encode(body, order="deterministic")).hexdigest()


def submit(tx: Tx, run_id: str, prepared: Sequence[Prepared]) -> list[Group]:
    """``run_id``'s state is looked at last: a request sent again is answered as it was then, even
    when the run has been closed or is full in between."""
    row = tx.conn.execute(
        sa.select(runs.c.spec, runs.c.state, run_counts)
        .join_from(runs, run_counts, runs.c.id == run_counts.c.run_id)
        .where(runs.c.id == run_id)
    ).one_or_none()
    if row is None:
        raise no_such(tx.conn, "run", run_id)
    known = _known(tx, run_id, prepared)
    answer: list[Group] = []
    fresh: list[tuple[Prepared, Group]] = []
    for position, item in enumerate(prepared):
        group = known.get(item.new.key) if item.new.key is not None else None
        if group is None:
            group = new_group(tx, run_id, item)
            fresh.append((item, group[0]))
            if item.new.key is not None:
                known[item.new.key] = group
        elif group[1] != item.digest:
            raise Conflict(
                f"key {item.new.key!r} was used for another group",
                field=f"groups.{position}",
                hint="an idempotency key stands for one request",
            )
        answer.append(group[0])
    if fresh:
        _admit(row, run_id, len(fresh))
        insert(tx, run_id, fresh)
    return answer


def _known(tx: Tx, run_id: str, prepared: Sequence[Prepared]) -> dict[str, tuple[Group, str | None]]:
    keys = [item.new.key for item in prepared if item.new.key is not None]
    known: dict[str, tuple[Group, str | None]] = {}
    for some in chunked(keys):
        query = sa.select(groups).where(groups.c.run_id == run_id, groups.c.key.in_(some))
        known.update({row.key: (group_of(row), row.body_digest) for row in tx.conn.execute(query)})
    return known


def new_group(tx: Tx, run_id: str, item: Prepared) -> tuple[Group, str | None]:
    group = Group(
        id=new_id("grp"),
        run_id=run_id,
        task=item.new.task,
        num_rollouts=item.new.num_rollouts,
        rule=item.new.rule,
        total=item.new.num_rollouts + item.new.rule.oversample,
        created_at=tx.now,
        source_seq=item.new.source_seq,
    )
    return group, item.digest


def _admit(row: Any, run_id: str, new: int) -> None:
    if row.state == RunState.CLOSED.value:
        raise Conflict(f"run {run_id!r} is closed", field="run_id")
    quota = RunSpec.model_validate_json(row.spec).quota
    if row.groups_open + new > quota.max_queued_groups:
        raise QueueFull(
            f"{row.groups_open} groups of run {run_id!r} are open, of at most {quota.max_queued_groups}",
            field="groups",
            hint=f"at most {quota.max_queued_groups} fit at all" if new > quota.max_queued_groups else None,
            retry_after_s=RETRY_FULL_S,
        )
    if row.groups_undelivered >= quota.max_undelivered_groups:
        raise QueueFull(
            f"{row.groups_undelivered} finished groups of run {run_id!r} wait for a trainer",
            field="groups",
            hint="lease and acknowledge them",
            retry_after_s=RETRY_FULL_S,
        )


def insert(tx: Tx, run_id: str, fresh: Sequence[tuple[Prepared, Group]]) -> None:
    tx.conn.execute(
        sa.insert(groups),
        [
            {
                "id": group.id,
                "run_id": run_id,
                "key": item.new.key,
                "body_digest": item.digest,
                "task": item.task_json,
                "num_rollouts": group.num_rollouts,
                "rule": None if group.rule == GroupRule() else group.rule.model_dump_json(),
                "total": group.total,
                "remaining": group.total,
                "cancelled": 0,
                "state": GroupState.OPEN.value,
                "created_at": tx.now,
                "holders": 0,
                "deadline_s": group.rule.deadline_s,
                "source_seq": group.source_seq,
            }
            for item, group in fresh
        ],
    )
    new_rollouts = [
        _new_rollout(tx, run_id, group.id, index) for _, group in fresh for index in range(group.total)
    ]
    tx.conn.execute(sa.insert(rollouts), new_rollouts)
    tx.count(run_id, queued=len(new_rollouts), groups_open=len(fresh))
    for _, group in fresh:
        data = {"num_rollouts": group.num_rollouts}
        tx.emit("group.submitted", run_id=run_id, group_id=group.id, data=data)


def _new_rollout(tx: Tx, run_id: str, group_id: str, index: int) -> dict[str, Any]:
    return {
        "id": new_id("rol"),
        "group_id": group_id,
        "run_id": run_id,
        "idx": index,
        "state": RolloutState.QUEUED.value,
        "queue": Queue.READY.value,
        "cancelling": False,
        "epoch": 0,
        "attempts": 0,
        "not_before": 0.0,
        "created_at": tx.now,
    }
