"""Groups as objects, pacing, token bins, task sources."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def _whole(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=False, server_default="0")


def _flag(name: str) -> sa.Column[bool]:
    """The default is a text: for an expression SQLite's table would be made anew, and others refer to it."""
    return sa.Column(name, sa.Boolean(), nullable=False, server_default="0")


def upgrade() -> None:
    _runs()
    _groups()
    with op.batch_alter_table("attempts") as attempts:
        attempts.add_column(sa.Column("fate", sa.String(16), nullable=True))
        for name in ("sampled", "masked", "left_out"):
            attempts.add_column(_whole(name))
    where = sa.text("accepted IS NULL")
    op.create_index("ix_attempts_untold", "attempts", ["seq"], sqlite_where=where, postgresql_where=where)
    with op.batch_alter_table("checkpoints") as checkpoints:
        checkpoints.add_column(sa.Column("source_position", sa.BigInteger(), nullable=True))
    with op.batch_alter_table("leases") as leases:
        leases.add_column(sa.Column("facts", sa.Text(), nullable=True))
    _new_tables()


def _runs() -> None:
    with op.batch_alter_table("runs") as runs:
        runs.add_column(sa.Column("rank", sa.Integer(), nullable=False, server_default="0"))
        runs.add_column(_whole("base_version"))
        runs.add_column(sa.Column("ahead_groups", sa.BigInteger(), nullable=True))
        runs.add_column(sa.Column("per_version", sa.BigInteger(), nullable=True))
        runs.add_column(_flag("judged"))
        runs.add_column(sa.Column("hold_s", sa.Double(), nullable=True))
    with op.batch_alter_table("run_counts") as counts:
        counts.add_column(_whole("groups_started"))
        counts.add_column(_whole("groups_good"))


def _groups() -> None:
    with op.batch_alter_table("groups") as groups:
        groups.add_column(sa.Column("rule", sa.Text(), nullable=True))
        groups.add_column(sa.Column("total", sa.Integer(), nullable=False, server_default="0"))
        groups.add_column(sa.Column("usable", sa.Integer(), nullable=False, server_default="0"))
        groups.add_column(_whole("sampled"))
        for name in ("deadline_s", "started_at", "due_at"):
            groups.add_column(sa.Column(name, sa.Double(), nullable=True))
        groups.add_column(_flag("good"))
        groups.add_column(_flag("carried"))
        groups.add_column(sa.Column("filtered_by", sa.String(256), nullable=True))
        groups.add_column(sa.Column("note", sa.Text(), nullable=True))
        groups.add_column(sa.Column("source_seq", sa.BigInteger(), nullable=True))
    op.create_index("ix_groups_due_at", "groups", ["due_at"], unique=False)
    op.create_index("ix_groups_run_id_source_seq", "groups", ["run_id", "source_seq"], unique=False)
    where = sa.text("state = 'judging'")
    op.create_index("ix_groups_judging", "groups", ["seq"], sqlite_where=where, postgresql_where=where)
    op.execute("UPDATE groups SET total = num_rollouts")
    op.execute(
        "UPDATE groups SET usable = (SELECT count(*) FROM rollouts WHERE rollouts.group_id = groups.id"
        " AND rollouts.state IN ('completed', 'failed') AND rollouts.reward IS NOT NULL)"
    )


def _new_tables() -> None:
    op.create_table(
        "run_bins",
        sa.Column("run_id", sa.String(160), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("bin", sa.String(256), nullable=False),
        sa.Column("many", sa.BigInteger(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_run_bins_run_id"),
        sa.PrimaryKeyConstraint("run_id", "kind", "bin", name="pk_run_bins"),
    )
    op.create_table(
        "sources",
        sa.Column("run_id", sa.String(160), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("lines", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_sources_run_id"),
        sa.PrimaryKeyConstraint("run_id", name="pk_sources"),
    )


def downgrade() -> None:
    op.drop_table("sources")
    op.drop_table("run_bins")
    op.drop_index("ix_attempts_untold", "attempts")
    op.drop_index("ix_groups_judging", "groups")
    op.drop_index("ix_groups_run_id_source_seq", "groups")
    op.drop_index("ix_groups_due_at", "groups")
    added = {
        "leases": ["facts"],
        "checkpoints": ["source_position"],
        "attempts": ["left_out", "masked", "sampled", "fate"],
        "groups": [
            "source_seq", "note", "filtered_by", "carried", "good", "due_at", "started_at", "deadline_s",
            "sampled", "usable", "total", "rule",
        ],
        "run_counts": ["groups_good", "groups_started"],
        "runs": ["hold_s", "judged", "per_version", "ahead_groups", "base_version", "rank"],
    }  # fmt: skip
    for table, columns in added.items():
        with op.batch_alter_table(table) as altered:
            for column in columns:
                altered.drop_column(column)
