"""API keys: digests only."""

from __future__ import annotations

import sqlalchemy as sa

from rollserve.store.ops.tx import Tx
from rollserve.store.schema import api_keys

ADMIN = "admin"


def has_admin_key(conn: sa.Connection) -> bool:
    query = sa.select(api_keys.c.digest).where(api_keys.c.role == ADMIN).limit(1)
    return conn.execute(query).first() is not None


def put_key(tx: Tx, name: str, digest: str, role: str) -> None:
    """The same digest again takes the new name and role."""
    changed = tx.conn.execute(
        sa.update(api_keys).where(api_keys.c.digest == digest).values(name=name, role=role)
    )
    if not changed.rowcount:
        tx.conn.execute(sa.insert(api_keys).values(digest=digest, name=name, role=role, created_at=tx.now))


def find_key(conn: sa.Connection, digest: str) -> str | None:
    query = sa.select(api_keys.c.role).where(api_keys.c.digest == digest)
    role: str | None = conn.execute(query).scalar_one_or_none()
    return role
