"""Threads on which torch's operators run, as the operating system reports them.

A pool's size and binding, as torch reports them, are only what was requested and prove nothing.

Source: proc(5): `schedstat` (nanoseconds on a core), `status` (Cpus_allowed_list), `stat` (the core that it ran on).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

TASKS = Path("/proc/self/task")
SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
ELEMENTS = 1 << 21
"""Number of elements that the test operator computes: enough to give every thread of a pool a share of the work."""
LONG_ENOUGH_NS = 30_000_000
"""Time, in nanoseconds, that the busiest thread must have run before threads are compared: the system accounts a
thread's time at ticks of up to 10 ms, or when it stops.
"""
LIMIT_S = 2.0
REPEATS, SETTLE_S = 20, 0.005
TAKES_PART = 0.1
"""Minimum running time with which a thread counts as taking part, as a share of the busiest thread's time."""


class WorkerThread(NamedTuple):
    """A thread that took part in an operator.

    Attributes:
        allowed: Cores that it may use.
        core: Core that it ran on last.
    """

    allowed: tuple[int, ...]
    core: int


def threads_of_an_operator() -> list[WorkerThread]:
    """Return the threads of this process on which an operator currently runs; empty if the system does not report them.

    Another thread that is busy meanwhile counts as well.
    """
    import torch

    values = torch.ones(ELEMENTS)
    torch.add(values, values, out=values)  # begins the pool
    before = _times()
    ran: dict[str, int] = {}
    began = time.monotonic()
    while before and max(ran.values(), default=0) < LONG_ENOUGH_NS and time.monotonic() - began < LIMIT_S:
        for _ in range(REPEATS):
            torch.mul(values, 0.5, out=values)
        time.sleep(SETTLE_S)
        ran = {task: ns - before.get(task, 0) for task, ns in _times().items()}
    busiest = max(ran.values(), default=0)
    found = [_thread(task) for task, ns in ran.items() if busiest and ns > TAKES_PART * busiest]
    return [thread for thread in found if thread is not None]


def are_bound(threads: list[WorkerThread]) -> bool:
    """Say whether each thread is bound to one physical core, and no two threads to the same one."""
    places = [set(thread.allowed) for thread in threads]
    return all(place <= _siblings(min(place)) for place in places) and len(
        {min(_siblings(min(p))) for p in places}
    ) == len(places)


def _times() -> dict[str, int]:
    """Return the time that each thread has spent on a core, in nanoseconds."""
    try:
        return {task.name: int((task / "schedstat").read_text().split()[0]) for task in TASKS.iterdir()}
    except (OSError, ValueError, IndexError):
        return {}


def _thread(task: str) -> WorkerThread | None:
    try:
        lines = (TASKS / task / "status").read_text().splitlines()
        allowed = next(line.split(":")[1] for line in lines if line.startswith("Cpus_allowed_list:"))
        after_name = (TASKS / task / "stat").read_text().rpartition(")")[2].split()
    except (OSError, StopIteration):  # it has ended
        return None
    return WorkerThread(allowed=tuple(sorted(_listed(allowed))), core=int(after_name[36]))


def _siblings(core: int) -> set[int]:
    """Return the logical cores of the physical core that a core belongs to."""
    try:
        return _listed(Path(SIBLINGS.format(core)).read_text())
    except OSError:
        return {core}


def _listed(text: str) -> set[int]:
    """Return the numbers in a list such as "0-3,8"."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
