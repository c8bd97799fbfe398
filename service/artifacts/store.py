"""Store that keeps files by the SHA-256 of their content."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from steptune.service.artifacts.files import Files, LocalFiles, StoredFile, copy_out
from steptune.service.artifacts.lock import CollectionLock, FileLock
from steptune.service.connections import storage_errors
from steptune.tuner.errors import StoreError
from steptune.tuner.records import Record, new_id

CHUNK_BYTES = 1 << 20
INCOMING = "incoming"
_DIGEST = re.compile("[0-9a-f]{64}")


class Kept(Record):
    """File that was put into the store."""

    digest: str
    size_bytes: int


class ArtifactTooLargeError(StoreError):
    """The artifact has more bytes than allowed."""


class ArtifactGoneError(StoreError):
    """An artifact that was stored is missing."""


class ArtifactStore:
    """Files named by the SHA-256 of their content (`ab/cdef...`), each kept once.

    Args:
        files: Location of the files; a path stands for a directory, made when the first file is put.
        lock: Lock shared with all processes that put or collect files there; by default a file in the directory.
    """

    def __init__(self, files: Files | Path, lock: CollectionLock | None = None) -> None:
        self._files = LocalFiles(files) if isinstance(files, Path) else files
        self.lock: CollectionLock = lock or FileLock(Path(self._files.place) / "lock")

    @property
    def place(self) -> str:
        """Return the location of the files as shown in messages."""
        return self._files.place

    # --- putting ---------------------------------------------------------------------------------

    @contextmanager
    def putting(
        self, source: Path | Iterable[bytes], *, move: bool = False, limit: int | None = None
    ) -> Iterator[Kept]:
        """Put a file, complete or not at all, and hold off garbage collection until the context ends, so that the
        caller can record the row that refers to the file.

        Args:
            source: A path, or the content in pieces.
            move: Remove the source afterwards; on the same file system it is not even copied.
            limit: Maximum bytes to accept.

        Raises:
            ArtifactTooLargeError: More than `limit` bytes came.
            StorageFullError: The disk is full.
            StoreError: The source cannot be read, or the store cannot be written.
        """
        incoming = f"{INCOMING}/{new_id()}"
        try:
            kept = self._receive(source, incoming, move, limit)
            with self.lock.shared():
                self._files.rename(incoming, _name(kept.digest))
                yield kept
        finally:
            self._files.delete(incoming)
        if move and isinstance(source, Path):
            with storage_errors(str(source)):
                source.unlink(missing_ok=True)

    def put(self, source: Path | Iterable[bytes], *, move: bool = False, limit: int | None = None) -> Kept:
        """Put a file to which no row refers yet; garbage collection spares it for the grace period."""
        with self.putting(source, move=move, limit=limit) as kept:
            return kept

    def _receive(self, source: Path | Iterable[bytes], incoming: str, move: bool, limit: int | None) -> Kept:
        """Copy or move the content into the store under a temporary name; if that fails, the source stays."""
        measured = _Measured(limit)
        taken = self._files.take(source, incoming) if isinstance(source, Path) and move else None
        if isinstance(source, Path) and taken is not None:
            try:
                for _ in measured.of(_chunks(taken)):
                    pass
            except BaseException:
                self._files.give_back(incoming, source)
                raise
        else:
            self._files.write(incoming, measured.of(_chunks(source) if isinstance(source, Path) else source))
        return measured.kept

    # --- giving ----------------------------------------------------------------------------------

    def open(self, digest: str) -> BinaryIO:
        """Open the file with this content for reading; it is seekable.

        Raises:
            ArtifactGoneError: No such content is stored.
        """
        self.size_bytes(digest)
        return self._files.open(_name(digest))

    def size_bytes(self, digest: str) -> int:
        """Return the size of the file with this content.

        Raises:
            ArtifactGoneError: No such content is stored.
        """
        found = self._files.find(_name(digest))
        if found is None:
            raise ArtifactGoneError(
                f"there is no artifact {digest} in {self.place}: it was deleted, or is stored elsewhere"
            )
        return found.size_bytes

    @contextmanager
    def local_copy(self, digest: str) -> Iterator[Path]:
        """Provide a local path of a stored file until the context ends: a temporary copy, or the file itself if the
        store is local (do not change it). The content is checked against its digest.

        Raises:
            ArtifactGoneError: No such content is stored.
            StoreError: The file cannot be copied, or has changed since it was put.
        """
        self.size_bytes(digest)
        here = self._files.local_path(_name(digest))
        if here is not None:
            self._check_content(here, digest)
            yield here
            return
        with tempfile.TemporaryDirectory(prefix="steptune-") as folder, self.open(digest) as source:
            path = Path(folder) / digest
            copy_out(source, path)
            self._check_content(path, digest)
            yield path

    def _check_content(self, path: Path, digest: str) -> None:
        with storage_errors(str(path)), path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != digest:
            raise StoreError(
                f"artifact {digest} in {self.place} has been changed: its content has the digest {found}; restore it "
                "from a backup, or upload it again"
            )

    # --- forgetting ------------------------------------------------------------------------------

    def delete(self, digest: str) -> None:
        """Delete a file if it exists. No row may refer to it."""
        self._files.delete(_name(digest))

    def list(self) -> Iterator[StoredFile]:
        """Yield the stored files; their names are their digests."""
        for file in self._files.list():
            folder, _, rest = file.name.rpartition("/")
            if _DIGEST.fullmatch(folder + rest):
                yield StoredFile(name=folder + rest, size_bytes=file.size_bytes, modified_s=file.modified_s)

    def clock_s(self) -> float:
        """Return seconds since 1970 by the clock that dates the files: the time stamp of an empty file written for
        this.
        """
        name = f"{INCOMING}/{new_id()}"
        try:
            self._files.write(name, [])
            found = self._files.find(name)
        finally:
            self._files.delete(name)
        if found is None:
            raise StoreError(
                f"a file that was just written to {self.place} is missing: check that no other program deletes "
                "files there"
            )
        return found.modified_s

    def is_older(self, digest: str, than_s: float) -> bool:
        """Say whether a file exists and was stored before a time."""
        found = self._files.find(_name(digest))
        return found is not None and found.modified_s < than_s

    def delete_abandoned(self, before_s: float) -> int:
        """Remove incomplete files that were last written before a time: the processes that wrote them have died. Return
        the number removed.
        """
        abandoned = [f for f in self._files.list() if f.name.startswith(f"{INCOMING}/") and f.modified_s < before_s]
        for file in abandoned:
            self._files.delete(file.name)
        return len(abandoned)

    def total_bytes(self) -> int:
        """Return the size of all stored files."""
        return sum(file.size_bytes for file in self.list())


def _name(digest: str) -> str:
    if not _DIGEST.fullmatch(digest):
        raise StoreError(f"a digest must be the 64 hexadecimal digits of a SHA-256, got {digest!r}")
    return f"{digest[:2]}/{digest[2:]}"


class _Measured:
    """Stream that hashes and counts the bytes that pass through it, so that the stored content matches its digest."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._hash = hashlib.sha256()
        self._size_bytes = 0

    def of(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self._size_bytes += len(chunk)
            if self._limit is not None and self._size_bytes > self._limit:
                raise ArtifactTooLargeError(
                    f"the content must have at most {self._limit:,} bytes: send less, or raise "
                    "STEPTUNE_MAX_UPLOAD_BYTES"
                )
            self._hash.update(chunk)
            yield chunk

    @property
    def kept(self) -> Kept:
        return Kept(digest=self._hash.hexdigest(), size_bytes=self._size_bytes)


def _chunks(path: Path) -> Iterator[bytes]:
    with storage_errors(str(path)), path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk
