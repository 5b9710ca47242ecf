"""What was found of a policy's chat template."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("policies") as policies:
        policies.add_column(sa.Column("template", sa.Text(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("policies") as policies:
        policies.drop_column("template")
