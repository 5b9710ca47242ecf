"""One writer: a thread that runs queued operations in as few transactions as possible.

Operations that arrive while a transaction is being committed go together into the next one. Each has a
savepoint, so that one that fails is undone alone; their callers hear of the outcome after the commit.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import sqlalchemy as sa

from rollserve.errors import Unavailable
from rollserve.store.ops import bins
from rollserve.store.ops.events import EventLog
from rollserve.store.ops.tx import Bins, Tx

T = TypeVar("T")

MAX_PENDING = 10_000
MAX_BATCH = 512
SPACE_WAIT_S = 30.0
CLOSE_WAIT_S = 60.0


@dataclass(slots=True)
class _Pending:
    run: Callable[[Tx], Any]
    future: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None


class Writer:
    """``clock`` gives seconds since the epoch. ``batches`` counts transactions, ``operations`` what ran
    in them, ``refused`` those of the transactions in which the database refused something."""

    def __init__(self, engine: sa.Engine, events: EventLog, *, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._events = events
        self._clock = clock
        self._queue: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._space = asyncio.Semaphore(MAX_PENDING)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name="rollserve-store-writer", daemon=True)
        self._open = False
        self.batches = 0
        self.operations = 0
        self.refused = 0

    def start(self) -> None:
        self._open = True
        self._thread.start()

    async def run(self, operation: Callable[[Tx], T]) -> T:
        """The operation's outcome, once it is committed. A caller that is cancelled meanwhile doesn't
        undo it. Raises what the operation raises; ``Unavailable`` when the database can't be written,
        the store is closed, or no space came free in time."""
        if self._space.locked():
            await self._wait_for_space()
        else:
            await self._space.acquire()
        if not self._open:
            self._space.release()
            raise Unavailable("the store is closed")
        pending = _Pending(operation, self._loop.create_future())
        self._queue.put(pending)
        result: T = await pending.future
        return result

    async def _wait_for_space(self) -> None:
        try:
            async with asyncio.timeout(SPACE_WAIT_S):
                await self._space.acquire()
        except TimeoutError as error:
            raise Unavailable("too many writes are waiting", retry_after_s=5.0) from error

    async def close(self) -> None:
        """Commit what is queued, refuse the rest, and end the thread."""
        if not self._open:
            return
        self._open = False
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join, CLOSE_WAIT_S)

    def _work(self) -> None:
        while (first := self._queue.get()) is not None:
            batch = [first]
            ends = self._fill(batch)
            self._commit(batch)
            self._loop.call_soon_threadsafe(self._resolve, batch)
            if ends:
                return

    def _fill(self, batch: list[_Pending]) -> bool:
        """Add what waits already; True when the writer is to end after this batch."""
        while len(batch) < MAX_BATCH:
            try:
                following = self._queue.get_nowait()
            except queue.Empty:
                return False
            if following is None:
                return True
            batch.append(following)
        return False

    def _commit(self, batch: list[_Pending]) -> None:
        """The edge between the database's failures and the callers', who all hear of them."""
        rows: list[dict[str, Any]] = []
        added: Bins = {}
        try:
            with self._engine.begin() as conn:
                for pending in batch:
                    done = self._run_one(conn, pending)
                    if done is not None:
                        rows += done.events
                        _merge(added, done.bins)
                bins.write(conn, added)
                self._events.write(conn, rows)
        except Exception as error:
            for pending in batch:
                pending.error = pending.error or _told(error)
        self.batches += 1
        self.refused += any(isinstance(each.error, _Refused) for each in batch)
        self.operations += len(batch)

    def _run_one(self, conn: sa.Connection, pending: _Pending) -> Tx | None:
        """What the operation leaves to be written; None when it failed."""
        tx = Tx(conn, self._clock())
        try:
            with conn.begin_nested():
                pending.result = pending.run(tx)
        except Exception as error:
            pending.error = _told(error)
            if _rolled_back(conn):  # what ran before in this batch is undone too: nobody may hear "done"
                raise
            return None
        return tx

    def _resolve(self, batch: list[_Pending]) -> None:
        for pending in batch:
            self._space.release()
            if pending.future.done():
                continue
            if pending.error is not None:
                pending.future.set_exception(pending.error)
            else:
                pending.future.set_result(pending.result)


class _Refused(Unavailable):
    """The database's own trouble."""


def _merge(added: Bins, more: Bins) -> None:
    for key, (many, tokens) in more.items():
        before = added.get(key, (0, 0))
        added[key] = (before[0] + many, before[1] + tokens)


def _rolled_back(conn: sa.Connection) -> bool:
    """Whether the database ended the whole transaction by itself: SQLite may, on a full disk."""
    raw = conn.connection.dbapi_connection
    return getattr(raw, "in_transaction", True) is False


def _first(error: sa.exc.OperationalError) -> sa.exc.OperationalError:
    before: BaseException | None = error
    while before is not None:
        error = before if isinstance(before, sa.exc.OperationalError) else error
        before = before.__context__
    return error


def _told(error: Exception) -> Exception:
    """What a caller is told: typed errors and bugs as they are, a database's trouble as such: the first of
    it, since one that undid everything by itself then knows no savepoint."""
    if isinstance(error, sa.exc.OperationalError):
        first = _first(error)
        told = _Refused(f"the database can't be written: {first.orig}", retry_after_s=5.0)
        told.__cause__ = error
        return told
    return error
