"""The tables. What is queried is a column; what is only echoed rests as the record's JSON.

``seq`` columns are the order of insertion (submit order, commit order) and serve as page cursors.
``rollouts.queue`` is the scheduler's view of a rollout: 0 not queued, 1 ready to start, 2 backing off
until ``not_before``; the two partial indexes on it keep a start independent of how many are queued.
Counters in ``run_counts`` are kept by the writes that change them, so that quotas and status cost no
scan. Changing a table means a new file in ``migrations/versions``.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum

import sqlalchemy as sa

SEQ = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
"""SQLite numbers rows only in a column that is exactly ``INTEGER PRIMARY KEY``."""

ID = sa.String(160)
NAME = sa.String(128)
STATE = sa.String(16)


class Queue(IntEnum):
    """Values of ``rollouts.queue``."""

    NONE = 0
    READY = 1
    BACKING_OFF = 2


class Handover(StrEnum):
    """Values of ``deliveries.state`` and ``leases.state``. ``returned``: a group that was given back and
    waits to be leased again. ``withheld``: it was too old to be handed over."""

    LEASED = "leased"
    ACKED = "acked"
    COMMITTED = "committed"
    RETURNED = "returned"
    WITHHELD = "withheld"


class Fate(StrEnum):
    """What became of an attempt's sampled tokens; values of ``attempts.fate``. Each attempt that has ended
    has exactly one. ``waiting``: in a rollout that ended well, of a group not handed over yet."""

    WAITING = "waiting"
    DELIVERED = "delivered"
    FILTERED = "filtered"
    STALE = "stale"
    SHORT = "short"
    REDUNDANT = "redundant"
    STRAGGLER = "straggler"
    DEADLINE = "deadline"
    HOPELESS = "hopeless"
    CANCELLED = "cancelled"
    FAILED = "failed"
    RETRIED = "retried"


metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

api_keys = sa.Table(
    "api_keys",
    metadata,
    sa.Column("digest", sa.String(64), primary_key=True),
    sa.Column("name", sa.String(256), nullable=False),
    sa.Column("role", sa.String(32), nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
)

policies = sa.Table(
    "policies",
    metadata,
    sa.Column("name", NAME, primary_key=True),
    sa.Column("spec", sa.Text, nullable=False),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("paused", sa.Boolean, nullable=False),
    sa.Column("labels", sa.Text, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("template", sa.Text),
    sa.Column("weights", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("weight_update", sa.Text),
    sa.Column("canary", sa.Text),
)

backends = sa.Table(
    "backends",
    metadata,
    sa.Column("seq", SEQ, primary_key=True, autoincrement=True),
    sa.Column("id", ID, nullable=False, unique=True),
    sa.Column("policy", sa.ForeignKey("policies.name"), nullable=False, index=True),
    sa.Column("spec", sa.Text, nullable=False),
    sa.Column("api_key", sa.Text),
    sa.Column("info", sa.Text, nullable=False),
    sa.Column("state", STATE, nullable=False),
    sa.Column("error", sa.Text),
    sqlite_autoincrement=True,
)

runs = sa.Table(
    "runs",
    metadata,
    sa.Column("seq", SEQ, primary_key=True, autoincrement=True),
    sa.Column("id", ID, nullable=False, unique=True),
    sa.Column("policy", sa.ForeignKey("policies.name"), nullable=False),
    sa.Column("state", STATE, nullable=False, index=True),
    sa.Column("spec", sa.Text, nullable=False),
    sa.Column("max_running", sa.Integer, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("rank", sa.Integer, nullable=False, server_default="0"),
    sa.Column("base_version", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("ahead_groups", sa.BigInteger),
    sa.Column("per_version", sa.BigInteger),
    sa.Column("judged", sa.Boolean, nullable=False, server_default="0"),
    sa.Column("hold_s", sa.Double),
    sqlite_autoincrement=True,
)
"""``rank``: higher starts first. A paced run may have started ``ahead_groups`` groups and ``per_version``
for each version of its policy since ``base_version``. ``judged``: it has filters. ``hold_s``: its groups
are handed over in submit order, and wait so long for earlier ones."""

COUNTERS = (
    "queued",
    "running",
    "completed",
    "failed",
    "cancelled",
    "groups_open",
    "groups_finished",
    "groups_undelivered",
    "groups_started",
    "groups_good",
)
"""``groups_open`` are not in the log yet, ``groups_started`` those of them that were started;
``groups_good`` are in the log and worth training, since the run was opened or rewound."""

run_counts = sa.Table(
    "run_counts",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id"), primary_key=True),
    *(sa.Column(name, sa.BigInteger, nullable=False, server_default="0") for name in COUNTERS),
)

groups = sa.Table(
    "groups",
    metadata,
    sa.Column("seq", SEQ, primary_key=True, autoincrement=True),
    sa.Column("id", ID, nullable=False, unique=True),
    sa.Column("run_id", sa.ForeignKey("runs.id"), nullable=False),
    sa.Column("key", sa.String(512)),
    sa.Column("body_digest", sa.String(64)),
    sa.Column("task", sa.Text, nullable=False),
    sa.Column("num_rollouts", sa.Integer, nullable=False),
    sa.Column("remaining", sa.Integer, nullable=False),
    sa.Column("cancelled", sa.Integer, nullable=False),
    sa.Column("state", STATE, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("finished_at", sa.Double),
    sa.Column("finished_seq", sa.BigInteger),
    sa.Column("holders", sa.Integer, nullable=False),
    sa.Column("rule", sa.Text),
    sa.Column("total", sa.Integer, nullable=False, server_default="0"),
    sa.Column("usable", sa.Integer, nullable=False, server_default="0"),
    sa.Column("sampled", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("deadline_s", sa.Double),
    sa.Column("started_at", sa.Double),
    sa.Column("due_at", sa.Double, index=True),
    sa.Column("good", sa.Boolean, nullable=False, server_default="0"),
    sa.Column("carried", sa.Boolean, nullable=False, server_default="0"),
    sa.Column("filtered_by", sa.String(256)),
    sa.Column("note", sa.Text),
    sa.Column("source_seq", sa.BigInteger),
    sa.Index(None, "run_id", "source_seq"),
    sa.UniqueConstraint("run_id", "key"),
    sa.UniqueConstraint("run_id", "finished_seq"),
    sa.Index(None, "run_id", "state", "seq"),
    sqlite_autoincrement=True,
)
"""``remaining`` counts rollouts that have not ended, ``holders`` trainers that have acked it. ``due_at``:
when an open group is ended as it is, or a held one enters the log."""

GROUP_JUDGING = groups.c.state == sa.literal_column("'judging'")

sa.Index("ix_groups_judging", groups.c.seq, sqlite_where=GROUP_JUDGING, postgresql_where=GROUP_JUDGING)

rollouts = sa.Table(
    "rollouts",
    metadata,
    sa.Column("seq", SEQ, primary_key=True, autoincrement=True),
    sa.Column("id", ID, nullable=False, unique=True),
    sa.Column("group_id", sa.ForeignKey("groups.id"), nullable=False),
    sa.Column("run_id", sa.ForeignKey("runs.id"), nullable=False),
    sa.Column("idx", sa.Integer, nullable=False),
    sa.Column("state", STATE, nullable=False),
    sa.Column("queue", sa.SmallInteger, nullable=False),
    sa.Column("cancelling", sa.Boolean, nullable=False),
    sa.Column("epoch", sa.Integer, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("not_before", sa.Double, nullable=False),
    sa.Column("reward", sa.Double),
    sa.Column("truncated_by", sa.String(256)),
    sa.Column("failure", sa.Text),
    sa.Column("attempt_id", ID),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("finished_at", sa.Double),
    sa.UniqueConstraint("group_id", "idx"),
    sa.Index(None, "run_id", "state", "seq"),
    sqlite_autoincrement=True,
)

QUEUE_READY = rollouts.c.queue == sa.literal_column("1")
QUEUE_BACKING_OFF = rollouts.c.queue == sa.literal_column("2")
"""Written as literals: a partial index is used only where the query's text implies its condition."""

sa.Index(
    "ix_rollouts_ready",
    rollouts.c.run_id,
    rollouts.c.seq,
    sqlite_where=QUEUE_READY,
    postgresql_where=QUEUE_READY,
)
sa.Index(
    "ix_rollouts_backing_off",
    rollouts.c.not_before,
    sqlite_where=QUEUE_BACKING_OFF,
    postgresql_where=QUEUE_BACKING_OFF,
)

attempts = sa.Table(
    "attempts",
    metadata,
    sa.Column("seq", SEQ, primary_key=True, autoincrement=True),
    sa.Column("id", ID, nullable=False, unique=True),
    sa.Column("run_id", sa.ForeignKey("runs.id"), nullable=False, index=True),
    sa.Column("rollout_id", sa.ForeignKey("rollouts.id"), nullable=False),
    sa.Column("epoch", sa.Integer, nullable=False),
    sa.Column("accepted", sa.Boolean),
    sa.Column("payload", sa.String(512)),
    sa.Column("record", sa.Text, nullable=False),
    sa.Column("fate", STATE),
    sa.Column("sampled", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("masked", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("left_out", sa.BigInteger, nullable=False, server_default="0"),
    sa.UniqueConstraint("rollout_id", "epoch"),
    sqlite_autoincrement=True,
)
"""``accepted``: NULL while it runs, true when its end was taken, false when it was fenced or lost. Of its
``sampled`` tokens, a delivery did not train ``masked`` (too old) and ``left_out`` (in no sample)."""

ATTEMPT_UNTOLD = attempts.c.accepted.is_(None)

sa.Index("ix_attempts_untold", attempts.c.seq, sqlite_where=ATTEMPT_UNTOLD, postgresql_where=ATTEMPT_UNTOLD)

run_bins = sa.Table(
    "run_bins",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("kind", sa.String(16), primary_key=True),
    sa.Column("bin", sa.String(256), primary_key=True),
    sa.Column("many", sa.BigInteger, nullable=False),
    sa.Column("tokens", sa.BigInteger, nullable=False),
)
"""Histograms of a run, kept by the writes that change them (``ops.bins``)."""

sources = sa.Table(
    "sources",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("state", STATE, nullable=False),
    sa.Column("position", sa.BigInteger, nullable=False),
    sa.Column("lines", sa.BigInteger, nullable=False),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("detail", sa.Text, nullable=False),
)

trainers = sa.Table(
    "trainers",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("trainer", NAME, primary_key=True),
    sa.Column("epoch", sa.Integer, nullable=False),
    sa.Column("frontier", sa.BigInteger, nullable=False),
)
"""``frontier`` is the last place of the log that was ever leased to this trainer."""

checkpoints = sa.Table(
    "checkpoints",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("trainer", NAME, primary_key=True),
    sa.Column("name", NAME, primary_key=True),
    sa.Column("seq", sa.BigInteger, nullable=False),
    sa.Column("policy_version", sa.BigInteger, nullable=False),
    sa.Column("cursor", sa.Text),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("source_position", sa.BigInteger),
    sa.UniqueConstraint("run_id", "trainer", "seq"),
)

leases = sa.Table(
    "leases",
    metadata,
    sa.Column("id", ID, primary_key=True),
    sa.Column("run_id", sa.ForeignKey("runs.id"), nullable=False, index=True),
    sa.Column("trainer", NAME, nullable=False),
    sa.Column("epoch", sa.Integer, nullable=False),
    sa.Column("state", STATE, nullable=False),
    sa.Column("expires_at", sa.Double, nullable=False),
    sa.Column("group_ids", sa.Text, nullable=False),
    sa.Column("facts", sa.Text),
    sa.Index(None, "state", "expires_at"),
)

"""``facts``: what the delivery found out of each attempt in it (``store.values.Handed``)."""

deliveries = sa.Table(
    "deliveries",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("trainer", NAME, primary_key=True),
    sa.Column("finished_seq", sa.BigInteger, primary_key=True),
    sa.Column("group_id", ID, nullable=False),
    sa.Column("state", STATE, nullable=False),
    sa.Column("lease_id", ID, index=True),
    sa.Column("checkpoint_seq", sa.BigInteger),
    sa.Index(None, "run_id", "trainer", "state", "finished_seq"),
)

callbacks = sa.Table(
    "callbacks",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("rule", sa.Text, nullable=False),
    sa.Column("url", sa.Text, nullable=False),
    sa.Column("trainer", NAME, nullable=False),
    sa.Column("events", sa.Text, nullable=False),
    sa.Column("secret", sa.Text, nullable=False),
    sa.Column("state", STATE, nullable=False),
    sa.Column("detail", sa.Text, nullable=False),
)

callback_messages = sa.Table(
    "messages",
    metadata,
    sa.Column("seq", SEQ, primary_key=True, autoincrement=True),
    sa.Column("id", ID, nullable=False, unique=True),
    sa.Column("run_id", sa.ForeignKey("runs.id"), nullable=False),
    sa.Column("type", sa.String(64), nullable=False),
    sa.Column("group_id", ID, index=True),
    sa.Column("data", sa.Text, nullable=False),
    sa.Column("state", STATE, nullable=False, index=True),
    sa.Column("tries", sa.Integer, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("due_at", sa.Double, nullable=False),
    sa.Column("ended_at", sa.Double),
    sa.Column("lease_id", ID),
    sa.Column("status", sa.Integer),
    sa.Column("error", sa.Text),
    sa.Index(None, "run_id", "state", "due_at"),
    sqlite_autoincrement=True,
)
"""The outbox, in the database ``messages``: what is to be sent to callbacks, written with the change that it
tells of. ``lease_id`` is that of the try on its way."""

regrades = sa.Table(
    "regrades",
    metadata,
    sa.Column("seq", SEQ, primary_key=True, autoincrement=True),
    sa.Column("id", ID, nullable=False, unique=True),
    sa.Column("run_id", sa.ForeignKey("runs.id"), nullable=False, index=True),
    sa.Column("grader", sa.Text, nullable=False),
    sa.Column("routes", sa.Text, nullable=False, server_default="{}"),
    sa.Column("created_at", sa.Double, nullable=False),
    sqlite_autoincrement=True,
)

regradings = sa.Table(
    "gradings",
    metadata,
    sa.Column("seq", SEQ, primary_key=True, autoincrement=True),
    sa.Column("regrade_id", sa.ForeignKey("regrades.id"), nullable=False),
    sa.Column("run_id", sa.ForeignKey("runs.id"), nullable=False, index=True),
    sa.Column("rollout_id", sa.ForeignKey("rollouts.id"), nullable=False),
    sa.Column("attempt_id", ID, nullable=False),
    sa.Column("state", STATE, nullable=False),
    sa.Column("tries", sa.Integer, nullable=False),
    sa.Column("not_before", sa.Double, nullable=False),
    sa.Column("before", sa.Double),
    sa.Column("graded", sa.Text),
    sa.UniqueConstraint("regrade_id", "rollout_id"),
    sa.Index(None, "state", "not_before"),
    sqlite_autoincrement=True,
)
"""In the database ``gradings``. ``before`` is the rollout's own reward when the regrade was begun; ``tries``
fence late ends."""

events = sa.Table(
    "events",
    metadata,
    sa.Column("seq", SEQ, primary_key=True, autoincrement=True),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("type", sa.String(64), nullable=False),
    sa.Column("policy", NAME),
    sa.Column("run_id", ID),
    sa.Column("group_id", ID),
    sa.Column("rollout_id", ID),
    sa.Column("data", sa.Text, nullable=False),
    sa.Index(None, "run_id", "seq"),
    sqlite_autoincrement=True,
)
