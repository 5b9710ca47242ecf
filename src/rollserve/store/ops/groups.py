"""Groups: their submission, and their end, which is their entry in the run's log."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import sqlalchemy as sa

from rollserve.errors import Conflict, InvalidInput, NotFound, QueueFull, TooLarge
from rollserve.records.base import new_id
from rollserve.records.rollout import Group, GroupState, RolloutState
from rollserve.records.run import RunSpec, RunState
from rollserve.records.task import Task
from rollserve.store.base import NewGroup, Page
from rollserve.store.ops.pages import page
from rollserve.store.ops.tx import Tx, chunked
from rollserve.store.schema import Queue, groups, rollouts, run_counts, runs

RETRY_FULL_S = 2.0
MAX_TASK_CHARS = 8 << 20
"""It is sent to a worker for each attempt, and held in memory while that runs."""


def group_of(row: Any, task: Task | None = None) -> Group:
    return Group(
        id=row.id,
        run_id=row.run_id,
        task=task or Task.model_validate_json(row.task),
        num_rollouts=row.num_rollouts,
        state=row.state,
        created_at=row.created_at,
        finished_at=row.finished_at,
        finished_seq=row.finished_seq,
    )


def get_group(conn: sa.Connection, group_id: str) -> Group:
    row = conn.execute(sa.select(groups).where(groups.c.id == group_id)).one_or_none()
    if row is None:
        raise NotFound(f"no group {group_id!r}", field="group_id")
    return group_of(row)


def list_groups(
    conn: sa.Connection, run_id: str, state: str | None, cursor: str | None, limit: int
) -> Page[Group]:
    if conn.execute(sa.select(runs.c.id).where(runs.c.id == run_id)).first() is None:
        raise NotFound(f"no run {run_id!r}", field="run_id")
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
        raise NotFound(f"no run {run_id!r}", field="run_id")
    known = _known(tx, run_id, prepared)
    answer: list[Group] = []
    fresh: list[tuple[Prepared, Group]] = []
    for position, item in enumerate(prepared):
        group = known.get(item.new.key) if item.new.key is not None else None
        if group is None:
            group = _new_group(tx, run_id, item)
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
        _insert(tx, run_id, fresh)
    return answer


def _known(tx: Tx, run_id: str, prepared: Sequence[Prepared]) -> dict[str, tuple[Group, str | None]]:
    keys = [item.new.key for item in prepared if item.new.key is not None]
    known: dict[str, tuple[Group, str | None]] = {}
    for some in chunked(keys):
        query = sa.select(groups).where(groups.c.run_id == run_id, groups.c.key.in_(some))
        known.update({row.key: (group_of(row), row.body_digest) for row in tx.conn.execute(query)})
    return known


def _new_group(tx: Tx, run_id: str, item: Prepared) -> tuple[Group, str | None]:
    group = Group(
        id=new_id("grp"),
        run_id=run_id,
        task=item.new.task,
        num_rollouts=item.new.num_rollouts,
        created_at=tx.now,
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


def _insert(tx: Tx, run_id: str, fresh: Sequence[tuple[Prepared, Group]]) -> None:
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
                "remaining": group.num_rollouts,
                "cancelled": 0,
                "state": GroupState.OPEN.value,
                "created_at": tx.now,
                "holders": 0,
            }
            for item, group in fresh
        ],
    )
    new_rollouts = [
        _new_rollout(tx, run_id, group.id, index) for _, group in fresh for index in range(group.num_rollouts)
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


@dataclass(frozen=True, slots=True)
class Ended:
    """How many rollouts of a group ended, and how many of those by a cancel."""

    rollouts: int
    cancelled: int


_SETTLE = (
    sa.update(groups)
    .where(groups.c.id == sa.bindparam("settled_id"))
    .values(
        remaining=groups.c.remaining - sa.bindparam("ended"),
        cancelled=groups.c.cancelled + sa.bindparam("ended_cancelled"),
    )
)
_FINISH = (
    sa.update(groups)
    .where(groups.c.id == sa.bindparam("finished_id"))
    .values(
        state=sa.bindparam("end_state"),
        finished_at=sa.bindparam("at"),
        finished_seq=sa.bindparam("place"),
    )
)
_GROUPS_FINISHED = sa.select(run_counts.c.groups_finished).where(
    run_counts.c.run_id == sa.bindparam("finished_run")
)


def count_ended(tx: Tx, ended: Mapping[str, Ended]) -> None:
    """Count ended rollouts in their groups."""
    tx.conn.execute(
        _SETTLE,
        [
            {"settled_id": group_id, "ended": end.rollouts, "ended_cancelled": end.cancelled}
            for group_id, end in ended.items()
        ],
    )


def settle(tx: Tx, run_id: str, ended: Mapping[str, Ended]) -> None:
    """Count ended rollouts of groups of one run, and finish those groups that have none left."""
    count_ended(tx, ended)
    done: list[Any] = []
    for some in chunked(list(ended)):
        query = sa.select(groups.c.id, groups.c.seq, groups.c.num_rollouts, groups.c.cancelled)
        done += tx.conn.execute(query.where(groups.c.id.in_(some), groups.c.remaining == 0)).all()
    if done:
        done.sort(key=lambda row: int(row.seq))
        finish_groups(tx, run_id, [(row.id, row.cancelled == row.num_rollouts) for row in done])


def finish_groups(tx: Tx, run_id: str, done: Sequence[tuple[str, bool]]) -> None:
    """``done`` are groups whose last rollout ended, and whether all were cancelled. Each gets the next
    place in the run's log, whatever became of its rollouts: a trainer that waits for it must hear."""
    before = tx.conn.execute(_GROUPS_FINISHED, {"finished_run": run_id}).scalar_one()
    ends = [
        {
            "finished_id": group_id,
            "end_state": (GroupState.CANCELLED if all_cancelled else GroupState.FINISHED).value,
            "at": tx.now,
            "place": before + place,
        }
        for place, (group_id, all_cancelled) in enumerate(done, start=1)
    ]
    tx.conn.execute(_FINISH, ends)
    tx.count(run_id, groups_open=-len(done), groups_finished=len(done), groups_undelivered=len(done))
    for end in ends:
        data = {"state": end["end_state"], "finished_seq": end["place"]}
        tx.emit("group.finished", run_id=run_id, group_id=end["finished_id"], data=data)
