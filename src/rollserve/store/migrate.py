"""Brings a database to the schema of this version of the code; needs no configuration file."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.util import CommandError

from rollserve.errors import ConfigError

MIGRATIONS = Path(__file__).parent / "migrations"


def alembic_config(connection: sa.Connection) -> Config:
    """What ``migrations/env.py`` and the ``alembic`` commands need; ``connection`` is theirs to use."""
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def migrate(engine: sa.Engine) -> None:
    """In one transaction, which on SQLite holds the write lock: two that start at once don't meet.
    Raises ``ConfigError`` when the database was made by a newer version, or is none."""
    try:
        with engine.begin() as connection:
            command.upgrade(alembic_config(connection), "head")
    except CommandError as error:
        raise ConfigError(
            f"the database can't be migrated: {error}",
            field="store.url",
            hint="a newer rollserve may have made it",
        ) from error
    except sa.exc.DatabaseError as error:
        raise ConfigError(f"the database can't be used: {error.orig}", field="store.url") from error
