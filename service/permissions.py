"""Permissions of the service's files: only the service's own user may read them.

Rows hold what users submitted and hashes of their tokens, artifacts hold their code. Trials may run on the same machine
as users of their own, and pass through the data directory to their study's folder; they read nothing else there.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy.engine import make_url

from steptune.service.isolation.users import can_change_user
from steptune.service.settings import Settings

UMASK = 0o077
PRIVATE_FILE, PRIVATE_FOLDER, PASSABLE_FOLDER = 0o600, 0o700, 0o711
DATABASE_FILES = ("", "-wal", "-shm", "-journal")


def keep_private(settings: Settings) -> None:
    """Deny other users access to the files that this process will create, and to the existing database and folders."""
    os.umask(UMASK)
    for path in _database_files(settings):
        _close(path, PRIVATE_FILE)
    studies = settings.data_directory / "studies"
    studies.mkdir(parents=True, exist_ok=True)
    for folder in (*_folders(settings), *studies.iterdir()):
        _close(folder, PRIVATE_FOLDER)
    for folder in (settings.data_directory, studies):
        _close(folder, PASSABLE_FOLDER, needed=0o001 if can_change_user() else 0)


def mend(settings: Settings) -> int:
    """Restrict access to all files that the service has stored so far; return how many files and folders were open to
    others.
    """
    keep_private(settings)
    return sum(_close(path, PRIVATE_FOLDER) for path in _everything(settings))


def _database_files(settings: Settings) -> list[Path]:
    url = make_url(settings.database_url)
    if url.get_backend_name() != "sqlite" or not url.database or url.database.startswith((":", "file:")):
        return []
    path = Path(url.database).expanduser().absolute()
    return [path.with_name(path.name + ending) for ending in DATABASE_FILES]


def _folders(settings: Settings) -> list[Path]:
    """Return the folders that no trial needs to enter."""
    own = [settings.data_directory / name for name in ("artifacts", "uploads", "hardware", "worker_studies")]
    place = settings.artifacts_url
    if place is not None and ("://" not in place or place.startswith("file://")):
        own.append(Path(place.removeprefix("file://")).expanduser())
    return own


def _everything(settings: Settings) -> Iterator[Path]:
    for top in (*_folders(settings), *(settings.data_directory / "studies").glob("*")):
        yield top
        for folder, folders, files in os.walk(top):
            yield from (Path(folder) / name for name in (*folders, *files))


def _close(path: Path, mode: int, *, needed: int = 0) -> bool:
    """Remove permissions beyond `mode` from a file or folder of ours; return whether there were any."""
    try:
        status = path.lstat()
    except OSError:
        return False
    wanted = status.st_mode & 0o7000 | (status.st_mode & mode) | needed
    changes = stat.S_IMODE(status.st_mode) != wanted
    if changes and status.st_uid == os.geteuid() and not stat.S_ISLNK(status.st_mode):
        path.chmod(wanted)
        return True
    return False
