"""Location of artifacts: a directory, or any location that fsspec knows (`s3://bucket/steptune`).

Both write under a name that nobody reads and then rename, so that a file is there complete or not at all. An object
store renames by a copy on its own side.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from steptune.service.connections import storage_errors
from steptune.tuner.errors import MissingDependencyError, StoreError, StoreUnavailableError
from steptune.tuner.records import Record

_PASSING_ERRNOS = (errno.EAGAIN, errno.EBUSY, errno.EIO, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)
"""Error numbers of transient failures: those that s3fs gives for a store that is busy or broken, and those of
sockets.
"""
_PASSING_NAMES = {
    "ConnectionError",  # Python's, and botocore's, requests' and urllib3's of the same name
    "TimeoutError",
    "gaierror",
    "HTTPClientError",  # botocore
    "ClientConnectionError",  # aiohttp
    "ClientPayloadError",
}


class StoredFile(Record):
    """A file in a listing."""

    name: str
    size_bytes: int
    modified_s: float
    """Time of the last change, in seconds since 1970, by the clock of the file store."""


class Files(Protocol):
    """Files by relative names such as `ab/cdef`. Errors are those of `steptune.service.connections.storage_errors`."""

    place: str
    """Location of the files as shown in messages, without passwords."""

    def write(self, name: str, chunks: Iterable[bytes]) -> None:
        """Write a new file; it is durable once this returns."""

    def rename(self, name: str, target: str) -> None:
        """Rename a file, replacing any file with the target's name, and make it the newest."""

    def take(self, path: Path, name: str) -> Path | None:
        """Move a local file into the store without copying it, and return its new path; None if that is impossible."""

    def give_back(self, name: str, path: Path) -> None:
        """Move a file back to the local path from which `take` moved it."""

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading; the caller closes it."""

    def local_path(self, name: str) -> Path | None:
        """Return a file's local path; None if the file is not on this machine."""

    def find(self, name: str) -> StoredFile | None:
        """Return one file's entry in a listing; None where there is no such file."""

    def delete(self, name: str) -> None:
        """Remove a file if it exists."""

    def list(self) -> Iterator[StoredFile]:
        """Yield all files, including those still being written."""


class LocalFiles:
    """A directory, made when the first file is written.

    Args:
        directory: The directory, used by this store alone.
    """

    def __init__(self, directory: Path) -> None:
        self.place = str(directory)
        self._directory = directory

    def write(self, name: str, chunks: Iterable[bytes]) -> None:
        with storage_errors(self.place), open(self._new(name), "xb", opener=_private) as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())

    def rename(self, name: str, target: str) -> None:
        with storage_errors(self.place):
            source, place = self._directory / name, self._new(target)
            os.utime(source)
            source.replace(place)
            _sync_directory(place.parent)

    def take(self, path: Path, name: str) -> Path | None:
        with storage_errors(self.place):
            if not _is_ours_alone(path):
                return None
            place = self._new(name)
            try:
                path.rename(place)
                place.chmod(0o600)
            except OSError:  # another file system, or a folder that may not be changed: copying tells
                return None
            try:
                with place.open("rb") as file:
                    os.fsync(file.fileno())
            except OSError:
                place.rename(path)
                raise
            return place

    def give_back(self, name: str, path: Path) -> None:
        with storage_errors(self.place):
            (self._directory / name).rename(path)

    def open(self, name: str) -> BinaryIO:
        with storage_errors(self.place):
            return (self._directory / name).open("rb")

    def local_path(self, name: str) -> Path | None:
        return self._directory / name

    def find(self, name: str) -> StoredFile | None:
        with storage_errors(self.place):
            try:
                found = (self._directory / name).stat()
            except FileNotFoundError:
                return None
            return StoredFile(name=name, size_bytes=found.st_size, modified_s=found.st_mtime)

    def delete(self, name: str) -> None:
        with storage_errors(self.place):
            (self._directory / name).unlink(missing_ok=True)

    def list(self) -> Iterator[StoredFile]:
        for path in sorted(self._directory.glob("*/*")):
            found = self.find(f"{path.parent.name}/{path.name}")
            if found is not None:  # it may have gone since
                yield found

    def _new(self, name: str) -> Path:
        path = self._directory / name
        for folder in (self._directory, path.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path


def _is_ours_alone(path: Path) -> bool:
    """Say whether only this user can still write to a file: it has no other owner and no other hard link."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and status.st_nlink == 1


def _private(path: str, flags: int) -> int:
    """Open a file as `open` does, with access for its owner only: it holds what users submitted."""
    return os.open(path, flags, 0o600)


def _sync_directory(directory: Path) -> None:
    """Sync a directory: a new name in it is durable only then."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class RemoteFiles:
    """A location that fsspec knows by its URL; its library finds the credentials in the environment.

    Raises:
        StoreError: The URL cannot be used.
        MissingDependencyError: The library for it is not installed.
    """

    def __init__(self, url: str) -> None:
        import fsspec

        self.place = re.sub("://.*@", "://***@", url)
        try:
            self._system, root = fsspec.core.url_to_fs(url, skip_instance_cache=True)
        except ImportError as error:
            extra = "; for s3:// install steptune[s3]" if url.startswith("s3") else ""
            raise MissingDependencyError(f"{self.place!r} needs a library: {error}{extra}") from error
        except ValueError as error:
            raise StoreError(f"{self.place!r} cannot hold artifacts: {error}; write s3://BUCKET/FOLDER") from error
        self._root = root.rstrip("/")

    def write(self, name: str, chunks: Iterable[bytes]) -> None:
        with self._reached():
            path = self._path(name)
            self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
            with self._system.open(path, "wb") as file:
                for chunk in chunks:
                    file.write(chunk)

    def rename(self, name: str, target: str) -> None:
        with self._reached():
            path = self._path(target)
            self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._system.mv(self._path(name), path)

    def take(self, path: Path, name: str) -> Path | None:
        return None

    def give_back(self, name: str, path: Path) -> None:
        raise AssertionError("this store accepts no files")

    def open(self, name: str) -> BinaryIO:
        with self._reached():
            return cast(BinaryIO, self._system.open(self._path(name), "rb"))

    def local_path(self, name: str) -> Path | None:
        return None

    def find(self, name: str) -> StoredFile | None:
        with self._reached():
            try:
                self._system.invalidate_cache()
                return self._described(name, self._system.info(self._path(name)))
            except FileNotFoundError:
                return None

    def delete(self, name: str) -> None:
        with self._reached(), suppress(FileNotFoundError):
            self._system.rm_file(self._path(name))

    def list(self) -> Iterator[StoredFile]:
        with self._reached():
            self._system.invalidate_cache()
            found: dict[str, dict[str, Any]] = self._system.find(self._root, detail=True)
        for path in sorted(found):
            yield self._described(path.removeprefix(self._root).lstrip("/"), found[path])

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _described(self, name: str, info: dict[str, Any]) -> StoredFile:
        modified = next((info[key] for key in ("LastModified", "mtime", "modified", "created") if key in info), None)
        if modified is None:
            modified = self._system.modified(info["name"])
        seconds = modified if isinstance(modified, int | float) else modified.timestamp()
        return StoredFile(name=name, size_bytes=int(info["size"] or 0), modified_s=float(seconds))

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Convert the errors of object stores' libraries."""
        try:
            yield
        except StoreError:
            raise
        except Exception as error:
            if _will_pass(error):
                raise StoreUnavailableError(f"{self.place} cannot be reached at this moment: {error}") from error
            with storage_errors(self.place):
                if isinstance(error, OSError):
                    raise
            raise StoreError(f"{self.place} cannot be used: {error}") from error


def _will_pass(error: Exception) -> bool:
    """Say whether a retry after this error may succeed. Errors are recognised by the names of their classes, because
    the libraries that define them may not be installed.
    """
    if isinstance(error, OSError) and error.errno in _PASSING_ERRNOS:
        return True
    return not _PASSING_NAMES.isdisjoint(kind.__name__ for kind in type(error).__mro__)


def copy_out(source: BinaryIO, target: Path) -> None:
    """Copy an opened file to a local path."""
    with storage_errors(str(target)), target.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
