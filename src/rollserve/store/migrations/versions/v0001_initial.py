"""The tables of the first version."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

SEQ = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    _keys_and_events()
    _policies()
    _runs()
    _groups()
    _rollouts()
    _attempts()
    _leases()
    _deliveries()


def _keys_and_events() -> None:
    op.create_table(
        "api_keys",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=256), nullable=False),
        sa.Column("role", sa.String(length=32), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_api_keys"),
    )
    op.create_table(
        "events",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("type", sa.String(length=64), nullable=False),
        sa.Column("policy", sa.String(length=128), nullable=True),
        sa.Column("run_id", sa.String(length=160), nullable=True),
        sa.Column("group_id", sa.String(length=160), nullable=True),
        sa.Column("rollout_id", sa.String(length=160), nullable=True),
        sa.Column("data", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_events"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_events_run_id_seq", "events", ["run_id", "seq"], unique=False)


def _policies() -> None:
    op.create_table(
        "policies",
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("paused", sa.Boolean(), nullable=False),
        sa.Column("labels", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_policies"),
    )
    op.create_table(
        "backends",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=160), nullable=False),
        sa.Column("policy", sa.String(length=128), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("api_key", sa.Text(), nullable=True),
        sa.Column("info", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["policy"], ["policies.name"], name="fk_backends_policy"),
        sa.PrimaryKeyConstraint("seq", name="pk_backends"),
        sa.UniqueConstraint("id", name="uq_backends_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_backends_policy", "backends", ["policy"], unique=False)


def _runs() -> None:
    op.create_table(
        "runs",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=160), nullable=False),
        sa.Column("policy", sa.String(length=128), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("max_running", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["policy"], ["policies.name"], name="fk_runs_policy"),
        sa.PrimaryKeyConstraint("seq", name="pk_runs"),
        sa.UniqueConstraint("id", name="uq_runs_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_runs_state", "runs", ["state"], unique=False)
    op.create_table(
        "run_counts",
        sa.Column("run_id", sa.String(length=160), nullable=False),
        sa.Column("queued", sa.BigInteger(), nullable=False),
        sa.Column("running", sa.BigInteger(), nullable=False),
        sa.Column("completed", sa.BigInteger(), nullable=False),
        sa.Column("failed", sa.BigInteger(), nullable=False),
        sa.Column("cancelled", sa.BigInteger(), nullable=False),
        sa.Column("groups_open", sa.BigInteger(), nullable=False),
        sa.Column("groups_finished", sa.BigInteger(), nullable=False),
        sa.Column("groups_undelivered", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_run_counts_run_id"),
        sa.PrimaryKeyConstraint("run_id", name="pk_run_counts"),
    )


def _groups() -> None:
    op.create_table(
        "groups",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=160), nullable=False),
        sa.Column("run_id", sa.String(length=160), nullable=False),
        sa.Column("key", sa.String(length=512), nullable=True),
        sa.Column("body_digest", sa.String(length=64), nullable=True),
        sa.Column("task", sa.Text(), nullable=False),
        sa.Column("num_rollouts", sa.Integer(), nullable=False),
        sa.Column("remaining", sa.Integer(), nullable=False),
        sa.Column("cancelled", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("finished_seq", sa.BigInteger(), nullable=True),
        sa.Column("holders", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_groups_run_id"),
        sa.PrimaryKeyConstraint("seq", name="pk_groups"),
        sa.UniqueConstraint("id", name="uq_groups_id"),
        sa.UniqueConstraint("run_id", "finished_seq", name="uq_groups_run_id_finished_seq"),
        sa.UniqueConstraint("run_id", "key", name="uq_groups_run_id_key"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_groups_run_id_state_seq", "groups", ["run_id", "state", "seq"], unique=False)


def _rollouts() -> None:
    op.create_table(
        "rollouts",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=160), nullable=False),
        sa.Column("group_id", sa.String(length=160), nullable=False),
        sa.Column("run_id", sa.String(length=160), nullable=False),
        sa.Column("idx", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("queue", sa.SmallInteger(), nullable=False),
        sa.Column("cancelling", sa.Boolean(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("not_before", sa.Double(), nullable=False),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("truncated_by", sa.String(length=256), nullable=True),
        sa.Column("failure", sa.Text(), nullable=True),
        sa.Column("attempt_id", sa.String(length=160), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["group_id"], ["groups.id"], name="fk_rollouts_group_id"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_rollouts_run_id"),
        sa.PrimaryKeyConstraint("seq", name="pk_rollouts"),
        sa.UniqueConstraint("group_id", "idx", name="uq_rollouts_group_id_idx"),
        sa.UniqueConstraint("id", name="uq_rollouts_id"),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_rollouts_backing_off",
        "rollouts",
        ["not_before"],
        unique=False,
        sqlite_where=sa.text("queue = 2"),
        postgresql_where=sa.text("queue = 2"),
    )
    op.create_index(
        "ix_rollouts_ready",
        "rollouts",
        ["run_id", "seq"],
        unique=False,
        sqlite_where=sa.text("queue = 1"),
        postgresql_where=sa.text("queue = 1"),
    )
    op.create_index("ix_rollouts_run_id_state_seq", "rollouts", ["run_id", "state", "seq"], unique=False)


def _attempts() -> None:
    op.create_table(
        "attempts",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=160), nullable=False),
        sa.Column("run_id", sa.String(length=160), nullable=False),
        sa.Column("rollout_id", sa.String(length=160), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("accepted", sa.Boolean(), nullable=True),
        sa.Column("payload", sa.String(length=512), nullable=True),
        sa.Column("record", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.id"], name="fk_attempts_rollout_id"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_attempts_run_id"),
        sa.PrimaryKeyConstraint("seq", name="pk_attempts"),
        sa.UniqueConstraint("id", name="uq_attempts_id"),
        sa.UniqueConstraint("rollout_id", "epoch", name="uq_attempts_rollout_id_epoch"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_attempts_run_id", "attempts", ["run_id"], unique=False)


def _leases() -> None:
    op.create_table(
        "trainers",
        sa.Column("run_id", sa.String(length=160), nullable=False),
        sa.Column("trainer", sa.String(length=128), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("frontier", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_trainers_run_id"),
        sa.PrimaryKeyConstraint("run_id", "trainer", name="pk_trainers"),
    )
    op.create_table(
        "checkpoints",
        sa.Column("run_id", sa.String(length=160), nullable=False),
        sa.Column("trainer", sa.String(length=128), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("policy_version", sa.BigInteger(), nullable=False),
        sa.Column("cursor", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_checkpoints_run_id"),
        sa.PrimaryKeyConstraint("run_id", "trainer", "name", name="pk_checkpoints"),
        sa.UniqueConstraint("run_id", "trainer", "seq", name="uq_checkpoints_run_id_trainer_seq"),
    )
    op.create_table(
        "leases",
        sa.Column("id", sa.String(length=160), nullable=False),
        sa.Column("run_id", sa.String(length=160), nullable=False),
        sa.Column("trainer", sa.String(length=128), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("group_ids", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_leases_run_id"),
        sa.PrimaryKeyConstraint("id", name="pk_leases"),
    )
    op.create_index("ix_leases_run_id", "leases", ["run_id"], unique=False)
    op.create_index("ix_leases_state_expires_at", "leases", ["state", "expires_at"], unique=False)


def _deliveries() -> None:
    op.create_table(
        "deliveries",
        sa.Column("run_id", sa.String(length=160), nullable=False),
        sa.Column("trainer", sa.String(length=128), nullable=False),
        sa.Column("finished_seq", sa.BigInteger(), nullable=False),
        sa.Column("group_id", sa.String(length=160), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("lease_id", sa.String(length=160), nullable=True),
        sa.Column("checkpoint_seq", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_deliveries_run_id"),
        sa.PrimaryKeyConstraint("run_id", "trainer", "finished_seq", name="pk_deliveries"),
    )
    op.create_index("ix_deliveries_lease_id", "deliveries", ["lease_id"], unique=False)
    op.create_index(
        "ix_deliveries_run_id_trainer_state_finished_seq",
        "deliveries",
        ["run_id", "trainer", "state", "finished_seq"],
        unique=False,
    )


def downgrade() -> None:
    for table in (
        "deliveries",
        "leases",
        "checkpoints",
        "trainers",
        "attempts",
        "rollouts",
        "groups",
        "run_counts",
        "runs",
        "backends",
        "policies",
        "events",
        "api_keys",
    ):
        op.drop_table(table)
