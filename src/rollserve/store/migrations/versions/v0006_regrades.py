"""Re-grading of stored attempts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_SEQ = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "regrades",
        sa.Column("seq", _SEQ, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(160), nullable=False),
        sa.Column("run_id", sa.String(160), nullable=False),
        sa.Column("grader", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_regrades_run_id"),
        sa.PrimaryKeyConstraint("seq", name="pk_regrades"),
        sa.UniqueConstraint("id", name="uq_regrades_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_regrades_run_id", "regrades", ["run_id"], unique=False)
    op.create_table(
        "gradings",
        sa.Column("seq", _SEQ, autoincrement=True, nullable=False),
        sa.Column("regrade_id", sa.String(160), nullable=False),
        sa.Column("run_id", sa.String(160), nullable=False),
        sa.Column("rollout_id", sa.String(160), nullable=False),
        sa.Column("attempt_id", sa.String(160), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("not_before", sa.Double(), nullable=False),
        sa.Column("before", sa.Double(), nullable=True),
        sa.Column("graded", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["regrade_id"], ["regrades.id"], name="fk_gradings_regrade_id"),
        sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.id"], name="fk_gradings_rollout_id"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_gradings_run_id"),
        sa.PrimaryKeyConstraint("seq", name="pk_gradings"),
        sa.UniqueConstraint("regrade_id", "rollout_id", name="uq_gradings_regrade_id_rollout_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_gradings_run_id", "gradings", ["run_id"], unique=False)
    op.create_index("ix_gradings_state_not_before", "gradings", ["state", "not_before"], unique=False)


def downgrade() -> None:
    op.drop_table("gradings")
    op.drop_table("regrades")
