"""What a delivery means for the tokens in it, and for which groups count as trained."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from rollserve.records.rollout import GroupState
from rollserve.store.ops import bins
from rollserve.store.ops.tx import Tx, chunked
from rollserve.store.schema import Fate, groups
from rollserve.store.values import Handed


def book(tx: Tx, run_id: str, group_ids: Sequence[str], handed: Sequence[Handed]) -> None:
    """Groups were handed over for the first time, with what was found out of their attempts."""
    found = {each.attempt_id: each for each in handed}
    rows = bins.attempts_of(tx, group_ids, [Fate.WAITING])
    after = {row.seq: _outcome(row, found.get(row.id)) for row in rows}
    bins.change(tx, run_id, rows, after)
    _histograms(tx, run_id, [(row, each) for row in rows if (each := found.get(row.id))])
    trained: dict[str, bool] = defaultdict(bool)
    for row in rows:
        trained[row.group_id] |= after[row.seq].fate is Fate.DELIVERED
    _not_good(tx, run_id, [group_id for group_id, any_left in trained.items() if not any_left])


def _outcome(row: Any, found: Handed | None) -> bins.Outcome:
    if found is None:
        return bins.Outcome(Fate.DELIVERED, row.sampled)
    if found.dropped:
        return bins.Outcome(Fate.STALE, row.sampled)
    masked = min(found.masked, row.sampled)
    left_out = max(0, row.sampled - masked - found.trained)
    return bins.Outcome(Fate.DELIVERED, row.sampled, masked, left_out)


def pass_over(tx: Tx, run_id: str, group_ids: Sequence[str], handed: Sequence[Handed]) -> None:
    """Groups are too old to be handed over."""
    rows = bins.turn(tx, run_id, group_ids, [Fate.WAITING], Fate.STALE)
    found = {each.attempt_id: each for each in handed}
    _histograms(tx, run_id, [(row, each) for row in rows if (each := found.get(row.id)) and each.dropped])
    _not_good(tx, run_id, group_ids)


def _histograms(tx: Tx, run_id: str, found: Sequence[tuple[Any, Handed]]) -> None:
    for row, each in found:
        if each.dropped:
            bins.add(tx, run_id, bins.STALE_LENGTH, bins.length_bin(row.sampled), 1, row.sampled)
        elif each.masked:
            bins.add(tx, run_id, bins.STALE_LENGTH, bins.length_bin(row.sampled), 1, each.masked)
        if each.staleness is not None and not each.dropped:
            bins.add(tx, run_id, bins.STALENESS, str(each.staleness), 1, row.sampled)


def _not_good(tx: Tx, run_id: str, group_ids: Sequence[str]) -> None:
    lost = 0
    for some in chunked(group_ids):
        good = sa.and_(groups.c.id.in_(some), groups.c.good)
        lost += tx.conn.execute(sa.update(groups).where(good).values(good=False)).rowcount
    if lost:
        tx.count(run_id, groups_good=-lost)


def take_back(tx: Tx, run_id: str, group_ids: Sequence[str]) -> None:
    """Nobody has these groups any more; they are handed over again."""
    bins.turn(tx, run_id, group_ids, [Fate.DELIVERED, Fate.STALE], Fate.WAITING)
    for some in chunked(group_ids):
        usable = sa.and_(groups.c.state == GroupState.FINISHED.value, groups.c.usable > 0)
        tx.conn.execute(sa.update(groups).where(groups.c.id.in_(some)).values(good=usable))
