"""A database of an earlier version keeps what it knew."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import sqlalchemy as sa
from alembic import command

from rollserve.records.rollout import GroupState
from rollserve.records.run import RouteSpec
from rollserve.store.engine import make_engine
from rollserve.store.migrate import alembic_config
from rollserve.store.sql import SqlStore
from rollserve.store.values import NewGroup
from rollserve.testing.store_facts import NOW, ending, make_group, make_policy


def to(engine: sa.Engine, revision: str, *, down: bool = False) -> None:
    with engine.begin() as connection:
        (command.downgrade if down else command.upgrade)(alembic_config(connection), revision)


ROWS = """
INSERT INTO policies (name, spec, version, paused, labels, created_at)
VALUES ('pol', :policy, 0, 0, '{}', 1);
INSERT INTO runs (id, policy, state, spec, max_running, created_at)
VALUES ('run_1', 'pol', 'open', '{"policy": "pol"}', 9, 1);
INSERT INTO run_counts VALUES ('run_1', 0, 1, 1, 0, 0, 1, 0, 0);
INSERT INTO groups (id, run_id, task, num_rollouts, remaining, cancelled, state, created_at, holders)
VALUES ('grp_1', 'run_1', :task, 2, 1, 0, 'open', 1, 0);
INSERT INTO rollouts (id, group_id, run_id, idx, state, queue, cancelling, epoch, attempts, not_before,
  reward, attempt_id, created_at)
VALUES ('rol_0', 'grp_1', 'run_1', 0, 'completed', 0, 0, 1, 1, 0, 1.0, 'att_0', 1),
       ('rol_1', 'grp_1', 'run_1', 1, 'running', 0, 0, 1, 1, 0, NULL, 'att_1', 1);
INSERT INTO attempts (id, run_id, rollout_id, epoch, record)
VALUES ('att_1', 'run_1', 'rol_1', 1,
  '{"id": "att_1", "rollout_id": "rol_1", "epoch": 1, "started_at": 1.0}');
"""
"""A run with a group of two, one of which has ended and one runs."""


def before_groups_were_objects(path: Path) -> None:
    values = {
        "policy": make_policy().spec.model_dump_json(),
        "task": make_group().task.model_dump_json(),
    }
    with sqlite3.connect(path) as conn:
        for statement in ROWS.split(";\n")[:-1]:
            conn.execute(statement, {name: values[name] for name in values if f":{name}" in statement})
    conn.close()


async def test_a_side_policy_becomes_a_route(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    engine = make_engine(f"sqlite:///{path}", synchronous="normal", writer=True, connections=1)
    to(engine, "0002")
    before_groups_were_objects(path)
    to(engine, "0006")
    with sqlite3.connect(path) as conn:
        conn.execute('UPDATE runs SET spec = \'{"policy": "pol", "side_policy": "small"}\'')
    conn.close()
    to(engine, "0007")
    store = SqlStore(f"sqlite:///{path}", clock=lambda: NOW)
    await store.open()
    spec = (await store.get_run("run_1")).spec
    await store.close()
    assert spec.routes == {"side": RouteSpec(policy="small", side_calls=True)}
    to(engine, "0006", down=True)
    engine.dispose()
    with sqlite3.connect(path) as conn:
        assert json.loads(conn.execute("SELECT spec FROM runs").fetchone()[0])["side_policy"] == "small"
    conn.close()


async def test_groups_of_before_go_on(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    engine = make_engine(f"sqlite:///{path}", synchronous="normal", writer=True, connections=1)
    to(engine, "0002")
    engine.dispose()
    before_groups_were_objects(path)
    store = SqlStore(f"sqlite:///{path}", clock=lambda: NOW)
    await store.open()
    group = await store.get_group("grp_1")
    assert (group.total, group.usable, group.state) == (2, 1, GroupState.OPEN)
    assert await store.recover(NOW, {}) == 1
    [start] = await store.start_rollouts(NOW, 9)
    assert (await store.finish_attempt(ending(start, reward=0.0))).group_finished
    group = await store.get_group("grp_1")
    assert (group.usable, group.state) == (2, GroupState.FINISHED)
    [more] = await store.submit_groups("run_1", [NewGroup(task=group.task, num_rollouts=1)])
    assert more.total == 1
    await store.close()


def test_the_columns_go_with_a_downgrade(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    engine = make_engine(f"sqlite:///{path}", synchronous="normal", writer=True, connections=1)
    to(engine, "0003")
    to(engine, "0002", down=True)
    engine.dispose()
    with sqlite3.connect(path) as conn:
        tables = {row[0] for row in conn.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        columns = {row[1] for row in conn.execute("PRAGMA table_info(groups)")}
    conn.close()
    assert not {"sources", "run_bins"} & tables
    assert "rule" not in columns


async def test_a_regrade_of_before_may_ask_nobody(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    engine = make_engine(f"sqlite:///{path}", synchronous="normal", writer=True, connections=1)
    to(engine, "0002")
    before_groups_were_objects(path)
    to(engine, "0007")
    with sqlite3.connect(path) as conn:
        conn.execute(
            "INSERT INTO regrades (id, run_id, grader, created_at) "
            """VALUES ('reg_1', 'run_1', '{"name": "exact"}', 1)"""
        )
    conn.close()
    to(engine, "head")
    store = SqlStore(f"sqlite:///{path}", clock=lambda: NOW)
    await store.open()
    assert (await store.get_regrade("reg_1")).routes == {}
    await store.close()
    to(engine, "0007", down=True)
    engine.dispose()
    with sqlite3.connect(path) as conn:
        columns = {row[1] for row in conn.execute("PRAGMA table_info(regrades)")}
        assert "routes" not in columns
        assert conn.execute("SELECT id FROM regrades").fetchone() == ("reg_1",)
    conn.close()
