"""Memory of a rank: its limit, and the peak of the rank and the processes that it started."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from steptune.tuner.records import MemoryPeak
from steptune.tuner.trials.processes import limit_data

if TYPE_CHECKING:
    import torch

CONTEXT_BYTES = 600 << 20
"""Device memory, in bytes, that CUDA and its libraries take before the first tensor."""

RESET_PEAK = "5"
"""Value that, written to `clear_refs`, sets VmHWM to the present resident size (proc(5), Linux 4.0)."""


def limit_host_memory(limit_bytes: int | None, device_kind: str) -> None:
    """Limit the host memory of a rank that trains on the CPU; a rank on a device gets a limit of device memory
    instead.
    """
    if limit_bytes is not None and device_kind == "cpu":
        limit_data(limit_bytes)


def limit_device_memory(limit_bytes: int | None, device: torch.device) -> None:
    """Limit torch's allocator on a CUDA device, so that allocations beyond the limit fail. Memory of CUDA and its
    libraries is not included.
    """
    if limit_bytes is None or device.type != "cuda":
        return
    import torch

    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)


def measure_peak(rank: int, device: torch.device) -> MemoryPeak:
    """Measure two peaks: the resident memory of the rank and its live descendants, and the memory of its device.

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


def forget_peak(device: torch.device) -> None:
    """Reset the memory peaks of the process and its device to what they use now."""
    gc.collect()
    _return_freed()
    with contextlib.suppress(OSError):  # the kernel may have no such counter, and then keeps the peak
        Path("/proc/self/clear_refs").write_text(RESET_PEAK, encoding="ascii")
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _return_freed() -> None:
    """Make the C library return freed memory to the kernel, if the library supports that."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


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
