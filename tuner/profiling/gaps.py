"""Causes of a device's idle time: each gap is split at the launch call and attributed to the launching thread's
activity.

A gap of a device ends with an operation. Before the call that launched it, the host was late, and that
part is attributed to what the launching thread was doing: waiting for data, synchronising, allocating,
running the optimizer, or anything else. After the call comes the usual latency of a launch. If the
call came before the gap, the same length of time counts as the device's switch to a queued operation.
Beyond that the operation was queued but blocked: by another stream, a peer or a full queue.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steptune.tuner.costs.categories import PRIORITY, Category
from steptune.tuner.profiling.intervals import Ints, cover, pieces
from steptune.tuner.profiling.launches import Launches
from steptune.tuner.profiling.regions import Region, Regions
from steptune.tuner.profiling.steps import StepWindows
from steptune.tuner.profiling.trace import Kind, Trace

USUAL_LATENCY_NS = 10_000
"""Default latency of a launch into an empty queue, for traces that show none."""
LATENCY_RANGE_NS = (2_000, 50_000)
LATENCY_QUANTILE = 0.9
"""Quantile of launch delays that is used as the launch latency. Only launches into an empty queue count, because
nothing can block them.
"""

NO_ROW = -1
NOTHING_RECORDED = -1


@dataclass(frozen=True, kw_only=True)
class Gaps:
    """Idle gaps of one device in order, and the parts into which they are split by cause.

    Attributes:
        start, end: int64 by gap.
        next_row: Row of `trace.work` that ends the gap; -1 for a gap that lasts until the steps end.
        piece_start, piece_end: int64 by piece; the pieces of a gap tile it.
        piece_gap: The gap that each piece belongs to.
        piece_category: `PRIORITY` number of the category that is blamed.
        latency_ns: Time that counted as the latency of a launch.
    """

    start: Ints
    end: Ints
    next_row: Ints
    piece_start: Ints
    piece_end: Ints
    piece_gap: Ints
    piece_category: Ints
    latency_ns: int


class Blame:
    """Activity of each host thread over time. Of several activities at once, the first in this order counts: data,
    synchronisation, allocation, optimizer, host.

    If the trace has no events of a thread at that time (for instance a prefetching thread), it is taken to wait for the
    thread that runs the steps, whose activity is blamed.
    """

    def __init__(self, trace: Trace, regions: Regions, steps: StepWindows) -> None:
        self._span = steps.span
        self._stepping = steps.thread
        self._recorded = Region(trace, np.arange(len(trace.host)))
        self._order = (
            (Category.EPOCH_RESTART, regions.restart),
            (Category.DATA_WAIT, regions.loader),
            (Category.SYNCHRONISATION, regions.synchronisation),
            (Category.ALLOCATION, regions.allocation),
            (Category.OPTIMIZER_HOST, regions.optimizer),
            (Category.HOST, self._recorded),
        )
        self._codes = np.array([PRIORITY[category] for category, _ in self._order] + [NOTHING_RECORDED])
        self._covers: dict[int, tuple[Ints, Ints, Ints]] = {}

    def split(self, start: Ints, end: Ints, thread: int) -> tuple[Ints, Ints, Ints, Ints]:
        """Split intervals of one thread by activity; return the starts, ends, interval numbers and categories of the
        parts.
        """
        low, high, whole, code = self._split(start, end, thread)
        silent = code == NOTHING_RECORDED
        if thread != self._stepping and silent.any():
            inner = self._split(low[silent], high[silent], self._stepping)
            kept = ~silent
            low, high = np.concatenate([low[kept], inner[0]]), np.concatenate([high[kept], inner[1]])
            whole = np.concatenate([whole[kept], whole[silent][inner[2]]])
            code = np.concatenate([code[kept], inner[3]])
        return low, high, whole, np.where(code == NOTHING_RECORDED, PRIORITY[Category.HOST], code)

    def _split(self, start: Ints, end: Ints, thread: int) -> tuple[Ints, Ints, Ints, Ints]:
        if thread not in self._covers:
            low, high, owner = cover(self._span, [region.on(thread) for _, region in self._order])
            self._covers[thread] = low, high, self._codes[owner]
        low, high, code = self._covers[thread]
        first, last, whole, cut = pieces(start, end, (low, high))
        return first, last, whole, code[cut]


def find_gaps(
    trace: Trace, steps: StepWindows, rows: Ints, launches: Launches, blame: Blame, start: Ints, end: Ints
) -> Gaps:
    """Find the causes of the gaps of one device.

    Args:
        rows: The device's work in `trace.work`, in order.
        start, end: The gaps.
    """
    next_row = _next_rows(trace, rows, end)
    ends_gap = next_row != NO_ROW
    launch = np.where(ends_gap, launches.start[next_row], end)
    launched = ends_gap & (launches.row[next_row] >= 0)
    thread = np.where(launched, launches.thread[next_row], steps.thread)
    latency = launch_latency(trace, rows, launches)
    cut = np.where(launched, np.clip(launch, start, end), end)
    unknown = ends_gap & ~launched
    # Of an operation that was launched before the gap began, only the rest of the latency is the launch's.
    latent = np.clip(launch + latency, cut, end)
    dispatched = np.minimum(np.maximum(latent, cut + latency), end)
    numbers = np.arange(len(start))
    found = [
        _pieces(start[unknown], end[unknown], numbers[unknown], Category.UNKNOWN),
        _pieces(cut[launched], latent[launched], numbers[launched], Category.LAUNCH_LATENCY),
        _pieces(latent[launched], dispatched[launched], numbers[launched], Category.DISPATCH),
        _pieces(dispatched[launched], end[launched], numbers[launched], Category.QUEUED),
    ]
    for number in np.unique(thread[~unknown]).tolist():
        mine = ~unknown & (thread == number)
        low, high, whole, code = blame.split(start[mine], cut[mine], number)
        found.append((low, high, numbers[mine][whole], code))
    low, high, gap, code = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.lexsort((low, gap))
    order = order[high[order] > low[order]]
    return Gaps(
        start=start,
        end=end,
        next_row=next_row,
        piece_start=low[order],
        piece_end=high[order],
        piece_gap=gap[order],
        piece_category=code[order],
        latency_ns=latency,
    )


def _next_rows(trace: Trace, rows: Ints, end: Ints) -> Ints:
    """Return, for each gap, the row of the operation that starts at its end, or -1. Operations of zero duration are
    ignored.
    """
    work = trace.work
    rows = rows[work.end[rows] > work.start[rows]]
    if len(rows) == 0:
        return np.full(len(end), NO_ROW, dtype=np.int64)
    position = np.minimum(np.searchsorted(work.start[rows], end, side="left"), len(rows) - 1)
    found: Ints = np.where(work.start[rows[position]] == end, rows[position], NO_ROW)
    return found


def _pieces(start: Ints, end: Ints, gap: Ints, category: Category) -> tuple[Ints, Ints, Ints, Ints]:
    return start, end, gap, np.full(len(start), PRIORITY[category], dtype=np.int64)


def launch_latency(trace: Trace, rows: Ints, launches: Launches) -> int:
    """Return the usual time in nanoseconds from a launch call to the kernel's start with an empty queue."""
    if len(rows) == 0:
        return USUAL_LATENCY_NS
    work = trace.work
    busy_until = np.concatenate([[0], np.maximum.accumulate(work.end[rows])[:-1]])
    empty = (launches.row[rows] >= 0) & (launches.start[rows] >= busy_until) & (work.kind[rows] == Kind.KERNEL)
    delays = (work.start[rows] - launches.start[rows])[empty]
    delays = delays[delays > 0]
    if len(delays) == 0:
        return USUAL_LATENCY_NS
    return int(np.clip(np.quantile(delays, LATENCY_QUANTILE), *LATENCY_RANGE_NS))
