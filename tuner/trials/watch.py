"""Watches what trials take from the machine, and says when it is too much.

Resource limits hold for one process; a workload has many. Looking costs a fraction of a millisecond, so that it
disturbs no measurement: the free space of the file system and the available memory are one system call or one small
file each. Only when those look bad are files counted.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from steptune.tuner.records import Failure, FailureKind, Phase

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
    """Looks now and then whether a quota holds."""

    def __init__(self, directory: Path, quota: Quota) -> None:
        self._directories = [directory]
        self._quota = quota
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
        used = [_usage(directory) for directory in self._directories]
        num_bytes, num_files = (sum(counts) for counts in zip(*used, strict=True))
        if num_bytes <= allowed[0] and num_files <= allowed[1]:
            return None
        message = (
            f"the trial was ended when the study's directory {self._directories[0]} and its temporary files held "
            f"{_gib(num_bytes)} in {num_files} files: {_gib(allowed[0])} in {allowed[1]} files are allowed. Write "
            "less, or raise STEPTUNE_STUDY_DISK_BYTES"
        )
        return Failure(kind=FailureKind.WORKLOAD_ERROR, phase=phase, message=message)


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


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"
