"""Users for trials of a process that runs as root: one for each study, while it runs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from steptune.tuner.errors import IsolationUnavailable

FIRST_UID, LAST_UID = 61184, 65519
"""systemd's range for users that exist while something runs; no account has one of them."""


@contextlib.contextmanager
def own_user() -> Iterator[int]:
    """A user id that no other study on this machine has; its processes are gone at the end.

    The lock of a file says that it is taken, and is released by whatever death.
    """
    folder = Path(tempfile.gettempdir()) / "steptune-users"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != 0:
        raise IsolationUnavailable(f"{folder} belongs to somebody else: remove it")
    for uid in range(FIRST_UID, LAST_UID + 1):
        descriptor = os.open(folder / str(uid), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        try:
            kill_all_of(uid)  # left by one who was killed
            yield uid
        finally:
            kill_all_of(uid)
            os.close(descriptor)
        return
    raise IsolationUnavailable(f"all users from {FIRST_UID} to {LAST_UID} are taken: end some studies")


def become(uid: int) -> tuple[str, ...]:
    """The command under which another command is that user's, without any capability, for good."""
    return (
        *("setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups"),
        *("--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", "--"),
    )


def kill_all_of(uid: int) -> None:
    """Kills every process of a user at one stroke: only one of the same user can do that."""
    command = [*become(uid), "/bin/sh", "-c", "kill -9 -1"]
    subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def give(directory: Path, uid: int) -> None:
    """Makes a user the owner of a directory and of all that is in it, without following any link.

    A file with several names may be somebody else's too, and is left alone.
    """
    os.chown(directory, uid, uid, follow_symlinks=False)
    for _, folders, files, descriptor in os.fwalk(directory, follow_symlinks=False):
        for name in (*folders, *files):
            status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            if status.st_uid != uid and (name in folders or status.st_nlink == 1):
                os.chown(name, uid, uid, dir_fd=descriptor, follow_symlinks=False)


def closed_to_others(path: Path) -> Path | None:
    """The part of a path that an ordinary user cannot pass or read; None if there is none."""
    for folder in reversed(path.parents):
        if not folder.stat().st_mode & 0o001:
            return folder
    return None if open_to_others(path) else path


def open_to_others(path: Path) -> bool:
    """Whether an ordinary user who got as far as this can read it."""
    wanted = 0o005 if path.is_dir() else 0o004
    return path.stat().st_mode & wanted == wanted
