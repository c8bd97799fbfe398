"""Watches what trials take from the machine, and says when it is too much.

Resource limits hold for one process; a workload has many. Looking costs a fraction of a millisecond, so that it
disturbs no measurement: the free space of the file system and the available memory are one system call or one small
file each. Only when those look bad are files counted.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from steptune.tuner.records import Failure, FailureKind, Phase
from steptune.tuner.trials.shared_places import SHARED_PLACES

INTERVAL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Quota:
    """What the trials of one study may take together.

    Attributes:
        disk_bytes: Size of all files in the study's directory.
        num_files: Their number.
        memory_reserve_bytes: What must stay available on the machine.
    """

    disk_bytes: int
    num_files: int
    memory_reserve_bytes: int


class Watch:
    """Looks now and then whether a quota holds.

    Args:
        directory: The study's.
        as_user: Where trials have a user of their own, the command that runs another one as that user. Then all that
            the user has where everybody may write counts, too.
    """

    def __init__(self, directory: Path, quota: Quota, as_user: Sequence[str] = ()) -> None:
        self._directories = [directory, *(place for place in SHARED_PLACES if as_user and place.is_dir())]
        self._quota = quota
        self._as_user = as_user
        self._looked_s = 0.0
        self._counted: list[tuple[int, int]] = []
        """Free bytes and free inodes below each directory when the files were last counted."""

    def add(self, directory: Path) -> None:
        """Counts another directory in, of temporary files."""
        self._directories.append(directory)
        self._counted = []

    def exceeded(self, phase: Phase) -> Failure | None:
        """What is exceeded now; None also while the last look is recent."""
        if time.monotonic() - self._looked_s < INTERVAL_S:
            return None
        self._looked_s = time.monotonic()
        return self._memory(phase) or self._disk(phase)

    def _memory(self, phase: Phase) -> Failure | None:
        available, reserve = psutil.virtual_memory().available, self._quota.memory_reserve_bytes
        if available >= reserve:
            return None
        message = (
            f"the trial was ended while the machine had {_gib(available)} of memory left: isolated trials leave "
            f"{_gib(reserve)}. Use a smaller global_batch or model, fewer workers, or a machine with more memory"
        )
        return Failure(kind=FailureKind.OUT_OF_MEMORY, phase=phase, message=message)

    def _disk(self, phase: Phase) -> Failure | None:
        """Counts files at first, and again when the file system has lost a tenth of the quota since."""
        free = [_free(directory) for directory in self._directories]
        allowed = self._quota.disk_bytes, self._quota.num_files
        if self._counted and not any(
            before[kind] - now[kind] >= allowed[kind] // 10
            for before, now in zip(self._counted, free, strict=True)
            for kind in (0, 1)
        ):
            return None
        self._counted = free
        num_bytes, num_files = self._used()
        if num_bytes <= allowed[0] and num_files <= allowed[1]:
            return None
        message = (
            f"the trial was ended when the study's directory {self._directories[0]} and its temporary files held "
            f"{_gib(num_bytes)} in {num_files} files: {_gib(allowed[0])} in {allowed[1]} files are allowed. Write "
            "less, or raise STEPTUNE_STUDY_DISK_BYTES"
        )
        return Failure(kind=FailureKind.WORKLOAD_ERROR, phase=phase, message=message)

    def _used(self) -> tuple[int, int]:
        if self._as_user:
            return _usage_of_user(self._as_user, self._directories)
        used = [_usage(directory) for directory in self._directories]
        num_bytes, num_files = (sum(counts) for counts in zip(*used, strict=True))
        return num_bytes, num_files


def _free(directory: Path) -> tuple[int, int]:
    try:
        system = os.statvfs(directory)
    except OSError:  # a temporary directory that has gone
        return 0, 0
    return system.f_bavail * system.f_frsize, system.f_ffree


def _usage(directory: Path) -> tuple[int, int]:
    """Allocated bytes and number of everything below a directory; links are not followed."""
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
    """As `_usage`, of all that one user has below some directories, each file once. That user looks: it may have closed
    its folders to others.
    """
    script = 'find "$@" -xdev -user "$(id -u)" -printf "%D:%i %b\\n" 2>/dev/null'
    command = [*as_user, "/bin/sh", "-c", script, "sh", *map(str, directories)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    blocks = dict(line.split() for line in done.stdout.splitlines())
    return 512 * sum(map(int, blocks.values())), len(blocks)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"
