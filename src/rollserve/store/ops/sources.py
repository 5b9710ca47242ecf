"""Task sources: their place moves with the groups that are made of it, in one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from rollserve.errors import NotFound
from rollserve.records.delivery import Checkpoint
from rollserve.records.rollout import Group, GroupState, RolloutState
from rollserve.records.run import RunState, SourceState, SourceStatus
from rollserve.store.ops import bins, outbox
from rollserve.store.ops.groups import Prepared, group_of, insert, new_group
from rollserve.store.ops.tx import Tx, chunked
from rollserve.store.schema import GROUP_JUDGING, groups, policies, rollouts, run_counts, runs, sources
from rollserve.store.values import Fed, SourceResult, Supply

_LEFT_OUT = (GroupState.FILTERED.value, GroupState.CANCELLED.value, GroupState.FAILED.value)


def status_of(row: Any) -> SourceStatus:
    return SourceStatus(
        state=row.state, position=row.position, lines=row.lines, digest=row.digest, detail=row.detail
    )


def get_source(conn: sa.Connection, run_id: str) -> SourceStatus | None:
    row = conn.execute(sa.select(sources).where(sources.c.run_id == run_id)).one_or_none()
    return None if row is None else status_of(row)


def position(conn: sa.Connection, run_id: str) -> int | None:
    query = sa.select(sources.c.position).where(sources.c.run_id == run_id)
    found: int | None = conn.execute(query).scalar_one_or_none()
    return found


def list_sources(conn: sa.Connection) -> list[str]:
    """Also those that have ended: what is open of them may be more than is needed."""
    query = sa.select(sources.c.run_id).join_from(sources, runs, runs.c.id == sources.c.run_id)
    return list(conn.execute(query.where(runs.c.state != RunState.CLOSED.value)).scalars())


def supply(conn: sa.Connection, run_id: str) -> Supply:
    """Raises ``NotFound`` for a run without a source."""
    counts = run_counts.c
    query = (
        sa.select(
            sources, runs.c.base_version, policies.c.version,
            counts.groups_open, counts.groups_undelivered, counts.groups_good,
        )
        .join_from(sources, runs, runs.c.id == sources.c.run_id)
        .join(policies, policies.c.name == runs.c.policy)
        .join(run_counts, counts.run_id == runs.c.id)
        .where(sources.c.run_id == run_id)
    )  # fmt: skip
    row = conn.execute(query).one_or_none()
    if row is None:
        raise NotFound(f"run {run_id!r} has no task source", field="run_id")
    return Supply(
        source=status_of(row),
        version=row.version,
        base_version=row.base_version,
        open=row.groups_open,
        undelivered=row.groups_undelivered,
        good=row.groups_good,
    )


def results(conn: sa.Connection, run_id: str, limit: int) -> list[SourceResult]:
    mine = sa.and_(
        groups.c.run_id == run_id, groups.c.source_seq.is_not(None), groups.c.finished_at.is_not(None)
    )
    query = sa.select(
        groups.c.id, groups.c.source_seq, groups.c.task, groups.c.state, groups.c.filtered_by
    ).where(mine)
    rows = conn.execute(query.order_by(groups.c.source_seq.desc()).limit(limit)).all()
    earned: dict[str, list[float]] = {row.id: [] for row in rows}
    for some in chunked(list(earned)):
        rewarded = sa.and_(rollouts.c.group_id.in_(some), rollouts.c.reward.is_not(None))
        asked = sa.select(rollouts.c.group_id, rollouts.c.reward).where(rewarded)
        for group_id, reward in conn.execute(asked.order_by(rollouts.c.seq)):
            earned[group_id].append(reward)
    return [
        SourceResult(
            place=row.source_seq,
            metadata=msgspec.json.decode(row.task).get("metadata", {}),
            rewards=earned[row.id],
            state=row.state,
            filtered_by=row.filtered_by,
        )
        for row in reversed(rows)
    ]


def feed(tx: Tx, run_id: str, fed: Fed, prepared: Sequence[Prepared]) -> bool:
    mine = sources.c.run_id == run_id
    moved = tx.conn.execute(
        sa.update(sources)
        .where(mine, sources.c.position == fed.position, sources.c.state == SourceState.RUNNING.value)
        .values(position=fed.next, state=fed.state.value, detail=fed.detail)
    ).rowcount
    open_run = sa.select(runs.c.id).where(runs.c.id == run_id, runs.c.state != RunState.CLOSED.value)
    if not moved or tx.conn.execute(open_run).first() is None:
        return False
    there = _places(tx, run_id, fed)
    fresh = [(item, new_group(tx, run_id, item)[0]) for item in prepared if item.new.source_seq not in there]
    if fresh:
        insert(tx, run_id, fresh)
    if fed.broken:
        bins.add(tx, run_id, bins.GROUPS, "broken_lines", len(fed.broken))
    for line in fed.broken:
        tx.emit("source.skipped", run_id=run_id, data={"line": line})
    if fed.state is not SourceState.RUNNING:
        told = {"detail": fed.detail, "position": fed.next}
        tx.emit(f"source.{fed.state.value}", run_id=run_id, data=told)
        outbox.tell(tx, run_id, f"source.{fed.state.value}", told)
    return True


def _places(tx: Tx, run_id: str, fed: Fed) -> set[int]:
    """Where a group was made already: the source was set back."""
    query = sa.select(groups.c.source_seq).where(
        groups.c.run_id == run_id, groups.c.source_seq >= fed.position, groups.c.source_seq < fed.next
    )
    return set(tx.conn.execute(query).scalars())


def rewind(tx: Tx, run_id: str, target: Checkpoint | None) -> None:
    """Back to the checkpoint's place, or to the first task after it whose group was left out since: those
    are taken again. Tasks whose groups still stand are not: their groups are handed over again."""
    known = get_source(tx.conn, run_id)
    if known is None:
        return
    since = 0.0 if target is None else target.created_at
    left_out = sa.and_(
        groups.c.run_id == run_id,
        groups.c.source_seq.is_not(None),
        groups.c.state.in_(_LEFT_OUT),
        groups.c.finished_seq.is_(None),
        groups.c.finished_at >= since,
    )
    first = tx.conn.execute(sa.select(sa.func.min(groups.c.source_seq)).where(left_out)).scalar_one()
    tx.conn.execute(sa.update(groups).where(left_out).values(source_seq=None))
    kept = 0 if target is None else target.source_position or 0
    place = min(known.position, kept, kept if first is None else first)
    state = known.state if known.state is SourceState.FAILED else SourceState.RUNNING
    values = {"position": place, "state": state.value}
    tx.conn.execute(sa.update(sources).where(sources.c.run_id == run_id).values(**values))


def list_judging(conn: sa.Connection, limit: int) -> list[tuple[Group, list[float]]]:
    query = sa.select(groups).where(GROUP_JUDGING).order_by(groups.c.seq)
    rows = conn.execute(query.limit(limit)).all()
    ended = sa.select(rollouts.c.reward).where(
        rollouts.c.reward.is_not(None), rollouts.c.state != RolloutState.CANCELLED.value
    )
    return [
        (
            group_of(row),
            list(conn.execute(ended.where(rollouts.c.group_id == row.id).order_by(rollouts.c.idx)).scalars()),
        )
        for row in rows
    ]
