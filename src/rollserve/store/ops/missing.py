"""What a name or an id that is not there was probably meant to be."""

from __future__ import annotations

import msgspec
import sqlalchemy as sa

from rollserve.errors import NotFound, listed, nearest
from rollserve.store.schema import attempts, backends, groups, policies, regrades, rollouts, runs

LOOKED_AT = 200
"""Of the newest: a hint is not worth reading a whole table for."""

NEAR_ID = 0.8
"""Ids of one kind begin alike: less is chance."""

_TABLES = {
    "run": runs,
    "group": groups,
    "rollout": rollouts,
    "attempt": attempts,
    "backend": backends,
    "regrade": regrades,
}
_PREFIXES = {
    "run": "run_",
    "group": "grp_",
    "rollout": "rol_",
    "attempt": "att_",
    "backend": "be_",
    "regrade": "reg_",
}


def no_policy(conn: sa.Connection, name: str) -> NotFound:
    names = list(conn.execute(sa.select(policies.c.name).limit(LOOKED_AT)).scalars())
    return NotFound(f"no policy {name!r}", field="policy", hint=nearest(name, names) or listed(names))


def no_such(conn: sa.Connection, kind: str, given: str) -> NotFound:
    """``kind`` is one of ``_TABLES``."""
    return NotFound(f"no {kind} {given!r}", field=f"{kind}_id", hint=_meant(conn, kind, given))


def _meant(conn: sa.Connection, kind: str, given: str) -> str | None:
    for other, prefix in _PREFIXES.items():
        if other != kind and given.startswith(prefix):
            return f"that is the id of {'an' if other == 'attempt' else 'a'} {other}"
    if kind == "run" and not given.startswith(_PREFIXES["run"]):
        return _named(conn, given)
    table = _TABLES[kind]
    newest = sa.select(table.c.id).order_by(table.c.seq.desc()).limit(LOOKED_AT)
    return nearest(given, list(conn.execute(newest).scalars()), cutoff=NEAR_ID)


def _named(conn: sa.Connection, name: str) -> str:
    """The newest run of that name."""
    written = msgspec.json.encode({"name": name}).decode()[1:-1]
    query = sa.select(runs.c.id, runs.c.spec).where(runs.c.spec.contains(written, autoescape=True))
    for row in conn.execute(query.order_by(runs.c.seq.desc()).limit(LOOKED_AT)):
        if msgspec.json.decode(row.spec).get("name") == name:
            return f"did you mean {row.id!r}, the run named {name!r}?"
    return "a run is called by its id, such as run_3f9c…: `rollserve status` lists them"
