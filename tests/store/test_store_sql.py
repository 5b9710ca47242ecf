"""What is the SQL store's own: files, migrations, the batching writer, the cost of a start."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex, CreateTable

from rollserve.errors import ConfigError, NotFound, Unavailable
from rollserve.records.rollout import RolloutState
from rollserve.records.run import RunState
from rollserve.store import writer as writer_module
from rollserve.store.engine import make_engine
from rollserve.store.migrate import migrate
from rollserve.store.ops import events as event_ops
from rollserve.store.ops import start as start_ops
from rollserve.store.ops.events import EventLog, list_events
from rollserve.store.ops.tx import Tx
from rollserve.store.schema import metadata, policies
from rollserve.store.sql import SqlStore
from rollserve.store.writer import Writer
from rollserve.testing.clock import FakeClock
from rollserve.testing.store_facts import LOST, NOW, ending, make_group, open_run

PARTIAL = ("ix_rollouts_ready", "ix_rollouts_backing_off", "ix_groups_judging", "ix_attempts_untold")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'store.db'}"


@pytest.fixture
async def store(url: str) -> AsyncIterator[SqlStore]:
    store = SqlStore(url)
    await store.open()
    yield store
    await store.close()


@pytest.fixture
def short_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the writers that are made from now on."""
    monkeypatch.setattr(writer_module, "MAX_PENDING", 100)
    monkeypatch.setattr(writer_module, "SPACE_WAIT_S", 0.01)


@pytest.fixture
async def writer(url: str) -> AsyncIterator[Writer]:
    engine = make_engine(url, synchronous="normal", writer=True, connections=1)
    migrate(engine)
    writer = Writer(engine, EventLog(1000), clock=lambda: NOW)
    writer.start()
    yield writer
    await writer.close()
    engine.dispose()


def echo(n: int) -> Callable[[Tx], int]:
    return lambda tx: n if tx.now == NOW else -1


class TestFile:
    async def test_everything_is_there_after_reopening(self, url: str, store: SqlStore) -> None:
        run = await open_run(store)
        (group,) = await store.submit_groups(run.id, [make_group(key="k")])
        await store.close()
        again = SqlStore(url, synchronous="full")
        await again.open()
        assert await again.get_run(run.id) == run
        assert await again.get_group(group.id) == group
        await again.close()

    async def test_only_the_owner_reads_it(self, tmp_path: Path) -> None:
        path = tmp_path / "new" / "folder" / "s.db"
        store = SqlStore(f"sqlite:///{path}")
        await store.open()
        assert path.stat().st_mode & 0o077 == 0
        await store.close()

    @pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "nonsense", "nothing://x/y"])
    async def test_unusable_url(self, url: str) -> None:
        with pytest.raises(ConfigError) as caught:
            await SqlStore(url).open()
        assert caught.value.field == "store.url"

    async def test_file_that_is_no_database(self, tmp_path: Path) -> None:
        path = tmp_path / "text.db"
        path.write_text("not a database, but long enough to be taken for one\n" * 100)
        store = SqlStore(f"sqlite:///{path}")
        with pytest.raises(ConfigError):
            await store.open()
        await store.close()

    async def test_database_of_a_newer_version(self, tmp_path: Path, url: str, store: SqlStore) -> None:
        await store.close()
        with sqlite3.connect(tmp_path / "store.db") as conn:
            conn.execute("UPDATE alembic_version SET version_num = '9999'")
        conn.close()
        newer = SqlStore(url)
        with pytest.raises(ConfigError, match="9999"):
            await newer.open()
        await newer.close()

    async def test_closed_store_says_so(self, store: SqlStore) -> None:
        await store.close()
        await store.close()
        for work in (store.list_policies(), store.recover(NOW, {}), store.submit_groups("r", [make_group()])):
            with pytest.raises(Unavailable):
                await work


async def test_a_transaction_that_the_database_undid_is_nobodys_success(store: SqlStore) -> None:
    """SQLite may roll everything back by itself (a full disk). What ran before in the same batch is gone
    then, and its caller must hear so."""
    began, busy = threading.Event(), threading.Event()

    def holds(_tx: Tx) -> None:
        began.set()
        assert busy.wait(30)

    def undone(tx: Tx) -> None:
        tx.conn.exec_driver_sql("ROLLBACK")
        raise sa.exc.OperationalError("INSERT", {}, Exception("database or disk is full"))

    async def behind(tx_work: Callable[[Tx], object]) -> object:
        return await store._write(tx_work)

    hold = asyncio.create_task(behind(holds))
    await asyncio.to_thread(began.wait, 30)
    before = asyncio.create_task(open_run(store))
    await FakeClock().settle()
    fails = asyncio.create_task(behind(undone))
    await FakeClock().settle()
    busy.set()
    await hold
    outcomes = await asyncio.gather(before, fails, return_exceptions=True)
    assert all(isinstance(outcome, Unavailable) for outcome in outcomes)
    assert (await store.list_policies()).items == []


async def test_after_a_refused_write_another_is_tried_until_one_succeeds(store: SqlStore) -> None:
    def allow(pages: int) -> Callable[[Tx], object]:
        return lambda tx: tx.conn.exec_driver_sql(f"PRAGMA max_page_count = {pages}").scalar()

    await store.check_writable()
    assert store._writer is not None
    assert store._writer.operations == 0, "for free while all is well"
    await store._write(allow(1))  # SQLite takes the pages that there are
    with pytest.raises(Unavailable, match="full"):
        await store._write(event_ops.try_write)
    for _ in range(2):
        with pytest.raises(Unavailable, match="database or disk is full"):
            await store.check_writable()
    await store._write(allow(1 << 20))
    await store.check_writable()
    operations = store._writer.operations
    await store.check_writable()
    assert store._writer.operations == operations
    assert await store.list_events(after=0) == [], "what was tried is seen by nobody"


class TestMigrations:
    def test_they_make_the_schema(self, url: str) -> None:
        engine = make_engine(url, synchronous="normal", writer=True, connections=1)
        migrate(engine)
        migrate(engine)
        with engine.connect() as conn:
            context = MigrationContext.configure(conn, opts={"compare_type": True})
            assert compare_metadata(context, metadata) == []
            made = {index.name for table in metadata.tables.values() for index in table.indexes}
            found = sa.inspect(conn)
            assert made == {index["name"] for name in metadata.tables for index in found.get_indexes(name)}
        engine.dispose()

    def test_two_that_start_at_once(self, url: str) -> None:
        engines = [make_engine(url, synchronous="normal", writer=True, connections=1) for _ in range(3)]
        failures: list[Exception] = []

        def work(engine: sa.Engine) -> None:
            try:
                migrate(engine)
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(engine,)) for engine in engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert failures == []
        for engine in engines:
            engine.dispose()

    def test_the_schema_is_valid_for_postgresql(self) -> None:
        dialect = postgresql.dialect()  # type: ignore[no-untyped-call]  # SQLAlchemy leaves it untyped
        for table in metadata.sorted_tables:
            assert "CREATE TABLE" in str(CreateTable(table).compile(dialect=dialect))
            for index in table.indexes:
                text = str(CreateIndex(index).compile(dialect=dialect))
                assert ("WHERE" in text) == (index.name in PARTIAL)


class TestWriter:
    async def test_what_waits_shares_a_transaction(self, writer: Writer) -> None:
        entered, gate = threading.Event(), threading.Event()

        def hold(_tx: Tx) -> None:
            entered.set()
            assert gate.wait(30)

        held = asyncio.create_task(writer.run(hold))
        await asyncio.to_thread(entered.wait, 30)
        others = [asyncio.create_task(writer.run(echo(n))) for n in range(300)]
        await asyncio.sleep(0)
        gate.set()
        await held
        assert await asyncio.gather(*others) == list(range(300))
        assert (writer.batches, writer.operations) == (2, 301)

    async def test_a_failing_one_is_undone_alone(self, writer: Writer) -> None:
        def add(tx: Tx, name: str, fails: bool) -> None:
            row = {"name": name, "spec": "", "version": 0, "paused": False, "labels": "", "created_at": 0}
            tx.conn.execute(sa.insert(policies).values(row))
            tx.emit("policy.created", policy=name)
            if fails:
                raise NotFound(name)

        asked = [writer.run(partial(add, name=f"p{n}", fails=n % 3 == 0)) for n in range(9)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert [isinstance(answer, NotFound) for answer in answers] == [n % 3 == 0 for n in range(9)]
        names = await writer.run(lambda tx: list(tx.conn.execute(sa.select(policies.c.name)).scalars()))
        told = await writer.run(
            lambda tx: list(tx.conn.execute(sa.text("SELECT policy FROM events")).scalars())
        )
        assert sorted(names) == sorted(told) == ["p1", "p2", "p4", "p5", "p7", "p8"]

    async def test_a_failing_commit_is_heard_by_all(self, writer: Writer) -> None:
        def bad_event(tx: Tx) -> None:
            tx.emit("x")
            tx.events[0]["type"] = None

        answers = await asyncio.gather(
            writer.run(bad_event), *(writer.run(lambda tx: None) for _ in range(3)), return_exceptions=True
        )
        assert isinstance(answers[0], sa.exc.IntegrityError)
        assert await writer.run(lambda tx: 7) == 7

    async def test_a_database_that_can_t_be_written(self, writer: Writer) -> None:
        with pytest.raises(Unavailable, match="no such table"):
            await writer.run(lambda tx: tx.conn.execute(sa.text("INSERT INTO missing VALUES (1)")))

    async def test_cancelled_caller_leaves_the_write(self, writer: Writer) -> None:
        entered, gate = threading.Event(), threading.Event()

        def hold(tx: Tx) -> None:
            entered.set()
            assert gate.wait(30)
            tx.emit("held")

        held = asyncio.create_task(writer.run(hold))
        await asyncio.to_thread(entered.wait, 30)
        held.cancel()
        with pytest.raises(asyncio.CancelledError):
            await held
        gate.set()
        count = await writer.run(lambda tx: tx.conn.execute(sa.text("SELECT count(*) FROM events")).scalar())
        assert count in (0, 1)  # in the same transaction its event is still to be written
        count = await writer.run(lambda tx: tx.conn.execute(sa.text("SELECT count(*) FROM events")).scalar())
        assert count == 1

    @pytest.mark.usefixtures("short_queue")
    async def test_the_queue_is_bounded(self, writer: Writer) -> None:
        entered, gate = threading.Event(), threading.Event()

        def hold(_tx: Tx) -> None:
            entered.set()
            assert gate.wait(30)

        held = asyncio.create_task(writer.run(hold))
        await asyncio.to_thread(entered.wait, 30)
        waiting = [
            asyncio.create_task(writer.run(lambda tx: None)) for _ in range(writer_module.MAX_PENDING - 1)
        ]
        await asyncio.sleep(0)
        with pytest.raises(Unavailable) as caught:
            await writer.run(lambda tx: None)
        assert caught.value.retry_after_s is not None
        gate.set()
        await asyncio.gather(held, *waiting)

    async def test_close_commits_what_is_queued(self, writer: Writer) -> None:
        asked = [asyncio.create_task(writer.run(echo(n))) for n in range(50)]
        await asyncio.sleep(0)
        await writer.close()
        assert await asyncio.gather(*asked) == list(range(50))
        with pytest.raises(Unavailable):
            await writer.run(lambda tx: None)


class TestBounds:
    async def test_events_are_bounded(self, writer: Writer) -> None:
        def tell(tx: Tx, batch: int) -> None:
            for n in range(500):
                tx.emit("e", data={"n": batch * 500 + n})

        for batch in range(12):
            await writer.run(partial(tell, batch=batch))
        kept = await writer.run(lambda tx: list_events(tx.conn, 0, 10_000, None))
        assert 1000 <= len(kept) <= 2000
        assert kept[-1].data == {"n": 5999}
        assert [event.seq for event in kept] == list(range(kept[0].seq, kept[-1].seq + 1))

    async def test_a_large_run_ends_in_steps(self, store: SqlStore) -> None:
        run, closed = await open_run(store), await open_run(store)
        for each in (run, closed):
            await store.submit_groups(each.id, [make_group(rollouts=50) for _ in range(90)])
        before = store.write_counts[0]
        ended, running = await store.cancel_rollouts(run_id=run.id)
        assert (len(ended), running) == (4500, [])
        assert len({rollout.id for rollout in ended}) == 4500
        assert store.write_counts[0] - before == 3
        await store.set_run_state(closed.id, RunState.CLOSED)
        for each in (run, closed):
            counts = await store.run_counts(each.id)
            assert (counts["queued"], counts["cancelled"], counts["groups_finished"]) == (0, 4500, 90)
        await store.prune_run(closed.id)
        with pytest.raises(NotFound):
            await store.get_run(closed.id)

    async def test_recover_ends_a_close_that_broke_off(self, url: str, store: SqlStore) -> None:
        run = await open_run(store)
        await store.submit_groups(run.id, [make_group(rollouts=3)])
        engine = make_engine(url, synchronous="normal", writer=True, connections=1)
        with engine.begin() as conn:
            conn.execute(sa.text("UPDATE runs SET state = 'closed'"))
        engine.dispose()
        assert await store.recover(NOW, {}) == 0
        counts = await store.run_counts(run.id)
        assert (counts["queued"], counts["cancelled"], counts["groups_finished"]) == (0, 3, 1)

    def test_a_start_scans_no_queue(self, url: str) -> None:
        """Each statement of a start finds its rows by an index made for it."""
        engine = make_engine(url, synchronous="normal", writer=True, connections=1)
        migrate(engine)
        wanted = {
            start_ops._PROMOTE: "ix_rollouts_backing_off",
            start_ops._READY: "ix_rollouts_ready",
            start_ops._ELIGIBLE: "ix_rollouts_ready",
            start_ops._START: "INTEGER PRIMARY KEY",
        }
        with engine.begin() as conn:
            for statement, index in wanted.items():
                compiled = statement.compile(engine)
                values = dict.fromkeys(compiled.params, 1)
                text = f"EXPLAIN QUERY PLAN {compiled}"
                names = compiled.positiontup or []
                known = [compiled.params[name] or values[name] for name in names]
                plan = [row[3] for row in conn.exec_driver_sql(text, tuple(known))]
                on_rollouts = [step for step in plan if "rollouts" in step]
                assert on_rollouts, plan
                assert all(index in step and step.startswith("SEARCH") for step in on_rollouts), plan
                assert not any("TEMP B-TREE" in step for step in plan), plan
        engine.dispose()

    async def test_many_that_back_off_hide_none_that_is_due(self, store: SqlStore) -> None:
        run = await open_run(store)
        await store.submit_groups(run.id, [make_group(rollouts=200), make_group(rollouts=1)])
        starts = await store.start_rollouts(NOW, 200)
        await asyncio.gather(
            *(
                store.finish_attempt(
                    ending(start, RolloutState.QUEUED, failure=LOST, not_before=NOW + 10 + n)
                )
                for n, start in enumerate(starts)
            )
        )
        (due,) = await store.start_rollouts(NOW, 5)
        assert due.rollout.group_id != starts[0].rollout.group_id
        assert len(await store.start_rollouts(NOW + 13, 50)) == 4
        assert await store.next_due(NOW) == NOW + 14
