"""Rollouts as an evaluation sees them: how each ended, and which task it was of."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import Any

import msgspec
import sqlalchemy as sa

from rollserve.records.evaluation import Outcome
from rollserve.records.rollout import RolloutState
from rollserve.store.ops.pages import page
from rollserve.store.ops.tx import chunked
from rollserve.store.schema import attempts, groups, rollouts
from rollserve.store.values import Page

_TITLE_CHARS = 80
_ENDED = (RolloutState.COMPLETED.value, RolloutState.FAILED.value, RolloutState.CANCELLED.value)
_IDENTITY = ("instruction", "image", "prepare", "files", "env", "grader")
"""What is to be done and how it is judged; not how it is tried (agent, tools, limits) nor what is echoed."""

_encode = msgspec.json.Encoder(order="deterministic").encode


class _Record(msgspec.Struct):
    """Of an attempt's record, what counts here."""

    timings: dict[str, float] = {}
    counts: dict[str, int] = {}


class _Failure(msgspec.Struct):
    kind: str


def task_key(task: dict[str, Any]) -> str:
    told = _encode({name: task.get(name) for name in _IDENTITY} | _pictures(task))
    return f"task_{hashlib.sha256(told).hexdigest()[:20]}"


def _pictures(task: dict[str, Any]) -> dict[str, Any]:
    """Part of what a task is, where it has some."""
    return {"pictures": task["pictures"]} if task.get("pictures") else {}


def list_outcomes(conn: sa.Connection, run_id: str, cursor: str | None, limit: int) -> Page[list[Outcome]]:
    """A list for each of ``limit`` groups at most, in the order of their submission."""
    query = sa.select(groups.c.seq, groups.c.id, groups.c.task).where(groups.c.run_id == run_id)
    found = page(conn, query, groups.c.seq, lambda row: row, cursor=cursor, limit=limit)
    rows: dict[str, list[Any]] = defaultdict(list)
    for some in chunked([row.id for row in found.items]):
        for row in conn.execute(_ROLLOUTS.where(rollouts.c.group_id.in_(some))):
            rows[row.group_id].append(row)
    return Page(items=[_outcomes(row, rows[row.id]) for row in found.items], next=found.next)


_ROLLOUTS = (
    sa.select(
        rollouts.c.group_id,
        rollouts.c.state,
        rollouts.c.reward,
        rollouts.c.failure,
        attempts.c.record,
    )
    .join_from(rollouts, attempts, attempts.c.id == rollouts.c.attempt_id, isouter=True)
    .order_by(rollouts.c.seq)
)


def _outcomes(group: Any, rows: list[Any]) -> list[Outcome]:
    task = msgspec.json.decode(group.task, type=dict[str, Any])
    key = task_key(task)
    title = str(task.get("instruction", "")).strip().partition("\n")[0][:_TITLE_CHARS]
    return [_outcome(key, title, row) for row in rows]


def _outcome(key: str, title: str, row: Any) -> Outcome:
    record = _Record() if row.record is None else msgspec.json.decode(row.record, type=_Record)
    why = _why_not(row)
    return Outcome(
        task_key=key,
        title=title,
        reward=row.reward if why is None else None,
        ungraded=why,
        sampled_tokens=record.counts.get("sampled_tokens", 0),
        prompt_tokens=record.counts.get("prompt_tokens", 0),
        turns=record.counts.get("turns", 0),
        seconds=sum(record.timings.values()),
    )


def _why_not(row: Any) -> str | None:
    """Why a rollout has no grade; None where it has one."""
    if row.state not in _ENDED:
        return "open"
    if row.reward is not None and row.state != RolloutState.CANCELLED.value:
        return None
    if row.failure is None:
        return "not_graded"
    return msgspec.json.decode(row.failure, type=_Failure).kind
