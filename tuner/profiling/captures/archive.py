"""Archive (`.zip`) of traces, one per rank, unpacked into a folder of the process.

An archive's own metadata is not trusted: names become file names without folders, and sizes are counted while
unpacking. So nothing is written outside of the folder, and a small archive cannot fill a disk.
"""

from __future__ import annotations

import atexit
import lzma
import shutil
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from steptune.tuner.profiling.trace import TraceError

MOST_MEMBERS = 4096
MOST_BYTES = 8 << 30
MOST_RATIO = 200
"""Maximum compression ratio: JSON traces compress 10 to 30 times."""
FREE_BYTES = 100 << 20
"""Unpacked size, in bytes, that is always allowed, whatever the compression ratio of the archive."""
BLOCK_BYTES = 1 << 20
DAMAGED = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, RuntimeError),
    *(OSError, UnicodeDecodeError),
)
"""Errors raised when a damaged archive is unpacked. A system error can mean damage in bzip2, too long a name, or a full
disk.
"""


def unpacked(path: Path, suffixes: Collection[str]) -> list[Path]:
    """Unpack the files of an archive that have these suffixes; they are removed when the process ends.

    Raises:
        TraceError: The archive is damaged, encrypted, holds no such file, or unpacks to too much.
    """
    folder = Path(tempfile.mkdtemp(prefix="steptune-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        with zipfile.ZipFile(path) as archive:
            members = [member for member in archive.infolist() if _is_wanted(member, suffixes)]
            if len(members) > MOST_MEMBERS:
                raise TraceError(
                    f"{path} holds {len(members):,} files, more than the limit of {MOST_MEMBERS:,}: pack one "
                    "trace per rank"
                )
            return _unpack(path, archive, members, folder)
    except DAMAGED as error:
        raise TraceError(f"{path} cannot be unpacked ({error}): pack it again, without a password") from None


def _is_wanted(member: zipfile.ZipInfo, suffixes: Collection[str]) -> bool:
    """Say whether a member is a trace file, not a folder, a link, or metadata that macOS adds."""
    is_link = stat.S_ISLNK(member.external_attr >> 16)
    parts = PurePosixPath(member.filename).parts
    return not (member.is_dir() or is_link or "__MACOSX" in parts) and member.filename.endswith(tuple(suffixes))


def _unpack(path: Path, archive: zipfile.ZipFile, members: list[zipfile.ZipInfo], folder: Path) -> list[Path]:
    left = min(MOST_BYTES, max(FREE_BYTES, MOST_RATIO * path.stat().st_size))
    files = []
    # Ranks may have one name in folders of their own; tables of one rank lie side by side.
    folders: dict[PurePosixPath, Path] = {}
    for member in members:
        inside = PurePosixPath(member.filename.replace("\\", "/"))
        inner = folders.setdefault(inside.parent, folder / str(len(folders)))
        inner.mkdir(exist_ok=True)
        target = inner / inside.name
        with archive.open(member) as source, target.open("wb") as file:
            while block := source.read(BLOCK_BYTES):
                left -= len(block)
                if left < 0:
                    raise TraceError(
                        f"{path} unpacks to more than {MOST_BYTES >> 30} GiB or {MOST_RATIO} times its size, which "
                        "traces never do: if you trust the archive, unpack it and give the folder"
                    )
                file.write(block)
        files.append(target)
    return files
