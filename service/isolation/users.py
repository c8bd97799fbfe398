"""Users for trials of a process that may change its user: one for each study, while it runs.

That process is root, or it has the four capabilities below and no other, as in a container. Without the capability to
pass by permissions it reads what trials write as a member of their files' group, and what is theirs is made its own by
giving it away: first by the trials' user, who may open everything of theirs, then by changing the owner.
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
"""systemd's range for users that exist while something runs; no account has one of them."""
CHOWN, KILL, SETGID, SETUID, SETPCAP, SYS_ADMIN = 0, 5, 6, 7, 8, 21
"""Numbers of capabilities."""
_TO_CHANGE_USER = (CHOWN, KILL, SETGID, SETUID)
_STUDY_MODE = 0o2770
"""Mode of a study's directory: what is made there belongs to the group of who started the trials, who reads it so."""


def has_capabilities(*wanted: int) -> bool:
    """Say whether this process has all of these capabilities now."""
    try:
        text = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:  # not Linux
        return False
    held = int(text.partition("CapEff:")[2].split()[0], 16)
    return all(held >> number & 1 for number in wanted)


def can_change_user() -> bool:
    """Say whether this process can run trials as a user of their own."""
    return has_capabilities(*_TO_CHANGE_USER)


@contextlib.contextmanager
def own_user(directory: Path) -> Iterator[int]:
    """A user id that no other study has, to whom a study's directory belongs meanwhile.

    At the end nothing of that user is left: no process, no file but those in the directory, which are ours again.
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
    """The first that is free on this machine, and among those who share the folder of studies.

    The locks of two files say that it is taken, and are released by whatever death: containers have temporary
    directories of their own, and may share the studies. A file that is there and not locked was left by one who was
    killed, and so were the processes of that user; otherwise they are somebody's whose locks are not seen here.
    """
    folders = [private_folder(Path(f"/tmp/steptune-users-{os.geteuid()}")), private_folder(directory.parent / ".users")]
    for uid in range(FIRST_UID, LAST_UID + 1):
        with contextlib.ExitStack() as stack:
            was_left = any((folder / str(uid)).exists() for folder in folders)
            if not all(_lock(folder / str(uid), stack) for folder in folders) or (not was_left and _has_processes(uid)):
                continue
            kill_all_of(uid)
            remove_left(uid)
            yield uid
            return
    raise IsolationUnavailableError(f"all users from {FIRST_UID} to {LAST_UID} are taken: end some studies")


def private_folder(folder: Path) -> Path:
    """Make a folder that no other user may enter.

    Raises:
        IsolationUnavailableError: Somebody else has it.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
        raise IsolationUnavailableError(f"{folder} belongs to another user: remove it")
    return folder


def _lock(path: Path, stack: contextlib.ExitStack) -> bool:
    """Hold the lock of a file until the stack ends, which removes it; False where somebody else has it."""
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


def _has_processes(uid: int) -> bool:
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid == uid:
                return True
    return False


def become(uid: int) -> tuple[str, ...]:
    """The command under which another command is that user's, without any capability, for good.

    The bounding set is emptied where this process may do that: setpriv of util-linux 2.41 fails where it may not. It
    gives nothing to who has no capability and can gain no privileges.
    """
    bounds = ("--bounding-set=-all",) if has_capabilities(SETPCAP) else ()
    return (
        *("setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups"),
        *("--ambient-caps=-all", *bounds, "--inh-caps=-all", "--no-new-privs", "--"),
    )


def kill_all_of(uid: int) -> None:
    """Kill every process of a user at one stroke: only one of the same user can do that."""
    with contextlib.suppress(DisturbedError):
        run_as(become(uid), "/bin/sh", "-c", "kill -9 -1")


_FIND = """
user=$(id -u) deep=$1; shift
find "$@" -xdev $deep -type d -perm -0002 ! -user "$user" -print0 |
  xargs -0r -I% find % -xdev -mindepth 1 -maxdepth 1 -user "$user" -print0
"""
_REMOVE = """xargs -0r sh -c 'chmod -R u+rwX -- "$@"; rm -rf -- "$@"' sh"""


def remove_left(uid: int, *, kept: Collection[Path] = (), deep: bool = True) -> None:
    """Remove what a user has left where everybody may write: files, and shared memory of System V.

    What lies in a folder that only some may write was put there on purpose: a study's directory may be below `/tmp`.

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
    """Make a user the owner of a directory and of all that is in it, without following any link.

    A file with several names may be somebody else's too, and is left alone. Our group keeps its access.
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
        raise IsolationUnavailableError(
            f"files cannot be given to the user of the trials: {done.stderr.strip()[-300:]}"
        )


def take_back(directory: Path) -> None:
    """Undo `give`, whoever of the users it was given to. None of that user's processes may be left."""
    directory = directory.absolute()
    uid = directory.stat().st_uid
    if not can_change_user() or not FIRST_UID <= uid <= LAST_UID:
        return
    with contextlib.suppress(DisturbedError):
        run_as(become(uid), "chmod", "-R", "u+rwX,g+rwX", str(directory))
    run_as((), "chown", "-R", "-h", f"--from={uid}", f"{os.geteuid()}:{os.getegid()}", str(directory))


def closed_to_others(path: Path) -> Path | None:
    """The part of a path that an ordinary user cannot pass or read; None if there is none."""
    for folder in reversed(path.parents):
        if not folder.stat().st_mode & 0o001:
            return folder
    return None if open_to_others(path) else path


def open_to_others(path: Path) -> bool:
    """Say whether an ordinary user who got as far as this can read it."""
    wanted = 0o005 if path.is_dir() else 0o004
    return path.stat().st_mode & wanted == wanted
