"""Separate users for trials, if this process may change its user: each study has a user of its own while it runs.

That process is root, or it has the four capabilities below and no other, as in a container. Without the capability to
bypass permissions, it reads what trials write as a member of the files' group. It takes files back in two steps: the
trials' user opens all of its files to that group, and this process then changes their owner.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from steptune.tuner.errors import IsolationUnavailableError
from steptune.tuner.trials.as_user import DisturbedError, run_as
from steptune.tuner.trials.shared_places import SHARED_PLACES

FIRST_UID, LAST_UID = 61184, 65519
"""First and last user id for studies: systemd's range for transient users; no account has one of them."""
STRIDE = 61
"""Distance between the user ids that two workers try first, if the workers' own user ids are consecutive. Such workers
do not see each other's locks, so they must begin with different ids.
"""
CHOWN, KILL, SETGID, SETUID, SETPCAP, SYS_ADMIN = 0, 5, 6, 7, 8, 21
"""Linux capability numbers."""
_TO_CHANGE_USER = (CHOWN, KILL, SETGID, SETUID)
_STUDY_MODE = 0o2770
"""Mode of a study's directory: new files belong to the group of the user who started the trials, so that this user can
read them.
"""


def has_capabilities(*wanted: int) -> bool:
    """Say whether this process has all of these capabilities now."""
    try:
        text = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:  # not Linux
        return False
    held = int(text.partition("CapEff:")[2].split()[0], 16)
    return all(held >> number & 1 for number in wanted)


def can_change_user() -> bool:
    """Say whether this process can run trials as a separate user."""
    return has_capabilities(*_TO_CHANGE_USER)


@contextlib.contextmanager
def own_user(directory: Path) -> Iterator[int]:
    """Reserve a user id that no other study has; it owns the study's directory until the context ends.

    At the end nothing of that user remains: no process, and no file except in the directory, which is ours again.
    """
    take_back(directory)  # one who was killed may have left it to another user
    with _free_user(directory) as uid:
        try:
            give(directory, uid)
            yield uid
        finally:
            kill_all_of(uid)
            remove_left(uid)
            take_back(directory)


@contextlib.contextmanager
def _free_user(directory: Path) -> Iterator[int]:
    """Lock the first user id that is free on this machine and among the processes that share the folder of studies.

    The locks of two files say that it is taken, and are released however their process dies: containers have temporary
    directories of their own, and may share the studies. A file that exists without a lock was left by a process that
    was killed, and so were processes and files of that user. Without such a file, these belong to a process whose locks
    are not visible here. The files name the study's directory.
    """
    folders = [private_folder(Path(f"/tmp/steptune-users-{os.geteuid()}")), private_folder(directory.parent / ".users")]
    uids = range(FIRST_UID, LAST_UID + 1)
    first = os.geteuid() * STRIDE % len(uids)
    for uid in (*uids[first:], *uids[:first]):
        locks = [folder / str(uid) for folder in folders]
        with contextlib.ExitStack() as stack:
            was_left = any(lock.exists() for lock in locks)
            if not all(_lock(lock, stack) for lock in locks) or (not was_left and _is_in_use(uid)):
                continue
            kill_all_of(uid)
            remove_left(uid)
            for lock in locks:
                _take_back_left(lock, uid)
                lock.write_text(str(directory.absolute()), encoding="utf-8")
            if was_left and _has_files(uid):  # of a study that no lock names
                continue
            yield uid
            return
    raise IsolationUnavailableError(f"all user ids from {FIRST_UID} to {LAST_UID} are taken: end some studies")


def private_folder(folder: Path) -> Path:
    """Create a folder that no other user may enter.

    Raises:
        IsolationUnavailableError: The folder belongs to another user.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
        raise IsolationUnavailableError(f"{folder} belongs to another user: remove it")
    return folder


def _lock(path: Path, stack: contextlib.ExitStack) -> bool:
    """Lock a file until the stack closes, and then remove it; return False where another process holds the lock."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    stack.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_ino != path.stat().st_ino:  # who had it has just removed it
            return False
    except (BlockingIOError, FileNotFoundError):
        return False
    stack.callback(path.unlink, missing_ok=True)
    return True


def _take_back_left(lock: Path, uid: int) -> None:
    """Take back the directory of a killed study that used this user id last. Otherwise the next study with the same id
    could read the directory, and its files would count against the limits of that study.
    """
    named = lock.read_text(encoding="utf-8")
    left = Path(named)
    if named and left.is_dir() and left.stat().st_uid == uid:  # a study that was resumed has another user by now
        with contextlib.suppress(DisturbedError):  # files that stay that user's are found afterwards
            take_back(left)


def _is_in_use(uid: int) -> bool:
    """Say whether a user id has processes or files. If it has, it is in use by another process, whose locks are not
    visible here.
    """
    return _has_processes(uid) or _has_files(uid)


def _has_files(uid: int) -> bool:
    """Say whether a user has files in places that all users may write; False if the search takes too long."""
    places = [str(place) for place in SHARED_PLACES if place.is_dir()]
    script = 'find "$@" -xdev -user "$(id -u)" -print -quit 2>/dev/null'
    with contextlib.suppress(DisturbedError):
        return bool(run_as(become(uid), "/bin/sh", "-c", script, "sh", *places).stdout)
    return False


def _has_processes(uid: int) -> bool:
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid == uid:
                return True
    return False


def become(uid: int) -> tuple[str, ...]:
    """Return a command prefix that makes the command run as a user permanently, without any capability.

    The bounding set is emptied where this process may do that: setpriv of util-linux 2.41 fails where it may not. The
    set grants nothing to a process that has no capability and can gain no privileges.
    """
    bounds = ("--bounding-set=-all",) if has_capabilities(SETPCAP) else ()
    return (
        *("setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups"),
        *("--ambient-caps=-all", *bounds, "--inh-caps=-all", "--no-new-privs", "--"),
    )


def kill_all_of(uid: int) -> None:
    """Kill all processes of a user at once, which only a process of the same user can do."""
    with contextlib.suppress(DisturbedError):
        run_as(become(uid), "/bin/sh", "-c", "kill -9 -1")


_FIND = """
user=$(id -u) deep=$1; shift
find "$@" -xdev $deep -type d -perm -0002 ! -user "$user" -print0 |
  xargs -0r -I% find % -xdev -mindepth 1 -maxdepth 1 -user "$user" -print0
"""
_REMOVE = """xargs -0r sh -c 'chmod -R u+rwX -- "$@"; rm -rf -- "$@"' sh"""


def remove_left(uid: int, *, kept: Collection[Path] = (), deep: bool = True) -> None:
    """Remove what a user has left in world-writable places: files, and System V shared memory.

    Files in folders that only some users may write were put there on purpose: a study's directory may be below `/tmp`.

    Args:
        kept: Files and folders that stay.
        deep: Whether to search every folder in there that everybody may write, which takes a while.
    """
    places = [str(place) for place in SHARED_PLACES if place.is_dir()]
    with contextlib.suppress(DisturbedError):  # it does what it can while processes of that user live
        found = run_as(become(uid), "/bin/sh", "-c", _FIND, "sh", "" if deep else "-maxdepth 0", *places).stdout
        left = [path for path in found.split("\0") if path and Path(path) not in kept]
        if left:
            run_as(become(uid), "/bin/sh", "-c", _REMOVE, given="\0".join(left))
        if shutil.which("ipcrm"):
            run_as(become(uid), "ipcrm", "--all")


def give(directory: Path, uid: int) -> None:
    """Make a user the owner of a directory and of everything in it, without following links.

    A file with several hard links may also belong to another user, and is left alone. Our group keeps its access.
    """
    directory = directory.absolute()
    directory.chmod(_STUDY_MODE)
    owner = f"{uid}:{os.getegid()}"
    find = ["find", str(directory), "-xdev", "-user", str(os.geteuid())]
    run_as((), *find, "-type", "d", "-exec", "chmod", f"{_STUDY_MODE:o}", "{}", "+")
    run_as((), *find, "-type", "f", "-links", "1", "-exec", "chmod", "g+rw", "{}", "+")
    changed = ["(", "-type", "d", "-o", "-links", "1", ")", "-exec", "chown", "--no-dereference", owner, "{}", "+"]
    # What is in a directory first: it cannot be entered any more where it is not ours and closed to our group.
    done = run_as((), *find, "-depth", *changed)
    if done.returncode:
        raise IsolationUnavailableError(f"failed to give files to the user of the trials: {done.stderr.strip()[-300:]}")


def take_back(directory: Path) -> None:
    """Undo `give`, whichever user owns the directory now. None of that user's processes may be running."""
    directory = directory.absolute()
    uid = directory.stat().st_uid
    if not can_change_user() or not FIRST_UID <= uid <= LAST_UID:
        return
    with contextlib.suppress(DisturbedError):
        run_as(become(uid), "chmod", "-R", "u+rwX,g+rwX", str(directory))
    run_as((), "chown", "-R", "-h", f"--from={uid}", f"{os.geteuid()}:{os.getegid()}", str(directory))


def closed_to_others(path: Path) -> Path | None:
    """Return the first part of a path that an ordinary user cannot enter or read; None if there is none."""
    for folder in reversed(path.parents):
        if not folder.stat().st_mode & 0o001:
            return folder
    return None if open_to_others(path) else path


def open_to_others(path: Path) -> bool:
    """Say whether an ordinary user can read this path, given access to its parent."""
    wanted = 0o005 if path.is_dir() else 0o004
    return path.stat().st_mode & wanted == wanted
