"""Uploaded workloads: inspected by reading their files, never by importing them."""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import BoundedSemaphore
from typing import BinaryIO

from steptune.service.archives import DEFAULT_LIMITS, check_source_size, checked_parts, find_workloads, unpack
from steptune.service.connections import storage_errors
from steptune.service.script_source import read_manifest
from steptune.tuner.errors import WorkloadError, WorkloadRejectedError
from steptune.tuner.workloads.reference import is_command, parse_reference, workload_of

_FILE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}\.py")
_SHOWN = 10
UPLOADS_AT_ONCE = 4
LEFT_S = 24 * 3600.0
"""Age in seconds above which a folder is assumed to have been left behind by a killed process."""


class UploadSpace:
    """Folder in which uploads are unpacked for inspection, a limited number at a time.

    An upload may unpack to a gigabyte: without a bound, a few dozen at once would fill the disk.

    Args:
        folder: Folder for the uploads; created if missing.
        at_once: Maximum number of uploads at a time.
    """

    def __init__(self, folder: Path, at_once: int = UPLOADS_AT_ONCE) -> None:
        self._folder = folder.absolute()
        self._free = BoundedSemaphore(at_once)

    @contextmanager
    def taken(self) -> Iterator[Path | None]:
        """Provide an empty folder, which is removed afterwards; None while the maximum number of uploads is being
        inspected.
        """
        if not self._free.acquire(blocking=False):
            yield None
            return
        try:
            with storage_errors(str(self._folder)):
                self._folder.mkdir(parents=True, exist_ok=True)
                self._remove_left()
                folder = tempfile.TemporaryDirectory(dir=self._folder)
            with folder as name:
                yield Path(name)
        finally:
            self._free.release()

    def _remove_left(self) -> None:
        for left in self._folder.iterdir():
            with suppress(FileNotFoundError):  # another process was faster, or its upload is done
                if left.stat().st_mtime < time.time() - LEFT_S:
                    shutil.rmtree(left, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class Upload:
    """A file or an archive that was inspected.

    Attributes:
        kind: "file", "archive" or "script".
        path: Path of the file or archive.
        entry: The reference of the workload within it.
        digest: SHA-256 of its bytes.
    """

    kind: str
    path: Path
    entry: str
    digest: str


def receive(source: BinaryIO, file_name: str, entry: str, folder: Path) -> Upload:
    """Copy an upload into a folder, and find the workload in it.

    Args:
        file_name: The user's name of the file; with the suffix `.py` it is a Python file, else an archive.
        entry: The workload's reference within it ("folder/train.py:MyWorkload"), or a script's command; empty where
            there is only one.
        folder: An empty folder, which the caller removes.

    Raises:
        ArchiveRefusedError: The archive cannot be unpacked safely.
        WorkloadError: There is no such workload in it, several and `entry` is empty, or it is too large to be parsed.
    """
    is_file = file_name.endswith(".py")
    if is_file and not _FILE_NAME.fullmatch(file_name):
        raise WorkloadRejectedError(
            f"{file_name!r} is not a module name: use letters, digits and underscores, then .py"
        )
    path = folder / "upload"
    digest = _copy(source, path)
    root = folder / "content"
    if is_file:
        check_source_size(path, file_name)
        root.mkdir()
        (root / file_name).symlink_to(path)
    else:
        unpack(path, root)
    if is_command(entry):
        return Upload(kind="script", path=path, entry=_script_entry(root, entry), digest=digest)
    found = _entry(root, entry)
    return Upload(kind="file" if is_file else "archive", path=path, entry=found, digest=digest)


def _copy(source: BinaryIO, path: Path) -> str:
    with storage_errors(str(path)):
        with path.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        with path.open("rb") as written:
            return hashlib.file_digest(written, "sha256").hexdigest()


def _entry(root: Path, entry: str) -> str:
    """Return the reference of the workload in the folder `root`: the given one, if it is valid, or the only one that is
    found.
    """
    if entry:
        _check_entry(root, entry)
        return entry
    found = find_workloads(root)
    if len(found) == 1:
        return found[0]
    if not found:
        raise WorkloadRejectedError(
            "the upload has no class that looks like a workload: name one with `entry`, like train.py:MyWorkload"
        )
    shown = ", ".join(found[:_SHOWN])
    raise WorkloadRejectedError(f"the upload has {len(found)} workloads ({shown}): name one with `entry`")


def _script_entry(root: Path, entry: str) -> str:
    """Return the command of the script below `root`."""
    command = read_manifest(root).command
    if workload_of(command) != entry:
        raise WorkloadRejectedError(
            f"`entry` must be the command in the archive, {workload_of(command)!r}, got {entry!r}"
        )
    return entry


def _check_entry(root: Path, entry: str) -> None:
    target, _, query = entry.partition("?")
    file, colon, name = target.rpartition(":")
    parts = checked_parts(file, DEFAULT_LIMITS)
    if not colon or not file.endswith(".py") or not parts:
        raise WorkloadRejectedError(f"`entry` is {entry!r}; write it like folder/train.py:MyWorkload")
    if ":" in query:
        raise WorkloadRejectedError(f"the arguments of `entry` contain a colon ({query!r}): write it as %3A")
    source = root.joinpath(*parts)
    if source.is_file():
        check_source_size(source, file)
    try:
        parse_reference(f"{source}:{name}?{query}")
    except WorkloadError as error:
        raise type(error)(str(error).replace(f"{root.resolve()}/", "").replace(f"{root}/", "")) from None
