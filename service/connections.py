"""Connections to SQLite or PostgreSQL, transactions, and errors in the user's terms."""

from __future__ import annotations

import errno
import functools
import math
import os
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, Pool, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DatabaseError, InvalidatePoolError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session
from sqlalchemy.pool import ConnectionPoolEntry

from steptune.service.interrupts import held_back
from steptune.tuner.errors import MissingDependencyError, StorageFullError, StoreError, StoreUnavailableError

BUSY_TIMEOUT_S = 30.0
"""Maximum seconds that a SQLite writer waits for its turn; our transactions take milliseconds."""

_WRITES = {"steptune_writes": True}
FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_POSTGRESQL_DISK_FULL = "53100"

_UNAVAILABLE_SQLSTATES = ("08", "25P03", "40", "53", "57P")
"""Prefixes of the SQLSTATE codes of PostgreSQL's transient errors: lost connections, transactions that paused too long,
conflicts between transactions, lack of resources, and a server that shuts down or starts.
"""
CONNECT_TIMEOUT_S = 10
SILENCE_S = 20
"""Seconds without an answer after which a server counts as gone."""
MAX_CONNECTIONS = 15
"""Maximum connections of a process to PostgreSQL."""
TRUSTED_S = 1.0
"""Maximum idle time in seconds of a connection that is reused without a ping."""

_SQLITE_MEANINGS = {
    sqlite3.SQLITE_NOTADB: "is not a SQLite database: name another file, or move this one away",
    sqlite3.SQLITE_CORRUPT: "is a damaged SQLite database: restore a copy of it, or name another file",
    sqlite3.SQLITE_READONLY: "cannot be written: check the permissions of the file and of its directory",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened: check that its directory exists and may be written",
    sqlite3.SQLITE_CONSTRAINT: "rejected a row: check that no other process writes the same study",
    sqlite3.SQLITE_BUSY: f"is locked: another process has been writing for {BUSY_TIMEOUT_S:g} s; end it, or wait",
}


def create_engine_for(url: str, *, poolclass: type[Pool] | None = None) -> Engine:
    """Create an engine for a database URL; the parent directory of a SQLite file is created.

    Args:
        poolclass: Class of the pool that keeps connections to PostgreSQL; by default one that keeps several.

    Raises:
        StoreError: The URL cannot be read, or the directory cannot be made.
        MissingDependencyError: The driver that the URL names is not installed.
    """
    shown = re.sub("://.*@", "://***@", url)
    try:
        parsed = make_url(url)
        if parsed.get_backend_name() == "sqlite":
            return _sqlite_engine(parsed)
        if parsed.get_backend_name() == "postgresql":
            return _postgresql_engine(parsed, poolclass)
    except ArgumentError as error:
        raise StoreError(f"{shown!r} is not a database URL; write it like sqlite:///steptune.db") from error
    except ModuleNotFoundError as error:
        raise MissingDependencyError(f"{shown!r} needs the package {error.name}: install it, or use SQLite") from error
    raise StoreError(f"{shown!r} is neither SQLite nor PostgreSQL; write it like sqlite:///steptune.db")


def place_of(engine: Engine) -> str:
    """Return a database's location in the form shown in messages: a path, or a URL without its password."""
    if engine.url.get_backend_name() == "sqlite":
        return engine.url.database or "the in-memory database"
    return engine.url.render_as_string(hide_password=True)


def without_password(url: str) -> str:
    """Return a database URL without its password."""
    return make_url(url).render_as_string(hide_password=True)


def is_superuser(engine: Engine) -> bool:
    """Say whether the database role is a superuser of its server; False for SQLite, which has no roles."""
    if engine.dialect.name != "postgresql":
        return False
    with querying(engine) as connection:
        return bool(connection.exec_driver_sql("SELECT rolsuper FROM pg_roles WHERE rolname = current_user").scalar())


@contextmanager
def reading(engine: Engine) -> Iterator[Session]:
    """Open a read-only transaction."""
    with held_back(), storage_errors(place_of(engine)), Session(engine) as session, session.begin():
        yield session


@contextmanager
def querying(engine: Engine) -> Iterator[Connection]:
    """Open a connection for statements that return rows. It takes a third of the time of `reading`, which builds a
    session.

    On PostgreSQL each statement is a transaction of its own, which sees no less there and saves two round trips.
    """
    with held_back(), storage_errors(place_of(engine)), engine.connect() as connection:
        if connection.dialect.name == "postgresql":
            connection.execution_options(isolation_level="AUTOCOMMIT")
        yield connection


@contextmanager
def writing(engine: Engine) -> Iterator[Session]:
    """Open a writing transaction. On SQLite it excludes other writers from its beginning, so that nothing it has read
    is stale.
    """
    with (
        held_back(),
        storage_errors(place_of(engine)),
        Session(engine.execution_options(**_WRITES)) as session,
        session.begin(),
    ):
        yield session


@contextmanager
def storage_errors(place: str) -> Iterator[None]:
    """Convert errors of a database or of files into Steptune's own exceptions.

    Raises:
        StorageFullError: The disk, or the database, is full.
        StoreUnavailableError: The database is busy, or restarts: a retry may succeed.
        StoreError: The database or files cannot be used for another reason, which the message states.
    """
    try:
        yield
    except PoolTimeout as error:
        raise StoreUnavailableError(f"{place} has no free connection left: {error}") from error
    except (ProgrammingError, sqlite3.ProgrammingError):
        raise  # a bug of ours, not a state of the database
    except DatabaseError as error:
        raise _explain(error.orig or error, place) from error
    except (sqlite3.Error, OSError) as error:
        raise _explain(error, place) from error


def _explain(error: BaseException, place: str) -> StoreError:
    if _is_full(error):
        return StorageFullError(
            f"{place} or the disk that holds it is full: free some space; all earlier records are kept"
        )
    kind = StoreUnavailableError if _will_pass(error) else StoreError
    meaning = _SQLITE_MEANINGS.get(_sqlite_code(error))
    if meaning is not None:
        return kind(f"{place} {meaning} ({error})")
    text = str(error).strip().partition("\n")[0]
    return kind(f"{place} cannot be used: {text}")


def _will_pass(error: BaseException) -> bool:
    """Say whether an error is transient, so that a retry may succeed: the file is busy, or the server restarts or
    cannot be reached.
    """
    if _sqlite_code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return True
    if isinstance(error, sqlite3.Error | OSError):
        return False
    state = getattr(error, "sqlstate", None)
    if state is None:  # no answer came from the server
        return type(error).__name__ in ("OperationalError", "InterfaceError", "ConnectionTimeout")
    return str(state).startswith(_UNAVAILABLE_SQLSTATES)


def _is_full(error: BaseException) -> bool:
    return (
        _sqlite_code(error) == sqlite3.SQLITE_FULL
        or getattr(error, "sqlstate", None) == _POSTGRESQL_DISK_FULL
        or (isinstance(error, OSError) and error.errno in FULL_ERRNOS)
    )


def _sqlite_code(error: BaseException) -> int:
    """Return SQLite's primary error code; extended codes carry more in their higher bits."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _postgresql_engine(url: URL, poolclass: type[Pool] | None) -> Engine:
    """Create an engine that detects an unreachable server soon: a worker must know in time that its lease is lost."""
    patience = {"connect_timeout": CONNECT_TIMEOUT_S, "keepalives_idle": SILENCE_S // 2, "keepalives_interval": 3}
    given = {name for name in patience if name in url.query}
    options = {name: value for name, value in patience.items() if name not in given}
    options["tcp_user_timeout"] = 1000 * SILENCE_S
    # All are kept: those beyond SQLAlchemy's usual five would be opened for every transaction of a busy time.
    kept = {"poolclass": poolclass} if poolclass is not None else {"pool_size": MAX_CONNECTIONS, "max_overflow": 0}
    engine = create_engine(url, connect_args=options, **kept)
    event.listen(engine, "checkin", _note_use)
    event.listen(engine, "checkout", functools.partial(_check_connection, engine))
    return engine


def _note_use(connection: Any, record: ConnectionPoolEntry) -> None:
    record.info["used_s"] = time.monotonic()


def _check_connection(engine: Engine, connection: Any, record: ConnectionPoolEntry, proxy: Any) -> None:
    """Ping a connection only if it was not used lately; `pool_pre_ping` would ping every time, and double a busy
    service's round trips.
    """
    if time.monotonic() - record.info.get("used_s", math.inf) <= TRUSTED_S:
        return
    try:
        engine.dialect.do_ping(connection)
    except engine.dialect.loaded_dbapi.Error as error:
        raise InvalidatePoolError from error


def _sqlite_engine(url: URL) -> Engine:
    if url.database and url.database != ":memory:" and not url.database.startswith("file:"):
        path = Path(url.database).expanduser().absolute()
        with storage_errors(str(path)):
            path.parent.mkdir(parents=True, exist_ok=True)
            _make_private(path)
        url = url.set(database=str(path))
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S})
    event.listen(engine, "connect", _prepare_connection)
    event.listen(engine, "begin", _begin)
    return engine


def _make_private(path: Path) -> None:
    """Create a file that only its owner can read; files that SQLite adds for it get the same mode."""
    with suppress(FileExistsError, PermissionError, IsADirectoryError):  # SQLite says what is wrong
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))


def _prepare_connection(connection: Any, record: Any) -> None:
    connection.isolation_level = None  # sqlite3 would begin transactions itself, and too late
    connection.execute("PRAGMA foreign_keys = ON")
    _switch_to_wal(connection)


def _switch_to_wal(connection: Any) -> None:
    """Switch to WAL, so that readers and a writer can work at the same time.

    The first switch of a file fails at once, without SQLite's own waiting, when another process
    switches it at the same moment; so it is tried again.
    """
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if _sqlite_code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.005)


def _begin(connection: Connection) -> None:
    writes = "steptune_writes" in connection.get_execution_options()
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
