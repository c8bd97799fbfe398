"""Launch queue of each stream: operations that were launched but have not begun.

An operation is in the queue from the beginning of its launch call to its own beginning, as in Holistic
Trace Analysis. A call that launches many operations (a CUDA graph) puts all of them into the queue at once.
"""

from __future__ import annotations

import numpy as np

from steptune.tuner.profiling.capture import Capture
from steptune.tuner.profiling.device_time import device_rows
from steptune.tuner.profiling.intervals import Ints, median
from steptune.tuner.profiling.memory import thinned
from steptune.tuner.trace_records import QueueStats


def queue_stats(capture: Capture, device: int) -> tuple[QueueStats, ...]:
    """Return statistics by stream, the busiest first. Streams without a known launch are left out."""
    work, launches = capture.trace.work, capture.launches
    rows = device_rows(capture, device)
    found = []
    for stream in np.unique(work.stream[rows]).tolist():
        mine = rows[work.stream[rows] == stream]
        known = launches.row[mine] >= 0
        if known.any():
            start = work.start[mine]
            # Clocks that disagree can let an operation begin before its launch: that one never waited.
            launch = np.minimum(launches.start[mine], start)
            found.append(_of_stream(stream, capture.steps.span, launch, start, work.end[mine], known))
    return tuple(sorted(found, key=lambda stats: (-stats.num_launches, stats.stream)))


def _of_stream(
    stream: int, span: tuple[int, int], launch: Ints, start: Ints, end: Ints, known: np.ndarray
) -> QueueStats:
    busy_until = np.maximum.accumulate(np.concatenate([[np.iinfo(np.int64).min], end[:-1]]))
    idle = (launch >= busy_until)[known]
    launch, start = launch[known], start[known]
    waiting = np.clip(start, *span) - np.clip(launch, *span)
    return QueueStats(
        stream=stream,
        num_launches=len(launch),
        mean_depth=float(waiting.sum() / max(1, span[1] - span[0])),
        max_depth=max_depth(launch, start, span),
        empty_share=float(idle.mean()),
        median_delay_ns=int(median(start - launch)),
        timeline=depth_over_time(launch, start, span),
    )


def depth_over_time(launch: Ints, start: Ints, span: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """Return pairs (moment, queue depth from then on), with moments relative to the span's beginning. Points are
    thinned out; each group of consecutive points keeps its largest and smallest depth.
    """
    moment = np.clip(np.concatenate([launch, start]), *span) - span[0]
    change = np.repeat(np.array([1, -1], dtype=np.int64), len(launch))
    time, place = np.unique(moment, return_inverse=True)
    depth = np.zeros(len(time), dtype=np.int64)
    np.add.at(depth, place, change)
    depth = np.cumsum(depth)
    kept = thinned(np.stack([time, depth, depth], axis=1))
    return tuple(zip(time[kept].tolist(), depth[kept].tolist(), strict=True))


def max_depth(launch: Ints, start: Ints, span: tuple[int, int]) -> int:
    """Return the maximum number of operations launched but not begun at any moment of a span. Each operation counts in
    the half-open interval [launch, start).
    """
    moments = np.clip(launch, *span)
    launched = np.searchsorted(np.sort(launch), moments, side="right")
    begun = np.searchsorted(np.sort(start), moments, side="right")
    return int((launched - begun).max(initial=0))
