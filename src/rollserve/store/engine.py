"""Connections: one engine for the writer, one for readers, with SQLite's settings on each."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Literal

import sqlalchemy as sa
from sqlalchemy.pool import ConnectionPoolEntry

from rollserve.errors import ConfigError

Synchronous = Literal["normal", "full"]
BUSY_TIMEOUT_S = 30.0


def make_engine(url: str, *, synchronous: Synchronous, writer: bool, connections: int) -> sa.Engine:
    """Raises ``ConfigError`` for a URL that names no usable database."""
    try:
        parsed = sa.make_url(url)
        engine = sa.create_engine(
            parsed,
            pool_size=connections,
            hide_parameters=True,  # secrets are among them
            max_overflow=0,
            pool_pre_ping=parsed.get_backend_name() != "sqlite",
        )
    except (sa.exc.ArgumentError, sa.exc.NoSuchModuleError, ImportError, TypeError) as error:
        raise ConfigError(f"not a usable database URL: {error}", field="store.url") from error
    if engine.dialect.name == "sqlite":
        _sqlite_settings(engine, synchronous, writer)
    return engine


def prepare_file(url: str) -> None:
    """Make SQLite's file, readable by its owner alone: it holds the keys of backends. Raises
    ``ConfigError`` when that is impossible."""
    parsed = sa.make_url(url)
    if parsed.get_backend_name() != "sqlite":
        return
    if not parsed.database or parsed.database == ":memory:":
        raise ConfigError("an in-memory database is not durable", field="store.url", hint="name a file")
    path = Path(parsed.database)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError as error:
        raise ConfigError(f"can't use {path}: {error.strerror}", field="store.url") from error


def _sqlite_settings(engine: sa.Engine, synchronous: Synchronous, writer: bool) -> None:
    """The driver's own transaction handling is switched off: it would end a transaction at odd places
    and knows no snapshot reads. A writer takes the lock when it begins, so that what it read in its
    transaction still holds when it writes."""
    begin = "BEGIN IMMEDIATE" if writer else "BEGIN"

    def on_connect(connection: sqlite3.Connection, _entry: ConnectionPoolEntry) -> None:
        connection.isolation_level = None
        for pragma in (
            f"busy_timeout={int(BUSY_TIMEOUT_S * 1000)}",
            "journal_mode=WAL",
            f"synchronous={synchronous}",
            "foreign_keys=ON",
            "cache_size=-65536",
            "temp_store=MEMORY",
        ):
            connection.execute(f"PRAGMA {pragma}")

    def on_begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql(begin)

    sa.event.listen(engine, "connect", on_connect)
    sa.event.listen(engine, "begin", on_begin)
