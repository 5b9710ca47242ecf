"""A run's ``side_policy`` is one of its ``routes``."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_PAGE = 500
_RUNS = sa.table("runs", sa.column("seq", sa.BigInteger()), sa.column("spec", sa.Text()))


def upgrade() -> None:
    _rewrite(_to_routes)


def downgrade() -> None:
    _rewrite(_to_side_policy)


def _to_routes(spec: dict[str, Any]) -> None:
    policy = spec.pop("side_policy", None)
    spec["routes"] = {"side": {"policy": policy, "side_calls": True}} if policy else {}


def _to_side_policy(spec: dict[str, Any]) -> None:
    routes = spec.pop("routes", {})
    aside = (route["policy"] for route in routes.values() if route.get("side_calls"))
    spec["side_policy"] = next(aside, None)


def _rewrite(change: Callable[[dict[str, Any]], None]) -> None:
    """A page of runs at a time: a specification may hold a list of tasks."""
    connection, last = op.get_bind(), -1
    while True:
        query = sa.select(_RUNS).where(_RUNS.c.seq > last).order_by(_RUNS.c.seq).limit(_PAGE)
        rows = connection.execute(query).all()
        for row in rows:
            spec = json.loads(row.spec)
            change(spec)
            connection.execute(sa.update(_RUNS).where(_RUNS.c.seq == row.seq).values(spec=json.dumps(spec)))
        if len(rows) < _PAGE:
            return
        last = rows[-1].seq
