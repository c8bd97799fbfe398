"""Resource limits of a study's trials."""

from __future__ import annotations

import os
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from steptune.tuner.hardware import memory_limit_bytes
from steptune.tuner.trials.watch import Quota

NUM_TASKS_BASE = 1024
NUM_TASKS_PER_CORE = 64
"""Maximum tasks per core: enough for intra-op threads of several ranks, loader workers and 32 compile workers, but few
enough to stop fork bombs.
"""
MAX_DESCRIPTORS = 65_536
MAX_FILES = 1_000_000
MEMORY_SHARE = 0.8
"""Maximum share of the memory of the machine, or of its container, for all trials together."""
MEMORY_RESERVE = 0.04
DISK_SHARE = 0.5
"""Maximum share that a study may use of the disk space that is free when the study begins."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Limits of the resources of one study.

    Attributes:
        num_tasks: Maximum number of processes and threads.
        disk_bytes: Maximum bytes of everything in the study's directory, and of the largest single file.
        temporary_bytes: Maximum bytes of a temporary file system in memory, and as much again of shared memory.
        memory_bytes: Maximum memory of all processes together, and maximum private memory of each.
        memory_reserve_bytes: Minimum memory that must stay available on the machine.
    """

    num_tasks: int
    disk_bytes: int
    temporary_bytes: int
    memory_bytes: int
    memory_reserve_bytes: int

    @classmethod
    def of_this_machine(
        cls, directory: Path, disk_bytes: int | None = None, memory_bytes: int | None = None
    ) -> Resources:
        """Return limits that leave room for others: half of the free disk, four fifths of the memory, all cores."""
        total = psutil.virtual_memory().total
        return cls(
            num_tasks=NUM_TASKS_BASE + NUM_TASKS_PER_CORE * (os.cpu_count() or 1),
            disk_bytes=disk_bytes or int(DISK_SHARE * shutil.disk_usage(directory).free),
            temporary_bytes=min(total // 2, memory_bytes or total),
            memory_bytes=memory_bytes or int(MEMORY_SHARE * memory_limit_bytes()),
            memory_reserve_bytes=int(MEMORY_RESERVE * total),
        )

    @property
    def quota(self) -> Quota:
        return Quota(
            disk_bytes=self.disk_bytes,
            num_files=MAX_FILES,
            memory_bytes=self.memory_bytes,
            memory_reserve_bytes=self.memory_reserve_bytes,
        )

    def command(self, *, num_others: int = 0) -> tuple[str, ...]:
        """Return the `prlimit` command to put before the server's command, so that the limits apply from its first
        instruction.

        Args:
            num_others: Tasks that the server's user already has, which count too.
        """
        descriptors = _at_most(resource.RLIMIT_NOFILE, MAX_DESCRIPTORS)
        soft = min(descriptors, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        tasks = _at_most(resource.RLIMIT_NPROC, self.num_tasks + num_others)
        size = _at_most(resource.RLIMIT_FSIZE, self.disk_bytes)
        memory = _at_most(resource.RLIMIT_DATA, self.memory_bytes)
        return (
            "prlimit",
            f"--nproc={tasks}:{tasks}",
            f"--nofile={soft}:{descriptors}",
            f"--fsize={size}:{size}",
            f"--data={memory}:{memory}",
            "--core=0:0",
            "--",
        )


def _at_most(limit: int, wanted: int) -> int:
    hard = resource.getrlimit(limit)[1]
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
