"""Finding every process that a test has started, whatever became of its parents.

A variable of the environment is inherited by all descendants, adopted ones and new sessions included.
"""

import contextlib
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil

VARIABLE = "STEPTUNE_TEST_MARK"
DEADLINE_S = 240.0
"""Beyond anything that a loaded machine needs; reaching it fails the test."""


def new_mark() -> str:
    return uuid.uuid4().hex


def marked(mark: str) -> list[psutil.Process]:
    """Live processes that carry the mark; zombies are gone already."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(VARIABLE) == mark:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def wait_until(condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Waits for a condition; fails when it does not come."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"waited {deadline_s:g} s in vain until {what}"
        time.sleep(0.05)


def none_left(mark: str) -> None:
    """Waits until no process carries the mark."""
    wait_until(lambda: not marked(mark), f"no process of the study is left: {commands(mark)}")


def commands(mark: str) -> dict[int, str]:
    """Commands of the processes that carry the mark, by their ids; but for those that end meanwhile."""
    found = {}
    for process in marked(mark):
        with contextlib.suppress(psutil.NoSuchProcess):
            found[process.pid] = " ".join(process.cmdline())
    return found


def shared_memory_of(pids: set[int]) -> list[str]:
    """Names under /dev/shm that hold the id of one of these processes, as torch's and Python's do."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return []
    wanted = {str(pid) for pid in pids}
    return [path.name for path in folder.iterdir() if wanted & set(path.name.replace("-", "_").split("_"))]


def left_in(temporary: Path) -> list[Path]:
    """Files in a temporary directory, but for the compiler's headers that torch keeps there for all programs."""
    return [
        path for path in temporary.rglob("*") if not path.relative_to(temporary).parts[0].startswith("torchinductor_")
    ]
