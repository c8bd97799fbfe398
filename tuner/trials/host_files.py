"""Transfer of a study's files between hosts that have no common file system.

The driver sends what its ranks share (`StudyFiles`) before a job begins, as far as it has changed; a host sends back
the output and the traces of its ranks once they have ended.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from steptune.tuner.errors import RunnerError
from steptune.tuner.trials.host_link import CHUNK_BYTES, Put
from steptune.tuner.trials.study_files import StudyFiles

OF_ONE_HOST = ("logs", "trials", "compile_cache", "compiler_headers")
"""Folders with files that no other host's ranks read."""
MAX_LOG_BYTES = 16 << 20
"""Maximum bytes of a job's log that a host sends; they are taken from the log's end."""
Version = tuple[int, int]


def changed(directory: Path, sent: dict[str, Version]) -> Iterator[Put]:
    """Yield the files that another host lacks, and record them in `sent`. Follow links only to files in the directory.

    Raises:
        RunnerError: A link leads elsewhere, or to a folder.
    """
    found = {path.relative_to(directory).as_posix(): path for path in _files(directory)}
    for name in [name for name in sent if name not in found]:
        del sent[name]
        yield Put(path=name, removed=True)
    for name, path in found.items():
        try:
            version = _version(path)
            if sent.get(name) != version:
                yield from parts(path, name)
                sent[name] = version
        except FileNotFoundError:  # of a rank that was writing it
            continue


def _files(directory: Path) -> Iterator[Path]:
    for folder, names, files in os.walk(directory):
        here = Path(folder)
        if here == directory:
            names[:] = [name for name in names if name not in OF_ONE_HOST]
        for name in (*names, *files):
            path = here / name
            with contextlib.suppress(FileNotFoundError):  # of a rank that has removed it
                mode = path.lstat().st_mode
                if stat.S_ISLNK(mode):
                    mode = _target(directory, path).stat().st_mode
                if stat.S_ISREG(mode):
                    yield path


def _target(directory: Path, link: Path) -> Path:
    target = link.resolve(strict=True)
    if not target.is_relative_to(directory.resolve()) or not target.is_file():
        raise RunnerError(
            f"{link} is a link to {target}, but only links to files inside {directory} are copied to the other "
            "hosts: copy the target into this folder, or let the workload open a path that exists on every host"
        )
    return target


def _version(path: Path) -> Version:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def parts(path: Path, name: str, last_bytes: int | None = None) -> Iterator[Put]:
    """Yield a file in parts.

    Args:
        last_bytes: Maximum bytes, from the end of the file.
    """
    with path.open("rb") as file:
        if last_bytes is not None:
            file.seek(max(0, file.seek(0, os.SEEK_END) - last_bytes))
        first, data = True, file.read(CHUNK_BYTES)
        while True:
            following = file.read(CHUNK_BYTES)
            yield Put(path=name, data=data, first=first, last=not following)
            if not following:
                return
            first, data = False, following


def of_job(files: StudyFiles, job: str, log: str) -> Iterator[tuple[Path, Iterator[Put]]]:
    """Yield the files that the ranks of a job left on this host; each comes with its parts."""
    path = files.logs / log
    if log and path.is_file():
        yield path, parts(path, f"logs/{log}", MAX_LOG_BYTES)
    folder = files.trial_directory(job)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if stat.S_ISREG(path.lstat().st_mode):
            yield path, parts(path, f"trials/{job}/{path.name}")


def place_of(directory: Path, name: str, folders: tuple[str, ...] = ()) -> Path:
    """Return the local path for a file that another host sends.

    Raises:
        RunnerError: The path is outside of the study's directory, or of the folders.
    """
    path = PurePosixPath(name)
    inside = not path.is_absolute() and ".." not in path.parts and path.parts
    if not inside or (folders and path.parts[0] not in folders):
        raise RunnerError(f"another host sent a file that does not belong to the study: {name!r}")
    return directory / path


def put(directory: Path, part: Put) -> None:
    """Write a part of one of the study's files; the last part completes the file.

    Raises:
        RunnerError: The file does not belong to the study, or cannot be written.
    """
    path = place_of(directory, part.path)
    with _typed(path):
        if part.removed:
            path.unlink(missing_ok=True)
        else:
            _write(path, part)


def take_back(directory: Path, part: Put, host: int) -> Path:
    """Write a part of a file that a host's ranks left, and return the path; a log is appended to the driver's own.

    Raises:
        RunnerError: The file does not belong to the study, exists already, or cannot be written.
    """
    path = place_of(directory, part.path, ("logs", "trials"))
    with _typed(path):
        if path.parent.name != "logs":
            if part.first and path.exists():
                raise RunnerError(f"host {host} sent a file that already exists here: {part.path!r}")
            _write(path, part)
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            if part.first:
                file.write(f"--- host {host} ---\n".encode())
            file.write(part.data)
    return path


def _write(path: Path, part: Put) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    incomplete = path.with_name(f"{path.name}.incoming")
    with incomplete.open("wb" if part.first else "ab") as file:
        file.write(part.data)
    if part.last:
        incomplete.rename(path)


@contextlib.contextmanager
def _typed(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunnerError(
            f"{path} cannot be written ({error.strerror}): free disk space or grant write permission, then run "
            "`steptune resume` on all hosts to continue"
        ) from None
