"""Peak memory of a rank and of the processes it started."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tuner.records import MemoryPeak

if TYPE_CHECKING:
    import torch


def measure_peak(rank: int, device: torch.device) -> MemoryPeak:
    """Peak resident memory of the rank plus its live descendants, and the device's figures.

    Private pages of a forked worker are counted once: proportional shares (PSS) where the kernel
    offers them.
    """
    resident = _peak_resident() + sum(_proportional(child.pid) for child in psutil.Process().children(recursive=True))
    if device.type != "cuda":
        return MemoryPeak(rank=rank, resident_bytes=resident)
    import torch

    reserved = torch.cuda.max_memory_reserved(device)
    return MemoryPeak(
        rank=rank,
        resident_bytes=resident,
        allocated_bytes=torch.cuda.max_memory_allocated(device),
        reserved_bytes=reserved,
        device_bytes=reserved,
    )


def _peak_resident() -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return int(psutil.Process().memory_info().rss)


def _proportional(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(psutil.NoSuchProcess):
        return int(psutil.Process(pid).memory_info().rss)
    return 0
