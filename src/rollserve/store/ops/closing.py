"""The end of rollouts before their time, and of groups: into the run's log, or out of it.

A group is over when its last rollout has ended, or earlier by its rule; what still runs of it then ends
here and now, whatever its worker does, so that no sibling holds it up: the worker is told to stop, and
its late report is fenced.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from rollserve.errors import FailureKind
from rollserve.records.control import GroupRule
from rollserve.records.rollout import Failure, GroupState, Rollout, RolloutState, Stop, move
from rollserve.store.ops import bins, outbox
from rollserve.store.ops.rollouts import rollout_of
from rollserve.store.ops.tx import Tx, chunked
from rollserve.store.schema import Fate, Queue, groups, rollouts, run_counts, runs
from rollserve.store.values import Stopped

STEP = 500
"""Groups ended in one transaction, so that other writes get their turn in between."""

_ALIVE = (RolloutState.QUEUED.value, RolloutState.RUNNING.value)
_WHY = {
    Stop.CANCELLED: "cancelled",
    Stop.REDUNDANT: "enough others were usable",
    Stop.STRAGGLER: "the others were enough, and it had not ended",
    Stop.DEADLINE: "it had not ended when its group's time was up",
    Stop.HOPELESS: "its group could not have enough usable rollouts any more",
}
_SETTLE = (
    sa.update(groups)
    .where(groups.c.id == sa.bindparam("settled_id"))
    .values(
        remaining=groups.c.remaining - sa.bindparam("ended"),
        cancelled=groups.c.cancelled + sa.bindparam("ended_cancelled"),
        usable=groups.c.usable + sa.bindparam("ended_usable"),
        sampled=groups.c.sampled + sa.bindparam("ended_sampled"),
    )
)
_COLUMNS = [column for column in groups.c if column.name not in ("task", "key", "body_digest")]
"""Of a group; its task may be large."""

_GROUPS = sa.select(*_COLUMNS)
_SETTLE_ONE = _SETTLE.returning(*_COLUMNS)
_FINISH = (
    sa.update(groups)
    .where(groups.c.id == sa.bindparam("finished_id"))
    .values(
        state=sa.bindparam("end_state"),
        finished_at=sa.bindparam("at"),
        finished_seq=sa.bindparam("place"),
        good=sa.bindparam("is_good"),
        due_at=None,
    )
)
_GROUPS_FINISHED = sa.select(run_counts.c.groups_finished).where(
    run_counts.c.run_id == sa.bindparam("finished_run")
)
_RUN = sa.select(runs.c.id, runs.c.judged, runs.c.hold_s).where(runs.c.id == sa.bindparam("of_run"))


@dataclass(slots=True)
class Ended:
    """Rollouts of a group that ended: how many, how many of those by a cancel, how many usable, and
    what the usable ones had sampled."""

    rollouts: int = 0
    cancelled: int = 0
    usable: int = 0
    sampled: int = 0


@dataclass(slots=True)
class Closing:
    """What the end of rollouts led to, of one or more runs."""

    finished: Counter[str] = field(default_factory=Counter)
    """Groups that entered the log, by run."""
    left: int = 0
    judging: bool = False
    held: bool = False
    stopped: list[Rollout] = field(default_factory=list)
    """Were running: their workers are to be told."""

    def told(self) -> Stopped:
        return Stopped(
            finished=dict(self.finished),
            left=self.left,
            judging=self.judging,
            held=self.held,
            running=self.stopped,
        )


def rule_of(row: Any) -> GroupRule:
    return GroupRule() if row.rule is None else GroupRule.model_validate_json(row.rule)


def end_rollouts(tx: Tx, rows: Sequence[Any], stop: Stop) -> list[Rollout]:
    """End these rollouts of one run (whole rows, queued or running); their groups are not looked at."""
    failure = Failure(kind=FailureKind.CANCELLED, code=stop.value, message=_WHY[stop])
    for some in chunked([row.seq for row in rows]):
        tx.conn.execute(
            sa.update(rollouts)
            .where(rollouts.c.seq.in_(some))
            .values(
                state=RolloutState.CANCELLED.value,
                queue=Queue.NONE.value,
                finished_at=tx.now,
                failure=failure.model_dump_json(),
            )
        )
    by_run: dict[str, list[Any]] = defaultdict(list)
    for row in rows:
        move(RolloutState(row.state), RolloutState.CANCELLED)
        by_run[row.run_id].append(row)
        where = {"run_id": row.run_id, "group_id": row.group_id, "rollout_id": row.id}
        tx.emit("rollout.cancelled", **where, data={"code": stop.value})
    for run_id, theirs in by_run.items():
        running = [row.attempt_id for row in theirs if row.state == RolloutState.RUNNING.value]
        tx.count(run_id, queued=len(running) - len(theirs), running=-len(running), cancelled=len(theirs))
        bins.cut_short(tx, run_id, running, Fate(stop.value))
    update = {"state": RolloutState.CANCELLED, "finished_at": tx.now, "failure": failure}
    return [rollout_of(row).model_copy(update=update) for row in rows]


def settle(tx: Tx, run_id: str, ended: Mapping[str, Ended]) -> Closing:
    """Count ended rollouts of groups of one run, and close those groups that are over by it."""
    outcome = Closing()
    if not ended:
        return outcome
    found = _counted(tx, ended)
    over = [(row, stop) for row in sorted(found, key=lambda row: int(row.seq)) if (stop := _over(row))]
    _close(tx, run_id, over, outcome)
    return outcome


def _counted(tx: Tx, ended: Mapping[str, Ended]) -> list[Any]:
    """The groups, as rows, with the ends counted in them. One is the rule, in one statement."""
    values = [
        {
            "settled_id": group_id,
            "ended": end.rollouts,
            "ended_cancelled": end.cancelled,
            "ended_usable": end.usable,
            "ended_sampled": end.sampled,
        }
        for group_id, end in ended.items()
    ]
    if len(values) == 1:
        return list(tx.conn.execute(_SETTLE_ONE, values[0]).all())
    tx.conn.execute(_SETTLE, values)
    found: list[Any] = []
    for some in chunked(list(ended)):
        found += tx.conn.execute(_GROUPS.where(groups.c.id.in_(some))).all()
    return found


def _over(row: Any) -> Stop | None:
    """Whether the group is over, and as what its rollouts end that have not."""
    if row.state != GroupState.OPEN.value:
        return None
    if row.remaining == 0:
        return Stop.REDUNDANT
    if row.rule is None:
        return None
    rule = rule_of(row)
    wanted = rule.min_usable
    if row.usable >= row.num_rollouts:
        return Stop.REDUNDANT
    if wanted is not None and row.usable + row.remaining < wanted:
        return Stop.HOPELESS
    if rule.stragglers == "cancel" and wanted is not None and row.usable >= wanted:
        return Stop.STRAGGLER
    return None


def _stop_rest(tx: Tx, row: Any, stop: Stop) -> tuple[Any, list[Rollout]]:
    """End what has not ended of a group; its row as it is now, and what was running."""
    if row.remaining == 0:
        return row, []
    query = sa.select(rollouts).where(rollouts.c.group_id == row.id, rollouts.c.state.in_(_ALIVE))
    rest = tx.conn.execute(query.order_by(rollouts.c.seq)).all()
    ended = end_rollouts(tx, rest, stop)
    end = {"settled_id": row.id, "ended": len(rest), "ended_cancelled": len(rest)}
    tx.conn.execute(_SETTLE, {**end, "ended_usable": 0, "ended_sampled": 0})
    now = tx.conn.execute(_GROUPS.where(groups.c.id == row.id)).one()
    was = {old.id: old.state for old in rest}
    return now, [rollout for rollout in ended if was[rollout.id] == RolloutState.RUNNING.value]


def _close(tx: Tx, run_id: str, over: Sequence[tuple[Any, Stop]], outcome: Closing) -> None:
    if not over:
        return
    run = tx.conn.execute(_RUN, {"of_run": run_id}).one()
    ready: list[Any] = []
    for row, stop in over:
        now, stopped = _stop_rest(tx, row, stop)
        outcome.stopped += stopped
        if run.judged and now.usable and _state(now) is GroupState.FINISHED:
            _set(tx, now.id, state=GroupState.JUDGING.value, finished_at=tx.now, due_at=None)
            outcome.judging = True
        else:
            ready.append(now)
    _enter(tx, run, ready, outcome)


def _set(tx: Tx, group_id: str, **values: Any) -> None:
    tx.conn.execute(sa.update(groups).where(groups.c.id == group_id).values(**values))


def _state(row: Any) -> GroupState:
    """Of a group whose rollouts have all ended."""
    if row.cancelled == row.total:
        return GroupState.CANCELLED
    short = row.usable < (rule_of(row).min_usable or 0)
    return GroupState.FAILED if short else GroupState.FINISHED


def _enter(tx: Tx, run: Any, rows: Sequence[Any], outcome: Closing) -> None:
    """Groups enter the log, at once or when it is their turn."""
    if run.hold_s is None:
        outcome.finished[run.id] += _finish(tx, run.id, rows)
        return
    outcome.held = bool(rows) or outcome.held
    for row in rows:
        _set(tx, row.id, state=GroupState.HELD.value, finished_at=tx.now, due_at=tx.now + run.hold_s)
    release(tx, run.id, outcome)


def release(tx: Tx, run_id: str, outcome: Closing) -> None:
    """Held groups that wait for no earlier one, or have waited long enough, enter the log in order."""
    working = (GroupState.OPEN.value, GroupState.JUDGING.value)
    first = tx.conn.execute(
        sa.select(sa.func.min(groups.c.seq)).where(groups.c.run_id == run_id, groups.c.state.in_(working))
    ).scalar_one()
    query = _GROUPS.where(groups.c.run_id == run_id, groups.c.state == GroupState.HELD.value)
    held = tx.conn.execute(query.order_by(groups.c.seq)).all()
    overdue = max((row.seq for row in held if row.due_at <= tx.now), default=-1)
    ready = [row for row in held if first is None or row.seq < first or row.seq <= overdue]
    outcome.finished[run_id] += _finish(tx, run_id, ready)


def _finish(tx: Tx, run_id: str, rows: Sequence[Any]) -> int:
    """Each gets the next place in the run's log, whatever became of its rollouts: a trainer that waits
    for it must hear."""
    if not rows:
        return 0
    before = tx.conn.execute(_GROUPS_FINISHED, {"finished_run": run_id}).scalar_one()
    ends = [_end(tx, row, before + place) for place, row in enumerate(rows, start=1)]
    tx.conn.execute(_FINISH, ends)
    short = [row.id for row in rows if _state(row) is GroupState.FAILED]
    bins.turn(tx, run_id, short, [Fate.WAITING], Fate.SHORT)
    tx.count(
        run_id,
        groups_open=-len(rows),
        groups_started=-_started(rows),
        groups_finished=len(rows),
        groups_undelivered=len(rows),
        groups_good=sum(end["is_good"] for end in ends),
    )
    outbox.tell_groups(tx, run_id, [row.id for row in rows])
    for row, end in zip(rows, ends, strict=True):
        data = {"state": end["end_state"], "finished_seq": end["place"], "usable": row.usable}
        tx.emit("group.finished", run_id=run_id, group_id=row.id, data=data)
    return len(rows)


def _end(tx: Tx, row: Any, place: int) -> dict[str, Any]:
    state = _state(row)
    return {
        "finished_id": row.id,
        "end_state": state.value,
        "at": tx.now if row.finished_at is None else row.finished_at,
        "place": place,
        "is_good": state is GroupState.FINISHED and row.usable > 0,
    }


def _started(rows: Sequence[Any]) -> int:
    return sum(row.started_at is not None for row in rows)


# -- judged, overdue, and what nobody needs


def judge(tx: Tx, group_id: str, filtered_by: str | None, note: str | None) -> Stopped:
    """A group that is being judged enters the log, or is left out by a rule. Else nothing happens."""
    outcome = Closing()
    row = tx.conn.execute(_GROUPS.where(groups.c.id == group_id)).one_or_none()
    if row is None or row.state != GroupState.JUDGING.value:
        return outcome.told()
    _set(tx, group_id, note=note, filtered_by=filtered_by)
    if note is not None:
        bins.add(tx, row.run_id, bins.GROUPS, "filter_errors", 1)
    run = tx.conn.execute(_RUN, {"of_run": row.run_id}).one()
    if filtered_by is None:
        _enter(tx, run, [row], outcome)
        return outcome.told()
    _leave(tx, row.run_id, [row], GroupState.FILTERED, Fate.FILTERED)
    outcome.left = 1
    bins.add(tx, row.run_id, bins.GROUPS, f"filtered:{filtered_by}", 1)
    where = {"run_id": row.run_id, "group_id": group_id}
    tx.emit("group.filtered", **where, data={"by": filtered_by, "usable": row.usable})
    if run.hold_s is not None:
        release(tx, row.run_id, outcome)
    return outcome.told()


def _leave(tx: Tx, run_id: str, rows: Sequence[Any], state: GroupState, fate: Fate) -> None:
    """Groups end without a place in the log."""
    for row in rows:
        _set(tx, row.id, state=state.value, finished_at=tx.now, due_at=None)
    bins.turn(tx, run_id, [row.id for row in rows], [Fate.WAITING], fate)
    tx.count(run_id, groups_open=-len(rows), groups_started=-_started(rows))


def end_due(tx: Tx, now: float) -> tuple[Stopped, bool]:
    """Groups past their deadline are over, held ones have waited long enough; and whether that was the
    last step."""
    query = _GROUPS.where(groups.c.due_at <= now).order_by(groups.c.due_at).limit(STEP)
    rows = tx.conn.execute(query).all()
    outcome = Closing()
    for run_id in {row.run_id for row in rows}:
        late = [row for row in rows if row.run_id == run_id and row.state == GroupState.OPEN.value]
        _close(tx, run_id, [(row, Stop.DEADLINE) for row in late], outcome)
        if len(late) < sum(row.run_id == run_id for row in rows):
            release(tx, run_id, outcome)
    return outcome.told(), len(rows) < STEP


def next_due(conn: sa.Connection) -> float | None:
    due: float | None = conn.execute(sa.select(sa.func.min(groups.c.due_at))).scalar_one()
    return due


def stop_source(tx: Tx, run_id: str) -> tuple[Stopped, bool]:
    """The open groups of the run's source are not needed: they end, without a place in the log; and
    whether that was the last step."""
    outcome = Closing()
    rows = tx.conn.execute(_open_of_source(run_id).order_by(groups.c.seq).limit(STEP)).all()
    gone: list[Any] = []
    for row in rows:
        now, stopped = _stop_rest(tx, row, Stop.REDUNDANT)
        outcome.stopped += stopped
        gone.append(now)
    if gone:
        _leave(tx, run_id, gone, GroupState.CANCELLED, Fate.REDUNDANT)
        outcome.left = len(gone)
        bins.add(tx, run_id, bins.GROUPS, "stopped", len(gone))
        for row in gone:
            _set(tx, row.id, note="not needed: there are enough groups for this version")
            tx.emit("group.stopped", run_id=run_id, group_id=row.id, data={"usable": row.usable})
        release(tx, run_id, outcome)
    return outcome.told(), len(rows) < STEP


def _open_of_source(run_id: str) -> sa.Select[Any]:
    return _GROUPS.where(
        groups.c.run_id == run_id,
        groups.c.state == GroupState.OPEN.value,
        groups.c.source_seq.is_not(None),
    )


def carry_source(tx: Tx, run_id: str) -> int:
    """The open groups of the run's source go on for the next version; how many were not carried before."""
    query = _open_of_source(run_id).where(sa.not_(groups.c.carried))
    rows = tx.conn.execute(query).all()
    for some in chunked([row.id for row in rows]):
        tx.conn.execute(sa.update(groups).where(groups.c.id.in_(some)).values(carried=True))
    if rows:
        bins.add(tx, run_id, bins.GROUPS, "carried", len(rows))
    return len(rows)
