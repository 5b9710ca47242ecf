"""What became of every sampled token, and the other histograms of a run.

An attempt that has ended has one fate. What is booked under ``tokens`` in ``run_bins`` is the sum over
the run's attempts, kept by the writes that change them: sampled = the sum of all bins, at any time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from rollserve.store.ops.tx import Bins, Tx, chunked
from rollserve.store.schema import Fate, attempts, rollouts, run_bins, runs
from rollserve.store.values import Bin

TOKENS = "tokens"
STALENESS = "staleness"
STALE_LENGTH = "stale_length"
GROUPS = "groups"

MASKED = "masked"
LEFT_OUT = "left_out"
REGRADED = "regraded"
"""Sampled for a grader in a try to grade once more, which is no attempt."""

_ADD = (
    sa.update(run_bins)
    .where(
        run_bins.c.run_id == sa.bindparam("of_run"),
        run_bins.c.kind == sa.bindparam("of_kind"),
        run_bins.c.bin == sa.bindparam("of_bin"),
    )
    .values(
        many=run_bins.c.many + sa.bindparam("more"), tokens=run_bins.c.tokens + sa.bindparam("more_tokens")
    )
)
_CHANGE = (
    sa.update(attempts)
    .where(attempts.c.seq == sa.bindparam("changed_seq"))
    .values(
        fate=sa.bindparam("new_fate"),
        masked=sa.bindparam("new_masked"),
        left_out=sa.bindparam("new_left_out"),
    )
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one attempt: its fate, what it sampled, and how much of that no sample trains."""

    fate: Fate | None
    sampled: int = 0
    masked: int = 0
    left_out: int = 0

    def shares(self) -> Iterable[tuple[str, int, int]]:
        """Bin, attempts, tokens."""
        if self.fate is None:
            return
        yield self.fate.value, 1, self.sampled - self.masked - self.left_out
        if self.masked:
            yield MASKED, 1, self.masked
        if self.left_out:
            yield LEFT_OUT, 1, self.left_out


def outcome_of(row: Any) -> Outcome:
    fate = None if row.fate is None else Fate(row.fate)
    return Outcome(fate, row.sampled, row.masked, row.left_out)


def add(tx: Tx, run_id: str, kind: str, name: str, count: int, tokens: int = 0) -> None:
    """Written with the transaction (``write``)."""
    many, before = tx.bins.get((run_id, kind, name), (0, 0))
    tx.bins[run_id, kind, name] = (many + count, before + tokens)


def write(conn: sa.Connection, added: Bins) -> None:
    """What the operations of a transaction added. A run that was forgotten in it has no bins any more."""
    for (run_id, kind, name), (many, tokens) in added.items():
        if not many and not tokens:
            continue
        where = {"of_run": run_id, "of_kind": kind, "of_bin": name}
        if not conn.execute(_ADD, {**where, "more": many, "more_tokens": tokens}).rowcount:
            row = [sa.literal(value) for value in (kind, name, many, tokens)]
            made = sa.select(runs.c.id, *row).where(runs.c.id == run_id)
            conn.execute(sa.insert(run_bins).from_select(["run_id", "kind", "bin", "many", "tokens"], made))


def moved(tx: Tx, run_id: str, changes: Iterable[tuple[Outcome, Outcome]]) -> None:
    """Book what attempts were and what they are now."""
    counts: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for before, after in changes:
        for sign, outcome in ((-1, before), (1, after)):
            for name, many, sampled in outcome.shares():
                counts[name] += sign * many
                tokens[name] += sign * sampled
    for name, many in counts.items():
        if many or tokens[name]:
            add(tx, run_id, TOKENS, name, many, tokens[name])


def attempts_of(tx: Tx, group_ids: Sequence[str], fates: Collection[Fate]) -> list[Any]:
    """The groups' attempts with one of these fates, as rows with ``group_id``."""
    found: list[Any] = []
    for some in chunked(group_ids):
        query = (
            sa.select(attempts, rollouts.c.group_id)
            .join_from(attempts, rollouts, rollouts.c.id == attempts.c.rollout_id)
            .where(rollouts.c.group_id.in_(some), attempts.c.fate.in_([fate.value for fate in fates]))
        )
        found += tx.conn.execute(query).all()
    return found


def change(tx: Tx, run_id: str, rows: Sequence[Any], after: Mapping[int, Outcome]) -> None:
    """Give attempts (rows) another outcome, by ``seq``."""
    if not rows:
        return
    moved(tx, run_id, [(outcome_of(row), after[row.seq]) for row in rows])
    tx.conn.execute(
        _CHANGE,
        [
            {
                "changed_seq": row.seq,
                "new_fate": after[row.seq].fate,
                "new_masked": after[row.seq].masked,
                "new_left_out": after[row.seq].left_out,
            }
            for row in rows
        ],
    )


def turn(tx: Tx, run_id: str, group_ids: Sequence[str], fates: Collection[Fate], to: Fate) -> list[Any]:
    """Attempts of these groups go from one of ``fates`` to another; returns them as they were."""
    rows = attempts_of(tx, group_ids, fates)
    change(tx, run_id, rows, {row.seq: Outcome(to, row.sampled) for row in rows})
    return rows


def cut_short(tx: Tx, run_id: str, attempt_ids: Sequence[str], fate: Fate) -> None:
    """Attempts that were running are over; what they sampled is added when their workers tell."""
    ended = 0
    for some in chunked(attempt_ids):
        running = sa.and_(attempts.c.id.in_(some), attempts.c.fate.is_(None))
        ended += tx.conn.execute(sa.update(attempts).where(running).values(fate=fate.value)).rowcount
    if ended:
        add(tx, run_id, TOKENS, fate.value, ended)


def length_bin(tokens: int) -> str:
    """Episodes by length, in powers of two: ``512-1023`` sampled tokens."""
    low = 1 << (tokens.bit_length() - 1) if tokens else 0
    return f"{low}-{2 * low - 1}" if low else "0"


def bins_of(conn: sa.Connection, run_id: str) -> dict[str, dict[str, Bin]]:
    query = sa.select(run_bins).where(run_bins.c.run_id == run_id).order_by(run_bins.c.kind, run_bins.c.bin)
    found: dict[str, dict[str, Bin]] = {}
    for row in conn.execute(query):
        if row.many or row.tokens:
            found.setdefault(row.kind, {})[row.bin] = Bin(count=row.many, tokens=row.tokens)
    return found


def bins_of_all(conn: sa.Connection) -> dict[str, dict[str, Bin]]:
    """Over all runs there are."""
    total = sa.func.sum(run_bins.c.many).label("many"), sa.func.sum(run_bins.c.tokens).label("tokens")
    query = sa.select(run_bins.c.kind, run_bins.c.bin, *total).group_by(run_bins.c.kind, run_bins.c.bin)
    found: dict[str, dict[str, Bin]] = {}
    for row in conn.execute(query):
        if row.many or row.tokens:
            found.setdefault(row.kind, {})[row.bin] = Bin(count=int(row.many), tokens=int(row.tokens))
    return found
