"""What the graders of a regrade may ask."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("regrades") as regrades:
        regrades.add_column(sa.Column("routes", sa.Text(), nullable=False, server_default="{}"))


def downgrade() -> None:
    with op.batch_alter_table("regrades") as regrades:
        regrades.drop_column("routes")
