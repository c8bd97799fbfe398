"""Temporary directory for everything that runs under one trial server.

Processes that are killed cannot remove their temporary files (Python's loader workers leave a
directory with a socket each), and killing is how trials end here. So they get a directory of their
own as TMPDIR, which is removed as a whole: by the server when it ends, by the parent when the server could not, and,
where both were killed, by the next start of any study.

Segments of shared memory cannot be put there: a process that is killed while it sends a batch leaves the segment's name
behind, with its own id in it. So every process under the server notes its id in the directory, and what the noted ones
left goes with it.

A directory is in use as long as a process holds the lock on the file in it. The lock belongs to the
open file, which the server and its forked ranks inherit: it is free when the last of them is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "steptune-"
LOCK = "in-use"
SHARED_MEMORY = Path("/dev/shm")
GONE = ".gone"
FORKED = "forked"
"""Folder with one file per process forked under the server; the process id is the file's name."""
MAX_BASE_LENGTH = 55
"""Maximum length of the directory's path. A socket's path may have 107 bytes, of which loader workers' file names take
50.
"""


class Scratch:
    """Temporary directory with a lock. Abandoned directories are removed before it is created.

    Args:
        user: Name of the user inside the sandbox, as in its environment; None for ours.
    """

    def __init__(self, user: str | None = None) -> None:
        base = _base()
        remove_abandoned(base)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        unlocked = self.path / f"{LOCK}.new"
        self._descriptor = os.open(unlocked, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        unlocked.rename(self.path / LOCK)  # whoever sees it sees it locked
        self._share_headers(user)

    def fileno(self) -> int:
        return self._descriptor

    def _share_headers(self, user: str | None) -> None:
        """Link torch.compile's precompiled headers into the directory. Making them takes half a minute, but they are
        the same for every program. Torch keeps them under the temporary directory, in a folder named after the user.
        """
        with contextlib.suppress(KeyError, OSError):
            shared = Path(tempfile.gettempdir()).absolute() / _headers_of(getpass.getuser())
            shared.mkdir(exist_ok=True)
            (self.path / _headers_of(user or getpass.getuser())).symlink_to(shared)

    def give_to(self, uid: int, headers: Path | None) -> None:
        """Give another user write access to the directory. Replace the links in it to shared precompiled headers by
        links to that user's headers; if that user has none, only remove the links.
        """
        os.chown(self.path, uid, uid)
        for link in self.path.glob("torchinductor_*"):
            link.unlink()
            if headers is not None:
                link.symlink_to(headers)

    def close(self) -> None:
        """Remove the directory and its contents."""
        remove(self.path)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _headers_of(user: str) -> str:
    """Return the name of the folder that torch makes for a user in the temporary directory."""
    return "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user)


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """Provide a temporary directory while the context is active. If its process is killed, the next process that makes
    such a directory removes it.
    """
    scratch = Scratch()
    try:
        scratch.path.chmod(0o755)  # what is isolated may run as another user
        yield scratch.path
    finally:
        scratch.close()


def note_forks(scratch: Path) -> None:
    """From now on, make every forked process and its descendants first record their process ids in the directory."""
    folder = scratch / FORKED
    folder.mkdir()

    def note() -> None:
        with contextlib.suppress(OSError):  # the directory goes before an orphan does
            (folder / str(os.getpid())).touch()

    os.register_at_fork(after_in_child=note)


def _remove_segments(folder: Path) -> None:
    """Remove the shared-memory segments that torch made in the processes recorded in a folder, once they have ended."""
    with contextlib.suppress(OSError):
        makers = {file.name: file.stat().st_uid for file in folder.iterdir()}
        for segment in SHARED_MEMORY.glob("torch_*"):
            maker = segment.name.split("_")[1]
            if segment.lstat().st_uid == makers.get(maker) and not _runs(int(maker)):
                segment.unlink()


def _runs(pid: int) -> bool:
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def remove(path: Path) -> None:
    """Remove a directory and the segments recorded in it. If this is interrupted, the directory's new name marks it for
    removal.
    """
    _remove_segments(path / FORKED)
    gone = path.with_name(path.name + GONE)
    with contextlib.suppress(OSError):
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def empty_temporary(*, shared_memory: bool) -> None:
    """Remove a trial's files from the temporary directory, if this is the server's own directory.

    Links stay, such as that to the precompiled headers. So do files of other users, and mount points: a study's
    directory may be one.

    Args:
        shared_memory: Whether shared memory is the server's own, too, and is emptied as well.
    """
    for folder in {Path(tempfile.gettempdir()), *([SHARED_MEMORY] if shared_memory else [])}:
        with contextlib.suppress(OSError, RecursionError):  # nested too deep: the limits of the file system hold
            _empty(folder, folder.stat().st_dev)


def _empty(folder: Path, device: int) -> None:
    for path in folder.iterdir():
        status = path.lstat()
        if (
            stat.S_ISLNK(status.st_mode)
            or path.name == LOCK
            or (status.st_uid, status.st_dev) != (os.geteuid(), device)
        ):
            continue
        with contextlib.suppress(OSError):
            if stat.S_ISDIR(status.st_mode):
                path.chmod(0o700)
                _empty(path, device)
                path.rmdir()
            else:
                path.unlink()


def remove_abandoned(base: Path) -> None:
    """Remove directories of processes that were killed; directories of other users are left alone."""
    for lock in base.glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError):
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove(lock.parent)
            finally:
                os.close(descriptor)
    for path in base.glob(f"{PREFIX}*{GONE}"):
        shutil.rmtree(path, ignore_errors=True)


def _base() -> Path:
    usual = Path(tempfile.gettempdir())
    short = Path("/tmp")
    too_long = len(os.fsencode(usual)) > MAX_BASE_LENGTH
    return short if too_long and os.access(short, os.W_OK | os.X_OK) else usual
