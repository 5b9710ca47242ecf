"""Updates of a policy's weights, and what the canary found."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("policies") as policies:
        policies.add_column(sa.Column("weights", sa.BigInteger(), nullable=False, server_default="0"))
        policies.add_column(sa.Column("weight_update", sa.Text(), nullable=True))
        policies.add_column(sa.Column("canary", sa.Text(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("policies") as policies:
        for name in ("canary", "weight_update", "weights"):
            policies.drop_column(name)
