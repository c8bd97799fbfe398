"""Format of a backup: a tar with `manifest.json`, then the database, then the artifacts.

Names in the archive are never used as paths: members must be plain files, with the order, the names and the digests
that the manifest gives.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from steptune.service.connections import storage_errors
from steptune.tuner.errors import StoreError
from steptune.tuner.records import Record, new_id

FORMAT = 1
MANIFEST = "manifest.json"
DATABASE = "database"
_MAX_MANIFEST_BYTES = 256 << 20
_CHUNK_BYTES = 1 << 20


class BackedUpFile(Record):
    sha256: str
    size_bytes: int


class Manifest(Record):
    """Manifest of a backup: a description of its contents."""

    format: int
    steptune_version: str
    engine: str
    """Kind of database: "sqlite" or "postgresql"."""
    revision: str
    created_at: str
    database: BackedUpFile
    artifacts: tuple[BackedUpFile, ...] | None
    """Artifacts of the archive; None where they were left out."""
    missing: tuple[str, ...] = ()
    """Digests of missing files to which rows refer."""


class BackupWriter:
    """Writer of a backup's members, in the order of the format."""

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar

    def add(self, name: str, source: BinaryIO, size_bytes: int) -> None:
        member = tarfile.TarInfo(name)
        member.size, member.mode = size_bytes, 0o600
        self._tar.addfile(member, source)

    def add_manifest(self, manifest: Manifest) -> None:
        text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        self.add(MANIFEST, io.BytesIO(text), len(text))


class BackupReader:
    """Reader of a backup's members, in the order of the format.

    Raises:
        StoreError: The file is no backup, is damaged, or is of a later format.
    """

    def __init__(self, tar: tarfile.TarFile, place: str) -> None:
        self._tar = tar
        self._place = place
        self.manifest = self._read_manifest()

    def database(self, target: Path) -> None:
        """Unpack the database, and check it against the manifest."""
        source = self._next(DATABASE, self.manifest.database.size_bytes)
        digest = hashlib.sha256()
        with storage_errors(str(target)), target.open("wb") as sink:
            while chunk := self._read(source):
                digest.update(chunk)
                sink.write(chunk)
        if digest.hexdigest() != self.manifest.database.sha256:
            raise self.damaged("its database differs from the one that was backed up")

    def artifacts(self) -> Iterator[tuple[BackedUpFile, Iterator[bytes]]]:
        """Yield each file with an iterator over its chunks, which must be consumed before the next file."""
        for file in self.manifest.artifacts or ():
            source = self._next(f"artifacts/{file.sha256}", file.size_bytes)
            yield file, iter(lambda source=source: self._read(source), b"")  # type: ignore[misc]

    def damaged(self, what: str) -> StoreError:
        return StoreError(f"{self._place} is damaged: {what}; nothing was replaced. Use another backup")

    def _read_manifest(self) -> Manifest:
        source = self._next(MANIFEST, None)
        try:
            versioned = msgspec.json.decode(text := source.read(), type=dict)
            if versioned.get("format") != FORMAT:
                raise StoreError(
                    f"{self._place} has format {versioned.get('format')!r}, but this version reads format "
                    f"{FORMAT}: restore it with the version of Steptune that wrote it, or with a later version"
                )
            return msgspec.json.decode(text, type=Manifest)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self.damaged(f"its manifest cannot be read ({error})") from error

    def _next(self, name: str, size_bytes: int | None) -> BinaryIO:
        try:
            member = self._tar.next()
        except (tarfile.TarError, EOFError) as error:
            raise self.damaged(str(error)) from error
        if member is None or member.name != name or not member.isreg():
            found = "its end" if member is None else repr(member.name)
            raise self.damaged(f"expected {name!r} next, found {found}")
        if size_bytes is None and member.size > _MAX_MANIFEST_BYTES:
            raise self.damaged(f"its manifest is too large ({member.size:,} bytes)")
        if size_bytes is not None and member.size != size_bytes:
            raise self.damaged(f"{name!r} has {member.size:,} bytes instead of {size_bytes:,}")
        return cast(BinaryIO, self._tar.extractfile(member))

    def _read(self, source: BinaryIO) -> bytes:
        try:
            return source.read(_CHUNK_BYTES)
        except (tarfile.TarError, EOFError) as error:
            raise self.damaged(str(error)) from error


@contextmanager
def writing_backup(path: Path) -> Iterator[BackupWriter]:
    """Write a new backup atomically; only its owner may read it."""
    partial = path.with_name(f".{path.name}.{new_id()}")
    with storage_errors(str(path)):
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as tar:
                    yield BackupWriter(tar)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def reading_backup(path: Path) -> Iterator[BackupReader]:
    """Open a backup.

    Raises:
        StoreError: The file cannot be read, or is no backup.
    """
    with storage_errors(str(path)):
        file = path.open("rb")
    with file:
        try:
            tar = tarfile.open(fileobj=file, mode="r|")  # noqa: SIM115 (closed below)
        except tarfile.TarError as error:
            raise StoreError(f"{path} is not a backup: {error}; `steptune db backup FILE` creates one") from error
        with tar:
            yield BackupReader(tar, str(path))


def described(path: Path) -> BackedUpFile:
    """Return the digest and size of a file."""
    with storage_errors(str(path)), path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return BackedUpFile(sha256=digest.hexdigest(), size_bytes=file.tell())
