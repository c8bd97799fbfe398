"""Backup with SQLite's online copy: consistent while others write, and restored in one transaction."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from sqlalchemy import Engine, create_engine

from steptune.service.backups.references import referenced_digests
from steptune.service.connections import place_of, storage_errors
from steptune.tuner.errors import StoreError


def dump(engine: Engine, target: Path) -> set[str]:
    """Copy the database into a file; return the digests to which its rows refer."""
    with (
        storage_errors(place_of(engine)),
        closing(engine.raw_connection()) as source,
        closing(sqlite3.connect(target)) as copy,
    ):
        _driver(source.driver_connection).backup(copy)
        copy.execute("PRAGMA journal_mode = DELETE")  # one file, without a log beside it
    copied = create_engine(f"sqlite:///{target}")
    try:
        with copied.connect() as connection:
            return referenced_digests(connection)
    finally:
        copied.dispose()


def load(engine: Engine, source: Path) -> None:
    """Replace the content of a database, even while others have it open.

    Raises:
        StoreError: The copy is damaged.
    """
    with storage_errors(str(source)), closing(sqlite3.connect(source)) as copy:
        [[verdict]] = copy.execute("PRAGMA quick_check(1)").fetchall()
        if verdict != "ok":
            raise StoreError(f"the database in the backup is damaged ({verdict}): use another backup")
        with storage_errors(place_of(engine)), closing(engine.raw_connection()) as target:
            copy.backup(_driver(target.driver_connection))


def _driver(connection: object) -> sqlite3.Connection:
    assert isinstance(connection, sqlite3.Connection)
    return connection
