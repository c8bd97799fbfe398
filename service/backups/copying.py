"""Backup and restoration, for either kind of database."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path

from steptune._version import __version__
from steptune.service.artifacts import ArtifactStore
from steptune.service.backups import postgresql, sqlite
from steptune.service.backups.archive import (
    DATABASE,
    FORMAT,
    BackedUpFile,
    BackupReader,
    Manifest,
    described,
    reading_backup,
    writing_backup,
)
from steptune.service.connections import create_engine_for, place_of, storage_errors
from steptune.service.database import known_revisions, revision_of
from steptune.tuner.errors import SchemaTooNewError, StoreError
from steptune.tuner.records import Record

_DUMP = {"sqlite": sqlite.dump, "postgresql": postgresql.dump}
_LOAD = {"sqlite": sqlite.load, "postgresql": postgresql.load}


class BackupReport(Record):
    """Size of a backup, number of its files, and number of missing files."""

    size_bytes: int
    num_artifacts: int
    num_missing: int
    """Number of missing files to which database rows refer."""


class RestoreReport(Record):
    """Schema of a restored database, and number of restored files."""

    revision: str
    is_current: bool
    """True if the restored schema is the one of this version of Steptune; otherwise, `steptune db upgrade` must follow.
    """
    num_artifacts: int


def back_up(url: str, artifacts: ArtifactStore | None, path: Path, *, force: bool = False) -> BackupReport:
    """Write a snapshot of a database, and the files to which its rows refer, into one file.

    Args:
        artifacts: Store of the files; None leaves them out.
        force: Replace `path` if it is there.

    Raises:
        StoreError: The database is empty, not ours or cannot be read, or the file cannot be written.
        MissingDependencyError: PostgreSQL's tools are not installed.
    """
    if path.exists() and not force:
        raise StoreError(f"{path} exists: name another file, or replace it with --force")
    engine = create_engine_for(url)
    # The lock keeps the files of that moment from being collected before they are copied.
    held = nullcontext() if artifacts is None else artifacts.lock.shared()
    try:
        revision = _known_revision(revision_of(engine), place_of(engine))
        if revision is None:
            raise StoreError(f"{place_of(engine)} has no tables: there is nothing to back up")
        with held, storage_errors(str(path)), tempfile.TemporaryDirectory(dir=path.absolute().parent) as folder:
            dumped = Path(folder) / DATABASE
            digests = _DUMP[engine.dialect.name](engine, dumped)
            kept, missing = ((), ()) if artifacts is None else _present(artifacts, digests)
            manifest = Manifest(
                format=FORMAT,
                steptune_version=__version__,
                engine=engine.dialect.name,
                revision=revision,
                created_at=datetime.now(UTC).isoformat(),
                database=described(dumped),
                artifacts=None if artifacts is None else kept,
                missing=missing,
            )
            _write(path, manifest, dumped, artifacts)
    finally:
        engine.dispose()
    return BackupReport(size_bytes=path.stat().st_size, num_artifacts=len(kept), num_missing=len(missing))


def restore(url: str, artifacts: ArtifactStore, path: Path, *, force: bool = False) -> RestoreReport:
    """Restore a backup: its artifacts first, then the database in one step.

    Args:
        force: Replace what the database holds.

    Raises:
        StoreError: The backup is damaged, of another database, or the database is not empty.
        SchemaTooNewError: A newer version of Steptune made the backup.
        MissingDependencyError: PostgreSQL's tools are not installed.
    """
    engine = create_engine_for(url)
    try:
        _check_replaceable(revision_of(engine), place_of(engine), force)
        with reading_backup(path) as backup, tempfile.TemporaryDirectory(prefix="steptune-") as folder:
            manifest = backup.manifest
            _known_revision(manifest.revision, str(path))
            if manifest.engine != engine.dialect.name:
                raise StoreError(
                    f"{path} is a backup of a {manifest.engine} database, and {place_of(engine)} is of another "
                    f"kind: name a {manifest.engine} database"
                )
            dumped = Path(folder) / DATABASE
            backup.database(dumped)
            with artifacts.lock.shared():  # nothing is collected before the rows are there
                _put_all(backup, artifacts)
                _LOAD[manifest.engine](engine, dumped)
    finally:
        engine.dispose()
    return RestoreReport(
        revision=manifest.revision,
        is_current=manifest.revision == known_revisions()[0],
        num_artifacts=len(manifest.artifacts or ()),
    )


def _known_revision(revision: str | None, place: str) -> str | None:
    if revision is not None and revision not in known_revisions():
        raise SchemaTooNewError(
            f"{place} is at revision {revision!r}, which Steptune {__version__} does not know: a newer "
            "version wrote it; install that version"
        )
    return revision


def _check_replaceable(revision: str | None, place: str, force: bool) -> None:
    """Refuse to replace a database unless forced. A newer schema may be replaced too, which is how to downgrade."""
    if revision is not None and not force:
        raise StoreError(f"{place} already holds studies: name an empty database, or replace its contents with --force")


def _present(artifacts: ArtifactStore, digests: Iterable[str]) -> tuple[tuple[BackedUpFile, ...], tuple[str, ...]]:
    sizes = {file.name: file.size_bytes for file in artifacts.list()}
    wanted = sorted(digests)
    kept = tuple(BackedUpFile(sha256=digest, size_bytes=sizes[digest]) for digest in wanted if digest in sizes)
    return kept, tuple(digest for digest in wanted if digest not in sizes)


def _write(path: Path, manifest: Manifest, dumped: Path, artifacts: ArtifactStore | None) -> None:
    with writing_backup(path) as backup:
        backup.add_manifest(manifest)
        with dumped.open("rb") as file:
            backup.add(DATABASE, file, manifest.database.size_bytes)
        for kept in manifest.artifacts or ():
            assert artifacts is not None
            with artifacts.open(kept.sha256) as source:
                backup.add(f"artifacts/{kept.sha256}", source, kept.size_bytes)


def _put_all(backup: BackupReader, artifacts: ArtifactStore) -> None:
    for file, chunks in backup.artifacts():
        put = artifacts.put(chunks)
        if put.digest != file.sha256:
            raise backup.damaged(f"the content of artifact {file.sha256} does not match its digest")
