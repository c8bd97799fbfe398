"""Running studies of one submitter on this machine: all their trials share one limit on memory and one on files.

Every running study has a file that names its submitter, locked while it runs, in a folder that only the workers' user
may enter. Workers in containers with temporary directories of their own do not see each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from steptune.service.isolation.users import become, private_folder
from steptune.tuner.records import new_id
from steptune.tuner.trials.memory_use import Taker

FOLDER = "/tmp/steptune-studies-{uid}"


class _Entry(msgspec.Struct, frozen=True):
    owner: str
    pid: int
    uid: int | None


@contextlib.contextmanager
def fellows(owner: str | None, uid: int | None) -> Iterator[Callable[[], Sequence[Taker]]]:
    """Register this study's submitter, and return a function that finds the submitter's other studies.

    Args:
        owner: The submitter; None where there is none: such studies share their limits with no others.
        uid: User of the trials and of no others.
    """
    if owner is None:
        yield tuple
        return
    folder = private_folder(Path(FOLDER.format(uid=os.geteuid())))
    path = folder / new_id()
    with path.open("xb", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(msgspec.json.encode(_Entry(owner=owner, pid=os.getpid(), uid=uid)))
            yield lambda: tuple(_others(folder, path, owner))
        finally:
            path.unlink(missing_ok=True)


def _others(folder: Path, own: Path, owner: str) -> Iterator[Taker]:
    for path in folder.iterdir():
        if path == own:
            continue
        with contextlib.suppress(OSError, msgspec.DecodeError), path.open("rb") as file:
            entry = msgspec.json.decode(file.read(), type=_Entry)  # one that is just being made is empty
            if _is_left(file.fileno()):
                path.unlink(missing_ok=True)
                continue
            if entry.owner == owner and (entry.uid is not None or entry.pid != os.getpid()):
                yield Taker(pid=entry.pid, uid=entry.uid, as_user=() if entry.uid is None else become(entry.uid))


def _is_left(descriptor: int) -> bool:
    """Say whether a file's lock is free, which means that the process that created the file was killed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
