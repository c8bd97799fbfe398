"""A disk of a few megabytes, of a test's own, that can be filled and emptied."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class SmallDisk:
    """A folder with little room."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self) -> None:
        """Leaves no room for anything."""
        with suppress(OSError), self._filler.open("wb", buffering=0) as file:
            while file.write(b"\0" * (1 << 20)):
                pass
        with suppress(OSError), self._filler.open("ab", buffering=0) as file:
            while file.write(b"\0" * 512):
                pass

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[SmallDisk | None]:
    """A file system in memory at a folder; None where this process may not mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes},mode=0755", "steptune-test", str(folder)]
    if os.getuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        yield None
        return
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)
