"""The artifact store that the settings name."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy.engine import make_url

from steptune.service.artifacts.files import Files, LocalFiles, RemoteFiles
from steptune.service.artifacts.lock import CollectionLock, FileLock, PostgresLock
from steptune.service.artifacts.store import ArtifactStore
from steptune.service.settings import Settings


def open_artifacts(settings: Settings) -> ArtifactStore:
    """Open the store at `artifacts_url`, by default in the data directory.

    Raises:
        StoreError: The URL cannot be used; MissingDependencyError where its library is not installed.
    """
    files = files_at(settings.artifacts_url or settings.data_directory / "artifacts")
    return ArtifactStore(files, _lock_for(files, settings))


def files_at(place: Path | str) -> Files:
    """Return the file storage at a path, a `file://` URL, or another URL that fsspec supports.

    Raises:
        StoreError, MissingDependencyError: As `open_artifacts`.
    """
    text = str(place)
    if "://" not in text:
        return LocalFiles(Path(text).expanduser().absolute())
    if text.startswith("file://"):
        return LocalFiles(Path(text.removeprefix("file://")).absolute())
    return RemoteFiles(text)


def _lock_for(files: Files, settings: Settings) -> CollectionLock:
    """Return the lock for garbage collection: a lock file beside artifacts in a directory, else a lock in PostgreSQL,
    else a lock file in the data directory.
    """
    if isinstance(files, LocalFiles):
        return FileLock(Path(files.place) / "lock")
    if make_url(settings.database_url).get_backend_name() == "postgresql":
        return PostgresLock(settings.database_url)
    return FileLock(settings.data_directory.absolute() / "artifacts.lock")
