"""Processor use by other programs during a window."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from steptune.tuner.hardware import allowed_cores, usable_cores

TICKS_OF_ERROR = 3
"""Maximum error of a difference between two readings, in ticks of 10 ms; both counters advance by ticks."""


@dataclass(frozen=True, kw_only=True)
class CpuReading:
    """Two counters of CPU seconds on the cores that this process may use: by all processes, and by this process's
    session.
    """

    busy_s: float
    own_s: float
    at_s: float


def read_cpu(now_s: float) -> CpuReading | None:
    """Read both counters; return None where the system does not offer them."""
    busy = _busy_seconds()
    return None if busy is None else CpuReading(busy_s=busy, own_s=_session_seconds(), at_s=now_s)


def own_seconds(before: CpuReading | None, after: CpuReading | None) -> float:
    """Return the CPU seconds of this process and its descendants between two readings."""
    return 0.0 if before is None or after is None else after.own_s - before.own_s


def foreign_share(before: CpuReading | None, after: CpuReading | None, own_s: float | None = None) -> float:
    """Return the CPU time of other processes (and time stolen by a hypervisor) as a share of all cores.

    Args:
        own_s: CPU seconds of the trial's own processes, where these are more than `own_seconds` covers (other ranks).
    """
    if before is None or after is None or after.at_s <= before.at_s:
        return 0.0
    own = own_seconds(before, after) if own_s is None else own_s
    foreign = (after.busy_s - before.busy_s) - own
    resolution = TICKS_OF_ERROR / os.sysconf("SC_CLK_TCK")
    return max(0.0, foreign - resolution) / ((after.at_s - before.at_s) * usable_cores())


def _busy_seconds() -> float | None:
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    usable = {f"cpu{core}" for core in allowed_cores()}
    ticks = 0
    for line in lines:
        name, *fields = line.split()
        if name in usable:
            user, nice, system, _, _, irq, softirq, steal = (int(field) for field in fields[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


def _session_seconds() -> float:
    """Return the CPU seconds of this process, its live descendants, and its descendants that have ended."""
    total = 0.0
    process = psutil.Process()
    for member in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = member.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total
