"""Lock that keeps garbage collection away from files that are being stored.

A process that puts a file shares the lock from naming the file until a row that refers to it is committed; one that
collects holds it exclusively from reading the rows until the files are deleted. So a file that a row is about to refer
to is never deleted, however long a process is held up in between: the lock of a process that dies goes with it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from sqlalchemy import Connection, NullPool, func, select

from steptune.service import advisory_locks
from steptune.service.connections import create_engine_for, place_of, storage_errors
from steptune.tuner.errors import StoreError

COLLECTION_PATIENCE_S = 10.0
_POLL_S = 0.01


class CollectionBusyError(StoreError):
    """Garbage collection is skipped because files are being stored without a pause."""


class CollectionLock(Protocol):
    def shared(self) -> AbstractContextManager[None]:
        """Hold the lock while a file is stored and its row is written; wait first for a running collection to end."""

    def exclusive(self) -> AbstractContextManager[None]:
        """Hold the lock during garbage collection.

        Raises:
            CollectionBusyError: Others hold it, for longer than the patience of a collection.
        """


class FileLock:
    """Lock for processes that share a file system. Threads exclude each other too.

    Args:
        path: A file that nothing else locks; made when it is first needed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._opened() as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            yield

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        with self._opened() as descriptor:
            deadline = time.monotonic() + COLLECTION_PATIENCE_S
            while not _lock_now(descriptor):
                _wait(deadline)
            yield

    @contextmanager
    def _opened(self) -> Iterator[int]:
        with storage_errors(str(self._path)):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield descriptor
        finally:
            os.close(descriptor)  # which unlocks


def _lock_now(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class PostgresLock:
    """Lock for processes on several hosts that share a PostgreSQL database: a session-level advisory lock, for which
    every use opens its own connection.
    """

    def __init__(self, url: str) -> None:
        self._engine = create_engine_for(url, poolclass=NullPool)

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._connected() as connection:
            with storage_errors(place_of(self._engine)):
                connection.execute(select(func.pg_advisory_lock_shared(advisory_locks.COLLECTION)))
            yield

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        with self._connected() as connection:
            deadline = time.monotonic() + COLLECTION_PATIENCE_S
            while not self._lock_now(connection):
                _wait(deadline)
            yield

    def _lock_now(self, connection: Connection) -> bool:
        with storage_errors(place_of(self._engine)):
            return bool(connection.scalar(select(func.pg_try_advisory_lock(advisory_locks.COLLECTION))))

    @contextmanager
    def _connected(self) -> Iterator[Connection]:
        """Open a connection; closing it also releases the lock."""
        with storage_errors(place_of(self._engine)):
            connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        with connection:
            yield connection


def _wait(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise CollectionBusyError(
            "garbage collection is postponed to its next run, because artifacts were being stored without a pause "
            f"for {COLLECTION_PATIENCE_S:g} s"
        )
    time.sleep(_POLL_S)
