"""Unpacking of untrusted uploaded archives: only plain files are written, all of them below one new folder.

Sizes in headers are only claims: bytes are counted as they are unpacked, and unpacking ends at the limits. Members are
looked at one by one and written by this module, never by the archive library; whatever is refused leaves nothing
behind.
"""

from __future__ import annotations

import ast
import bz2
import gzip
import lzma
import mmap
import os
import re
import shutil
import stat
import tarfile
import unicodedata
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, NoReturn

from steptune.service.connections import FULL_ERRNOS
from steptune.tuner.errors import ArchiveRefusedError, StorageFullError, WorkloadRejectedError

_CHUNK_BYTES = 1 << 16
_FREE_RATIO_BYTES = 1 << 20
"""Unpacked size in bytes above which the compression ratio is limited. Less data may compress a thousandfold without
harm.
"""
_MAGIC = ((b"PK\x03\x04", "zip"), (b"PK\x05\x06", "zip"), (b"\x1f\x8b", "gz"), (b"\xfd7zXZ\x00", "xz"), (b"BZh", "bz2"))
_MAX_HEADER_BYTES = 1 << 20
_CENTRAL_ENTRY = re.compile(rb"PK\x01\x02")
MAX_SOURCE_BYTES = 1 << 18
"""Maximum bytes of one Python file that is parsed. Parsing a larger one would take seconds, and hundreds of times its
size in memory.
"""
MAX_SEARCHED_BYTES = 1 << 21
"""Maximum bytes of all Python files of one archive that is searched for a workload."""


@dataclass(frozen=True, kw_only=True)
class ArchiveLimits:
    """Limits on the unpacked content of an archive.

    Attributes:
        members: Maximum number of files and folders.
        total_bytes: Maximum bytes of all files together.
        file_bytes: Maximum bytes of one file.
        ratio: Maximum unpacked bytes per packed byte, once more than a megabyte has come out.
        depth: Maximum depth of nested folders.
        name_bytes: Maximum bytes of a whole path, in UTF-8. A part of it may have 255.
    """

    members: int = 10_000
    total_bytes: int = 1 << 30
    file_bytes: int = 1 << 29
    ratio: float = 200.0
    depth: int = 24
    name_bytes: int = 1024


DEFAULT_LIMITS = ArchiveLimits()


@dataclass(frozen=True, kw_only=True)
class Unpacked:
    """Result of unpacking an archive."""

    root: Path
    num_files: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class _Member:
    """A file or a folder of an archive; `content` can be read once, before the next member."""

    name: str
    is_folder: bool
    executable: bool
    content: IO[bytes] | None


def unpack(archive: Path, target: Path, limits: ArchiveLimits = DEFAULT_LIMITS) -> Unpacked:
    """Unpack a tar (plain, gzip, xz, bzip2) or zip archive.

    Args:
        archive: The file; its format is detected from its content.
        target: A folder that does not exist yet. It does not exist after a refusal either.

    Raises:
        ArchiveRefusedError: `rule` names what was violated, with `value` and `limit`.
        StorageFullError: The disk is full.
    """
    target.mkdir()
    try:
        target.chmod(0o755)
        writer = _Writer(target, limits, packed_bytes=archive.stat().st_size)
        for member in _members(archive, limits):
            writer.write(member)
        return Unpacked(root=target, num_files=writer.num_files, total_bytes=writer.total_bytes)
    except BaseException as error:
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in FULL_ERRNOS:
            raise StorageFullError(f"{target} cannot be written: {error.strerror}; free space") from None
        raise


class _Writer:
    """Writer that unpacks an archive's members below a folder, and counts them against the limits."""

    def __init__(self, root: Path, limits: ArchiveLimits, *, packed_bytes: int) -> None:
        self._root = root
        self._limits = limits
        self._packed_bytes = max(1, packed_bytes)
        self._seen: dict[str, bool] = {}
        """Paths so far, each mapped to True if it is a folder; normalised as on a file system that ignores case and
        Unicode composition.
        """
        self.num_files = 0
        self.total_bytes = 0

    def write(self, member: _Member) -> None:
        parts = checked_parts(member.name, self._limits)
        if not parts:
            if not member.is_folder:
                _refuse("name", shown(member.name), None, "a file has no name")
            return  # "./", with which tar begins
        self._enter(member, parts)
        path = self._root.joinpath(*parts)
        for folder in [*reversed(path.parents), path][len(self._root.parents) + 1 :]:
            if (folder != path or member.is_folder) and not folder.is_dir():
                folder.mkdir()
                folder.chmod(0o755)
        if member.is_folder:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            self._copy(member, file)
            os.fchmod(file.fileno(), 0o755 if member.executable else 0o644)
        self.num_files += 1

    def _enter(self, member: _Member, parts: tuple[str, ...]) -> None:
        """Record a path and the folders above it. Refuse a second member of the same name, because the order of the
        members would decide the content.
        """
        keys = [_folded("/".join(parts[: n + 1])) for n in range(len(parts))]
        for key in keys[:-1]:
            if not self._seen.setdefault(key, True):
                _refuse("duplicate", member.name, None, "a path leads through a file instead of a folder")
        if keys[-1] in self._seen and not (member.is_folder and self._seen[keys[-1]]):
            _refuse("duplicate", member.name, None, "two entries have the same name")
        self._seen[keys[-1]] = member.is_folder
        if len(self._seen) > self._limits.members:
            _refuse("members", len(self._seen), self._limits.members, "it has too many files and folders")

    def _copy(self, member: _Member, file: IO[bytes]) -> None:
        limits, size = self._limits, 0
        assert member.content is not None
        while chunk := _chunk(member.content):
            size += len(chunk)
            self.total_bytes += len(chunk)
            ratio = self.total_bytes / self._packed_bytes
            if size > limits.file_bytes:
                _refuse("file_bytes", size, limits.file_bytes, f"{shown(member.name)} is too large")
            if self.total_bytes > limits.total_bytes:
                _refuse("total_bytes", self.total_bytes, limits.total_bytes, "it unpacks to too many bytes")
            if self.total_bytes > _FREE_RATIO_BYTES and ratio > limits.ratio:
                _refuse("ratio", round(ratio), limits.ratio, "its compression ratio is too high")
            file.write(chunk)


def checked_parts(name: str, limits: ArchiveLimits) -> tuple[str, ...]:
    """Split a member's path into parts, and refuse it if it leads outside the folder to which it is unpacked.

    Raises:
        ArchiveRefusedError: The path leads elsewhere, or has a name that no file system should have.
    """
    if any(unicodedata.category(character) in ("Cc", "Cs", "Cf") for character in name) or "\\" in name:
        _refuse("name", shown(name), None, "a name has control characters or backslashes")
    size = len(name.encode())
    if size > limits.name_bytes or any(len(part.encode()) > 255 for part in name.split("/")):
        _refuse("name_bytes", size, limits.name_bytes, f"the name {shown(name)} is too long")
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or (path.parts and path.parts[0].endswith(":")):
        _refuse("traversal", shown(name), None, "a name refers to a place outside the archive's folder")
    if len(path.parts) > limits.depth:
        _refuse("depth", len(path.parts), limits.depth, f"{shown(name)} is nested too deeply")
    return path.parts


def _members(archive: Path, limits: ArchiveLimits) -> Iterator[_Member]:
    kind = _kind(archive)
    if kind == "zip":
        yield from _zip_members(archive, limits)
    else:
        yield from _tar_members(archive, kind)


def _kind(archive: Path) -> str:
    with archive.open("rb") as file:
        head = file.read(512)
    found = next((kind for magic, kind in _MAGIC if head.startswith(magic)), None)
    if found is None and head[257:262] == b"ustar":
        found = "tar"
    if found is None:
        _refuse("format", head[:8].hex(" "), None, "it is not a tar, tar.gz, tar.xz, tar.bz2 or zip archive")
    return found


def _tar_members(archive: Path, kind: str) -> Iterator[_Member]:
    """Yield the members of a tar archive, read as a stream: nothing is read twice, and a decompression bomb is unpacked
    only as far as it is read.
    """
    with _readable(), _decompressed(archive, kind) as opened:
        stream = _Headers(opened)
        tar = tarfile.open(fileobj=stream, mode="r|")  # type: ignore[call-overload]  # noqa: SIM115
        while (info := stream.next_member(tar)) is not None:
            if info.issym() or info.islnk():
                _refuse("link", shown(info.name), None, f"it contains a link to {shown(info.linkname)}")
            if not (info.isfile() or info.isdir()) or info.issparse():
                _refuse(
                    "special", shown(info.name), None, "it contains an entry that is neither a plain file nor a folder"
                )
            content = tar.extractfile(info) if info.isfile() else None
            yield _Member(name=info.name, is_folder=info.isdir(), executable=bool(info.mode & 0o100), content=content)


class _Headers:
    """Stream that limits the bytes read for headers: extended headers can hold names of any length."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._left: int | None = _MAX_HEADER_BYTES

    def next_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo | None:
        """Return the next header; the content before it must have been read."""
        tar.members = []  # type: ignore[attr-defined]  # tarfile keeps every header that it has seen
        self._left = _MAX_HEADER_BYTES
        try:
            return tar.next()
        finally:
            self._left = None

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        if self._left is not None:
            self._left -= len(data)
            if self._left < 0:
                _refuse("header_bytes", _MAX_HEADER_BYTES - self._left, _MAX_HEADER_BYTES, "a header is too large")
        return data


@contextmanager
def _decompressed(archive: Path, kind: str) -> Iterator[IO[bytes]]:
    openers: dict[str, Callable[..., Any]] = {"gz": gzip.open, "xz": lzma.open, "bz2": bz2.open, "tar": open}
    with openers[kind](archive, "rb") as opened:
        yield opened


def _zip_members(archive: Path, limits: ArchiveLimits) -> Iterator[_Member]:
    _count_zip_members(archive, limits)
    with _readable(), zipfile.ZipFile(archive) as file:
        for info in file.infolist():
            mode = info.external_attr >> 16
            kind = stat.S_IFMT(mode)
            if stat.S_ISLNK(mode):
                _refuse("link", shown(info.filename), None, "it contains a link")
            if kind and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                _refuse(
                    "special",
                    shown(info.filename),
                    None,
                    "it contains an entry that is neither a plain file nor a folder",
                )
            if info.flag_bits & 1:
                _refuse("encrypted", shown(info.filename), None, "it contains an encrypted file")
            if info.is_dir():
                yield _Member(name=info.filename, is_folder=True, executable=False, content=None)
                continue
            with file.open(info) as content:
                yield _Member(name=info.filename, is_folder=False, executable=bool(mode & 0o100), content=content)


def _count_zip_members(archive: Path, limits: ArchiveLimits) -> None:
    """Check the number of a zip's members before its central directory is loaded: loading takes memory for each entry,
    and the count in the header cannot be trusted.
    """
    with archive.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for number, _ in enumerate(_CENTRAL_ENTRY.finditer(content), 1):
            if number > limits.members:
                _refuse("members", number, limits.members, "it has too many files and folders")


def _chunk(content: IO[bytes]) -> bytes:
    with _readable():
        return content.read(_CHUNK_BYTES)


@contextmanager
def _readable() -> Iterator[None]:
    """Convert the many errors that libraries raise on damaged archives into one that says "damaged"."""
    try:
        yield
    except (ArchiveRefusedError, GeneratorExit, MemoryError):
        raise
    except Exception as error:
        said = str(error) or type(error).__name__
        raise ArchiveRefusedError(f"the archive cannot be read: {shown(said)}", rule="damaged", value=said) from None


def _refuse(rule: str, value: object, limit: object, what: str) -> NoReturn:
    allowed = "" if limit is None else f" ({value}; at most {limit} allowed)"
    raise ArchiveRefusedError(
        f"the archive is refused: {what}{allowed}. An archive may contain only plain files and folders with "
        "plain names",
        rule=rule,
        value=value,
        limit=limit,
    )


def shown(name: str) -> str:
    """Return a name that is safe to show: short, and without control characters."""
    text = ascii(name[:80])
    return f"{text}..." if len(name) > 80 else text


def _folded(path: str) -> str:
    return unicodedata.normalize("NFC", path).casefold()


def find_workloads(root: Path) -> list[str]:
    """Return references to classes that look like workloads, without running any code: `folder/train.py:MyWorkload`,
    relative to the root.

    A class counts if it derives from a class that is called a Workload, or has a model, a dataset and a loss.

    Raises:
        WorkloadRejectedError: There is too much to parse.
    """
    found = []
    for path in _searched(root):
        found += [f"{path.relative_to(root)}:{name}" for name in _workload_classes(path)]
    return found


def check_source_size(path: Path, name: str) -> None:
    """Refuse a Python file that is too large to be parsed.

    Raises:
        WorkloadRejectedError: The file, which is called `name`, is too large to be parsed.
    """
    size = path.stat().st_size
    if size > MAX_SOURCE_BYTES:
        raise WorkloadRejectedError(
            f"{shown(name)} has {size:,} bytes, but a file with a workload may have at most "
            f"{MAX_SOURCE_BYTES:,}: move data or other code to other files, and upload all of them as an archive"
        )


def _searched(root: Path) -> list[Path]:
    """Return all Python files below a folder, sorted by path."""
    paths = [path for path in sorted(root.rglob("*.py")) if path.is_file()]
    sizes = [path.stat().st_size for path in paths]
    total, largest = sum(sizes), max(sizes, default=0)
    if largest > MAX_SOURCE_BYTES:
        name = shown(str(paths[sizes.index(largest)].relative_to(root)))
        raise _too_much(f"{name} has {largest:,}", MAX_SOURCE_BYTES)
    if total > MAX_SEARCHED_BYTES:
        raise _too_much(f"its Python files have {total:,}", MAX_SEARCHED_BYTES)
    return paths


def _too_much(what: str, limit: int) -> WorkloadRejectedError:
    return WorkloadRejectedError(
        f"{what} bytes, but the search for a workload reads at most {limit:,}: name the workload with `entry`, "
        "like train.py:MyWorkload"
    )


def _workload_classes(path: Path) -> list[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef) and _is_workload(node)]


def _is_workload(node: ast.ClassDef) -> bool:
    methods = {member.name for member in node.body if isinstance(member, ast.FunctionDef)}
    return any(_last_name(base).endswith("Workload") for base in node.bases) or {"model", "dataset", "loss"} <= methods


def _last_name(base: ast.expr) -> str:
    """Return the last part of a base class's name, such as `Name` of `a.b.Name`. Only this part is read, because the
    expression may be nested too deeply for recursion.
    """
    if isinstance(base, ast.Attribute):
        return base.attr
    return base.id if isinstance(base, ast.Name) else ""
