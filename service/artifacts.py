"""Files by their content: traces and other things too large for a row."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import BinaryIO

from service.connections import storage_errors
from tuner.errors import StoreError
from tuner.records import new_id

_CHUNK_BYTES = 1 << 20
_DIGEST = re.compile("[0-9a-f]{64}")


class ArtifactStore:
    """A directory of files named by the SHA-256 of their content (`ab/cdef...`), each kept once.

    Args:
        directory: Made when the first file is put.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def put(self, path: Path, *, move: bool = False) -> str:
        """Keeps a copy of a file; it is there complete or not at all.

        Args:
            move: Remove the file afterwards.

        Returns:
            Its digest.

        Raises:
            StorageFull: The disk is full.
            StoreError: The file cannot be read, or the directory cannot be written.
        """
        with storage_errors(str(path)):
            source = path.open("rb")
        incoming = self._directory / "incoming" / new_id()
        with source, storage_errors(str(self._directory)):
            incoming.parent.mkdir(parents=True, exist_ok=True)
            try:
                digest = _copy(source, incoming)
                target = self._place(digest)
                target.parent.mkdir(exist_ok=True)
                incoming.replace(target)
            finally:
                incoming.unlink(missing_ok=True)
            if move:
                path.unlink()
        return digest

    def path(self, digest: str) -> Path:
        """Where the file with this content is.

        Raises:
            StoreError: It is not kept here.
        """
        place = self._place(digest)
        if not place.is_file():
            raise StoreError(f"there is no artifact {digest} in {self._directory}: it was deleted, or is elsewhere")
        return place

    def delete(self, digest: str) -> None:
        """Forgets a file, if it is there. Make sure that no row refers to it."""
        with storage_errors(str(self._directory)):
            self._place(digest).unlink(missing_ok=True)

    def total_bytes(self) -> int:
        """The size of all files, for quotas."""
        return sum(path.stat().st_size for path in self._directory.glob("[0-9a-f][0-9a-f]/*"))

    def _place(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise StoreError(f"{digest!r} is not a digest: 64 hexadecimal digits of a SHA-256")
        return self._directory / digest[:2] / digest[2:]


def _copy(source: BinaryIO, target: Path) -> str:
    """Copies, and hashes what it copied: what is kept is what the digest says."""
    digest = hashlib.sha256()
    with target.open("wb") as writer:
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
            writer.write(chunk)
        writer.flush()
        os.fsync(writer.fileno())
    return digest.hexdigest()
