"""Files that a forked trial may not read: the inspection or another trial wrote them after the frozen copy was made.

A start of the command has its own view of the folder; a fork shares one, and would continue from another trial's
checkpoint.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from pathlib import Path
from typing import Any

TICK_NS = 10_000_000
"""Maximum time, in nanoseconds, by which a file system's clock lags behind (HZ=100)."""
COMPILED_MODULES = "__pycache__"
"""Folder of compiled modules, which a trial may read: their content does not depend on the writer."""


def end_at_others_files(view: str, frozen_ns: int) -> None:
    """End this process when it opens another trial's file for reading; the trial is then repeated from its command.

    Args:
        view: Folder that inspections and trials share.
        frozen_ns: Wall-clock time at which the copy was made.
    """
    began_ns = time.time_ns() - TICK_NS

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], str | bytes | os.PathLike) or not _reads(arguments[2]):
            return
        try:
            path = Path(os.fsdecode(arguments[0]))
            found = path.stat()
        except (OSError, ValueError):  # the script is told by its own call
            return
        if stat.S_ISREG(found.st_mode) and frozen_ns < found.st_ctime_ns < began_ns:
            _end_if_inside(path.resolve(), Path(view))

    sys.addaudithook(watch)


def _end_if_inside(path: Path, view: Path) -> None:
    if path.is_relative_to(view) and COMPILED_MODULES not in path.parts:
        name = path.relative_to(view)
        os.write(2, f"\nthe script reads {name}, which an earlier run of the same copy wrote\n".encode())
        os._exit(1)


def _reads(flags: int) -> bool:
    return flags & os.O_ACCMODE != os.O_WRONLY and not flags & os.O_TRUNC
