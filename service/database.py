"""The schema of a database: creating it, checking it, and opening a store on it.

Only migrations import Alembic: every command checks the schema, and few have to change it.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Engine, column, func, inspect, select, table

from steptune._version import __version__
from steptune.service import advisory_locks
from steptune.service.connections import create_engine_for, place_of, reading, writing
from steptune.service.store import SqlStudyStore
from steptune.tuner.errors import SchemaOutdatedError, SchemaTooNewError, StoreError
from steptune.tuner.installation import PACKAGE

if TYPE_CHECKING:
    from alembic.config import Config

__all__ = ["alembic_config", "check_schema", "create_engine_for", "migrate", "open_engine", "open_store"]

MIGRATIONS = PACKAGE / "migrations"
"""Folder of the migrations beside the package, both in a checkout and in an installation."""
_AT = table("alembic_version", column("version_num"))


class _Schema(Enum):
    EMPTY = "empty"
    OUTDATED = "outdated"
    CURRENT = "current"


def open_store(url: str) -> SqlStudyStore:
    """Open the store at a database URL. An empty database gets the tables; close the store after use.

    Raises:
        StoreError: The database cannot be used; SchemaOutdatedError and SchemaTooNewError say how to continue.
    """
    return SqlStudyStore(open_engine(url))


def open_engine(url: str) -> Engine:
    """Open an engine on a database with this version's schema; like `open_store`, for code that needs more than
    studies.

    Raises:
        StoreError: The database cannot be used; SchemaOutdatedError and SchemaTooNewError say how to continue.
    """
    engine = create_engine_for(url)
    try:
        if _schema_of(engine) is _Schema.EMPTY:
            migrate(engine)
        check_schema(engine)
    except BaseException:
        engine.dispose()
        raise
    return engine


def migrate(database: Engine | str) -> str | None:
    """Bring a database to the schema of this version, in one transaction.

    Args:
        database: An engine, or a URL.

    Returns:
        The revision before; None where there were no tables.

    Raises:
        StoreError: The database cannot be migrated; SchemaTooNewError if a newer version wrote it.
    """
    if isinstance(database, str):
        engine = create_engine_for(database)
        try:
            return migrate(engine)
        finally:
            engine.dispose()
    with writing(database) as session:
        connection = session.connection()
        if connection.dialect.name == "postgresql":  # SQLite has one writer anyway
            connection.execute(select(func.pg_advisory_xact_lock(advisory_locks.MIGRATION)))
        # Another process may have migrated it while this one waited for its turn.
        before = _revision(connection, place_of(database))
        if _state(connection, place_of(database)) is not _Schema.CURRENT:
            _upgrade(connection)
    return before


def check_schema(engine: Engine) -> None:
    """Refuse a database whose schema is not that of this version.

    Raises:
        SchemaOutdatedError: The schema is older, or there are no tables.
        SchemaTooNewError: A newer version of Steptune wrote it.
        StoreError: It is the database of another application.
    """
    state = _schema_of(engine)
    if state is _Schema.EMPTY:
        raise SchemaOutdatedError(f"{place_of(engine)} has no tables yet: run `steptune db upgrade`")
    if state is _Schema.OUTDATED:
        raise SchemaOutdatedError(
            f"{place_of(engine)} has an older schema than Steptune {__version__} needs: back up the database, "
            "then run `steptune db upgrade`"
        )


def known_revisions() -> tuple[str, ...]:
    """Return the revisions that this version knows, the newest first; the names of their files begin with them."""
    files = (MIGRATIONS / "versions").glob("[0-9]*_*.py")
    return tuple(sorted((file.name.partition("_")[0] for file in files), reverse=True))


def revision_of(engine: Engine) -> str | None:
    """Return the schema revision of a Steptune database, even one that this version does not know; None for a database
    without tables.

    Raises:
        StoreError: It is the database of another application.
    """
    with reading(engine) as session:
        return _revision(session.connection(), place_of(engine))


def _schema_of(engine: Engine) -> _Schema:
    with reading(engine) as session:
        return _state(session.connection(), place_of(engine))


def _state(connection: Connection, place: str) -> _Schema:
    """Return the state of a database's schema.

    Raises:
        SchemaTooNewError, StoreError: As `check_schema`.
    """
    revision = _revision(connection, place)
    if revision is None:
        return _Schema.EMPTY
    known = known_revisions()
    if revision not in known:
        raise SchemaTooNewError(
            f"{place} is at revision {revision!r}, which Steptune {__version__} does not know: "
            "a newer version wrote it; install that version, or name another database"
        )
    return _Schema.CURRENT if revision == known[0] else _Schema.OUTDATED


def _revision(connection: Connection, place: str) -> str | None:
    inspector = inspect(connection)
    revision = connection.scalar(select(_AT.c.version_num)) if inspector.has_table(_AT.name) else None
    tables = inspector.get_table_names() if revision is None else []
    if tables:
        raise StoreError(
            f"{place} is the database of another program (tables {', '.join(tables[:5])}): name another database"
        )
    return revision


def alembic_config(connection: Connection | None = None) -> Config:
    """Return Alembic's settings for the migrations of this version, on a connection."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def _upgrade(connection: Connection) -> None:
    from alembic import command

    command.upgrade(alembic_config(connection), "head")
