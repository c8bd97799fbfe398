"""Memory that the allocator held, by device, from allocator events in a trace."""

from __future__ import annotations

from operator import attrgetter

import numpy as np

from steptune.tuner.profiling.capture import Capture
from steptune.tuner.profiling.intervals import Ints
from steptune.tuner.profiling.trace import MemoryPoint
from steptune.tuner.trace_records import MemoryStats

MAX_POINTS = 500


def memory_stats(capture: Capture) -> tuple[MemoryStats, ...]:
    """Return the memory of each device over the whole trace, including peaks before the first step. Empty without
    allocator events.
    """
    trace = capture.trace
    by_device: dict[str, list[MemoryPoint]] = {}
    for point in trace.memory:
        by_device.setdefault(point.device, []).append(point)
    totals = {f"cuda:{device.number}": device.total_memory_bytes for device in trace.devices}
    found = []
    for device, points in sorted(by_device.items()):
        columns = np.array(list(map(attrgetter("time", "allocated_bytes", "reserved_bytes"), points)), dtype=np.int64)
        columns[:, 0] -= capture.steps.span[0]
        found.append(
            MemoryStats(
                device=device,
                peak_allocated_bytes=int(columns[:, 1].max()),
                peak_reserved_bytes=int(columns[:, 2].max()),
                total_memory_bytes=totals.get(device) or None,
                timeline=tuple((int(t), int(a), int(r)) for t, a, r in columns[thinned(columns)].tolist()),
            )
        )
    return tuple(found)


def thinned(columns: Ints) -> Ints:
    """Return the indices of the rows of (time, allocated, reserved) to keep, at most `MAX_POINTS`: the extremes of each
    group of consecutive rows.

    All groups have equally many rows. The first and the last row stay, and in each group the highest and lowest
    allocation and the highest reservation, and so every peak.
    """
    count = len(columns)
    if count <= MAX_POINTS:
        return np.arange(count)
    edges = np.linspace(0, count, (MAX_POINTS - 2) // 3 + 1).astype(np.int64)
    kept = [0, count - 1]
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        part = columns[low:high]
        kept += [low + int(part[:, 1].argmax()), low + int(part[:, 1].argmin()), low + int(part[:, 2].argmax())]
    return np.unique(np.array(kept))
