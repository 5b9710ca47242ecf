"""Run by Alembic, and only by it (its convention: this file acts when it is loaded). The connection
comes from ``store.migrate``, which also owns the transaction."""

from __future__ import annotations

from alembic import context

from rollserve.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
)
context.run_migrations()
