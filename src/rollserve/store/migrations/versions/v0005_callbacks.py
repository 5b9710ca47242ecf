"""Callbacks of runs, and the outbox of their messages."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_SEQ = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "callbacks",
        sa.Column("run_id", sa.String(160), nullable=False),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("rule", "url")),
        sa.Column("trainer", sa.String(128), nullable=False),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("events", "secret")),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_callbacks_run_id"),
        sa.PrimaryKeyConstraint("run_id", name="pk_callbacks"),
    )
    op.create_table(
        "messages",
        sa.Column("seq", _SEQ, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(160), nullable=False),
        sa.Column("run_id", sa.String(160), nullable=False),
        sa.Column("type", sa.String(64), nullable=False),
        sa.Column("group_id", sa.String(160), nullable=True),
        sa.Column("data", sa.Text(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("due_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("lease_id", sa.String(160), nullable=True),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_messages_run_id"),
        sa.PrimaryKeyConstraint("seq", name="pk_messages"),
        sa.UniqueConstraint("id", name="uq_messages_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_messages_group_id", "messages", ["group_id"], unique=False)
    op.create_index("ix_messages_state", "messages", ["state"], unique=False)
    op.create_index(
        "ix_messages_run_id_state_due_at", "messages", ["run_id", "state", "due_at"], unique=False
    )


def downgrade() -> None:
    op.drop_table("messages")
    op.drop_table("callbacks")
