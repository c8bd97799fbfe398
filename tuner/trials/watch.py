"""Monitoring of the trials' use of the machine against a quota.

Resource limits hold for one process; a workload has many. A check takes a fraction of a millisecond, so that it
disturbs no measurement: the free space of the file system and the available memory are one system call or one small
file each. Files are counted only when these indicate a problem.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from steptune.tuner.records import Failure, FailureKind, Phase
from steptune.tuner.trials.as_user import DisturbedError, run_as
from steptune.tuner.trials.memory_use import File, Taker, kernel_bytes, memory_file_systems, memory_of, processes_of
from steptune.tuner.trials.shared_places import SHARED_PLACES

INTERVAL_S = 0.2
LOOK_SHARE = 0.05
"""Maximum share of time spent on reading the memory of processes, as long as each reading takes less than half a
second.
"""
LONGEST_PAUSE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Quota:
    """Limits on the resources that all trials of one study, and all studies of one submitter, may use on a machine.

    Attributes:
        disk_bytes: Maximum size of all files in the study's directory.
        num_files: Maximum number of these files.
        memory_bytes: Maximum memory of all processes, with shared memory and files in memory.
        memory_reserve_bytes: Minimum memory that must stay available on the machine.
    """

    disk_bytes: int
    num_files: int
    memory_bytes: int
    memory_reserve_bytes: int


class Watch:
    """Periodic check of a quota.

    Args:
        directory: Directory of the study.
        as_user: Command prefix that runs a command as the trials' user, if they have a separate one. Then that user's
            files in directories that all users may write count, too.
        uid: Id of that user; None where the trials run as ours.
        python: An interpreter that this user can run.
        servers: Function that returns the process ids of the present trial servers.
        fellows: Function that returns the other studies of the same submitter. If they exceed the quota together, the
            one that uses most is ended.
    """

    def __init__(
        self,
        directory: Path,
        quota: Quota,
        as_user: Sequence[str] = (),
        *,
        uid: int | None = None,
        python: str = sys.executable,
        servers: Callable[[], Iterable[int]] = tuple,
        fellows: Callable[[], Sequence[Taker]] = tuple,
    ) -> None:
        self._directories = [directory, *(place for place in SHARED_PLACES if as_user and place.is_dir())]
        self._quota = quota
        self._as_user = as_user
        self._uid = uid
        self._python = python
        self._servers = servers
        self._fellows = fellows
        self._kernel_bytes = kernel_bytes() if sys.platform == "linux" else 0
        self._looked_s = 0.0
        self._memory_again_s = 0.0
        self._counted: dict[Path, tuple[int, int]] = {}
        """Free bytes and free inodes below each directory when the files were last counted."""

    def add(self, directory: Path) -> None:
        """Add a directory of temporary files, whose files and bytes then count towards the quota. A count may be in
        progress on another thread.
        """
        self._directories.append(directory)

    def count_again(self) -> None:
        """Count all files again at the next check, because the failure that the last check found was not acted on."""
        self._counted = {}

    def exceeded(self, phase: Phase) -> Failure | None:
        """Return the failure for a limit that is exceeded now; None if no limit is exceeded, or if the last check was
        recent.
        """
        if time.monotonic() - self._looked_s < INTERVAL_S:
            return None
        self._looked_s = time.monotonic()
        try:
            return self._memory_left(phase) or self._memory_taken(phase) or self._disk(phase)
        except DisturbedError as error:
            message = (
                f"the trial was ended because its files could not be counted: {error}. Do not stop processes that "
                "the workload did not start, and write fewer files"
            )
            return Failure(kind=FailureKind.WORKLOAD_ERROR, phase=phase, message=message)

    def _memory_left(self, phase: Phase) -> Failure | None:
        available, reserve = psutil.virtual_memory().available, self._quota.memory_reserve_bytes
        if available >= reserve:
            return None
        message = (
            f"the trial was ended because the machine had only {_gib(available)} of memory left, and isolated "
            f"trials must leave {_gib(reserve)}. Use a smaller global_batch or model, fewer workers, or a machine "
            "with more memory"
        )
        return Failure(kind=FailureKind.OUT_OF_MEMORY, phase=phase, message=message)

    def _memory_taken(self, phase: Phase) -> Failure | None:
        """Return the failure if the trials exceed their memory limit. The memory of processes is read only if the whole
        machine uses more than the limit.
        """
        allowed, memory = self._quota.memory_bytes, psutil.virtual_memory()
        if memory.total - memory.available <= allowed or time.monotonic() < self._memory_again_s:
            return None
        began_s = time.monotonic()
        own = self._memory_of(set(self._servers()), self._uid, self._as_user)
        others = [
            self._memory_of({taker.pid} if taker.uid is None else set(), taker.uid, taker.as_user)
            for taker in self._fellows()
        ]
        ended_s = time.monotonic()
        self._memory_again_s = ended_s + min((ended_s - began_s) / LOOK_SHARE, LONGEST_PAUSE_S)
        if own + sum(others) <= allowed or own < max(others, default=0):
            return None
        beside = f" and {_gib(sum(others))} in other studies of the same user" if own <= allowed else ""
        message = (
            f"the trial was ended because the study's processes together used {_gib(own)} of memory{beside}, but at "
            f"most {_gib(allowed)} are allowed. Use a smaller global_batch or model, fewer workers, or raise "
            "STEPTUNE_STUDY_MEMORY_BYTES"
        )
        return Failure(kind=FailureKind.OUT_OF_MEMORY, phase=phase, message=message)

    def _memory_of(self, roots: set[int], uid: int | None, as_user: Sequence[str]) -> int:
        files: dict[File, int] = {}
        systems = memory_file_systems("self")
        places = [place for place in SHARED_PLACES if place.is_dir() and _device(place) in systems]
        if as_user and places:
            files = _files_of_user(as_user, places)
        pids = processes_of(roots, uid) - {taker.pid for taker in self._fellows()}  # the workers themselves
        return memory_of(
            pids,
            self._quota.memory_bytes,
            files,
            buffers_bytes=max(0, kernel_bytes() - self._kernel_bytes),
            as_user=as_user,
            python=self._python,
        )

    def _disk(self, phase: Phase) -> Failure | None:
        """Return the failure for exceeded disk space, or None. Count files at the first check, and again only after
        free space or free inodes have fallen by a tenth of the quota.
        """
        free = {directory: _free(directory) for directory in tuple(self._directories)}
        allowed = self._quota.disk_bytes, self._quota.num_files
        if self._counted.keys() == free.keys() and not any(
            self._counted[directory][kind] - now[kind] >= allowed[kind] // 10
            for directory, now in free.items()
            for kind in (0, 1)
        ):
            return None
        self._counted = free
        own, others = self._used(), self._left_by_fellows()
        if not any(
            own[kind] + sum(other[kind] for other in others) > allowed[kind]
            and own[kind] >= max((other[kind] for other in others), default=0)
            for kind in (0, 1)
        ):
            return None
        beside = sum(other[0] for other in others), sum(other[1] for other in others)
        held = f"{_gib(own[0])} in {own[1]} files"
        if others:
            held += (
                f", and other studies of the same user held {_gib(beside[0])} in {beside[1]} files in "
                "world-writable folders"
            )
        message = (
            f"the trial was ended because the study's directory {self._directories[0]} and its temporary files held "
            f"{held}, but at most {_gib(allowed[0])} in {allowed[1]} files are allowed. Write less, or raise "
            "STEPTUNE_STUDY_DISK_BYTES"
        )
        return Failure(kind=FailureKind.WORKLOAD_ERROR, phase=phase, message=message)

    def _left_by_fellows(self) -> list[tuple[int, int]]:
        places = [place for place in SHARED_PLACES if place.is_dir()]
        return [_usage_of_user(taker.as_user, places) for taker in self._fellows() if taker.as_user]

    def _used(self) -> tuple[int, int]:
        if self._as_user:
            return _usage_of_user(self._as_user, self._directories)
        used = [_usage(directory) for directory in tuple(self._directories)]
        num_bytes, num_files = (sum(counts) for counts in zip(*used, strict=True))
        return num_bytes, num_files


def _free(directory: Path) -> tuple[int, int]:
    try:
        system = os.statvfs(directory)
    except OSError:  # a temporary directory that has gone
        return 0, 0
    return system.f_bavail * system.f_frsize, system.f_ffree


def _usage(directory: Path) -> tuple[int, int]:
    """Return the allocated bytes and the number of all files below a directory; links are not followed."""
    num_bytes = num_files = 0
    pending = [directory]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    num_files += 1
                    num_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(Path(entry.path))
        except OSError:  # removed meanwhile
            continue
    return num_bytes, num_files


def _usage_of_user(as_user: Sequence[str], directories: Sequence[Path]) -> tuple[int, int]:
    """Return the allocated bytes and the number of one user's files below some directories, each file counted once."""
    files = _files_of_user(as_user, directories)
    return sum(files.values()), len(files)


def _files_of_user(as_user: Sequence[str], directories: Sequence[Path]) -> dict[File, int]:
    """Return the allocated bytes of each file of a user. The search runs as that user, because the user's folders may
    be closed to others.
    """
    script = 'find "$@" -xdev -user "$(id -u)" -printf "%D %i %b\\n" 2>/dev/null'
    done = run_as(as_user, "/bin/sh", "-c", script, "sh", *(str(directory.absolute()) for directory in directories))
    found = (map(int, line.split()) for line in done.stdout.splitlines())
    return {((os.major(device), os.minor(device)), inode): 512 * blocks for device, inode, blocks in found}


def _device(path: Path) -> tuple[int, int]:
    number = path.stat().st_dev
    return os.major(number), os.minor(number)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"
