"""Packing of a folder for upload: the same folder always gives the same bytes, and unneeded files are left out."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from steptune.service.archives import DEFAULT_LIMITS, ArchiveLimits
from steptune.service.connections import storage_errors
from steptune.service.secret_names import holds_secret, is_secret_file
from steptune.tuner.errors import WorkloadNotFoundError, WorkloadRejectedError

LEFT_OUT = frozenset({"__pycache__", "node_modules", "venv", "env", "build", "dist", "steptune-results"})
"""Names of folders with caches and results, which are left out, as is everything hidden (`.git`, `.venv`, …)."""
_DATABASE = "steptune.db"
"""Name of the database of studies that commands run. It is left out, with the files that SQLite keeps in the same
folder, because it is private and changes with every study.
"""
_LEFT_OUT_SUFFIXES = (".pyc", ".pyo", ".egg-info")


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Files that an archive contains, and files that were left out.

    Attributes:
        files: Paths within the folder.
        left_out: Paths of files and folders: hidden, caches, links, the database of the folder's own studies.
    """

    files: tuple[str, ...]
    left_out: tuple[str, ...]


SCRIPT_LIMITS = ArchiveLimits(members=2_000, total_bytes=16 << 20, file_bytes=1 << 20)
"""Maximum number and sizes of a script's source files; a larger file counts as data."""
_SOURCES = frozenset(
    {".py", ".pyi", ".pyx", ".sh", ".toml", ".yaml", ".yml", ".json", ".cfg", ".ini", ".txt", ".jinja", ".c", ".cpp"}
    | {".cu", ".cuh", ".h", ".hpp"}
)


def is_source(path: Path) -> bool:
    """Say whether a file is one of a script's own sources: not data, and without a name that suggests a secret."""
    return path.suffix in _SOURCES and path.stat().st_size <= SCRIPT_LIMITS.file_bytes and not is_secret_file(path)


def check_source(path: Path) -> None:
    """Refuse to send a source that contains a secret.

    Raises:
        WorkloadRejectedError: The source has a private key, an address with a password, or a token.
        StoreError: The source cannot be read.
    """
    with storage_errors(str(path)):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        if holds_secret(line):
            raise WorkloadRejectedError(
                f"{path}, line {number}, looks like a key, a token or a password, but uploaded files are stored with "
                "the study: let the script read it from a file that the worker has"
            )


def python_sources(folder: Path) -> list[Path]:
    """Return the Python files of a script's folder that would be uploaded; files of environments and caches are left
    out.
    """
    return [path for path in _files(folder, folder, [], is_source) if path.suffix == ".py"]


def pack(
    folder: Path,
    target: Path,
    limits: ArchiveLimits = DEFAULT_LIMITS,
    *,
    wanted: Callable[[Path], bool] = lambda path: True,
    beside: Mapping[str, bytes] | None = None,
) -> Packed:
    """Write a folder's files into a tar.gz; its bytes do not depend on times, owners or the order in the file system.

    Args:
        wanted: Filter of its files and folders.
        beside: Contents of further files.

    Raises:
        WorkloadNotFoundError: There is no such folder.
        WorkloadRejectedError: The folder is larger than the service unpacks, or is empty.
        StoreError: A file cannot be read, or the archive cannot be written.
    """
    if not folder.is_dir():
        raise WorkloadNotFoundError(f"{folder} is not a folder")
    left_out: list[str] = []
    files = [path.relative_to(folder).as_posix() for path in _files(folder, folder, left_out, wanted)]
    _check_size(folder, files, limits)
    with (
        storage_errors(str(folder)),
        target.open("wb") as sink,
        gzip.GzipFile("", "wb", 6, sink, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name in files:
            path = folder / name
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                member = tarfile.TarInfo(name)
                member.size, member.mode = status.st_size, 0o755 if status.st_mode & 0o100 else 0o644
                tar.addfile(member, file)
        for name, content in (beside or {}).items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return Packed(files=tuple(files), left_out=tuple(left_out))


def _files(root: Path, folder: Path, left_out: list[str], wanted: Callable[[Path], bool]) -> Iterator[Path]:
    with storage_errors(str(folder)):
        entries = sorted(folder.iterdir())
    for path in entries:
        hidden = path.name.startswith((".", _DATABASE)) or path.name.endswith(_LEFT_OUT_SUFFIXES)
        if path.is_symlink() or hidden or (path.name in LEFT_OUT and path.is_dir()):
            left_out.append(path.relative_to(root).as_posix())
        elif path.is_dir():
            yield from _files(root, path, left_out, wanted)
        elif path.is_file() and wanted(path):
            yield path
        else:
            left_out.append(path.relative_to(root).as_posix())


def _check_size(folder: Path, files: list[str], limits: ArchiveLimits) -> None:
    if not files:
        raise WorkloadRejectedError(f"{folder} has no files to send")
    if len(files) > limits.members:
        raise WorkloadRejectedError(
            f"{folder} has {len(files):,} files, but the service unpacks at most {limits.members:,}: send fewer"
        )
    sizes = {name: (folder / name).stat().st_size for name in files}
    largest = max(sizes, key=sizes.__getitem__)
    if sizes[largest] > limits.file_bytes:
        raise WorkloadRejectedError(
            f"{folder / largest} has {sizes[largest]:,} bytes, but a file may have at most {limits.file_bytes:,}: "
            "leave data where workers can read it"
        )
    if sum(sizes.values()) > limits.total_bytes:
        raise WorkloadRejectedError(
            f"{folder} has {sum(sizes.values()):,} bytes, but the service unpacks at most {limits.total_bytes:,}: "
            "leave data "
            "where workers can read it"
        )
