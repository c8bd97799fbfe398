"""Windows of the steps on the device: each ends when its own device work ends, and the next one begins there."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from steptune.tuner.profiling.intervals import EMPTY, Ints, median
from steptune.tuner.profiling.launches import Launches
from steptune.tuner.profiling.trace import Kind, Trace

UPDATES = r"^Optimizer\.step#"
LEAST_UPDATES = 3
"""Minimum number of parameter updates from which two steps can be recognised."""
ALIKE = 0.9
"""Minimum similarity (1 minus the relative difference) of the numbers of host events in two intervals between updates
for both intervals to count as the same part of the training loop.
"""
COMPLETE = 0.8
"""Minimum device work of the last step, as a share of the other steps': with less, the end of the capture cut it off.
"""


@dataclass(frozen=True, kw_only=True)
class StepWindows:
    """Windows of the steps: adjacent half-open intervals that cover the profiled time without gaps.

    Attributes:
        boundaries: int64 of length steps + 1: each window's start, and the last one's end.
        thread: The thread that ran the steps.
        host_starts: Time at which the host began each step, maybe ahead of the device. Empty without marks.
        host_end: Time at which the host ended the last step.
        marked: True if the trace shows where steps begin; without marks the whole trace is one window.
        cut_by: Name of the optimizer's ranges that separate steps if the profiler marked none; else empty.
        num_dropped: Incomplete steps at the end that are left out.
        num_ignored: Number of marks that are not steps of the loop: on other threads, around other marks, or empty.
    """

    boundaries: Ints
    thread: int
    host_starts: Ints
    marked: bool
    cut_by: str = ""
    host_end: int = 0
    num_dropped: int = 0
    num_ignored: int = 0

    def __len__(self) -> int:
        return len(self.boundaries) - 1

    def first(self, count: int) -> StepWindows:
        """Return the first steps, at most this many."""
        if not self.marked or count >= len(self):
            return self
        starts, end = self.host_starts[:count], int(self.host_starts[count])
        return replace(self, boundaries=self.boundaries[: count + 1], host_starts=starts, host_end=end)

    @property
    def span(self) -> tuple[int, int]:
        return int(self.boundaries[0]), int(self.boundaries[-1])


def find_steps(trace: Trace, launches: Launches) -> StepWindows:
    """Find the windows of the steps that the profiler marked, adjusted to the device's work.

    A step ends when its CPU part and all device work launched inside it have ended; the next begins
    there, and the first one when device work launched earlier has ended. Without marks a step lasts from
    one update of the parameters to the next. A trace without either is one window over everything. On a trace
    without device work the windows are those of the CPU.
    """
    steps = _marked(trace, launches) or _between_updates(trace)
    if steps is None:
        return StepWindows(
            boundaries=np.array(trace.span), thread=_busiest_thread(trace), host_starts=EMPTY, marked=False
        )
    start, end = steps.start, steps.end
    launched_end, num_launched = _launched(trace, launches, start, end)
    kept = len(start)
    if kept > 1 and num_launched[-1] < COMPLETE * median(num_launched[:-1]):
        kept -= 1
    follows = np.concatenate([start[1:], end[-1:]])
    # Where the device is done before the next step begins, what lies between belongs to the step before.
    ends = np.where(launched_end <= follows, np.maximum(end, follows), launched_end)
    ends = np.maximum.accumulate(np.maximum(ends, end))
    if kept == len(start):
        ends[-1] = max(int(end[-1]), int(launched_end[-1]), int(ends[-2]) if kept > 1 else 0)
    first = _first_start(trace, launches, int(start[0]), int(end[0]))
    boundaries = np.concatenate([[first], np.maximum(ends[:kept], first)])
    return StepWindows(
        boundaries=boundaries,
        thread=steps.thread,
        host_starts=start[:kept],
        host_end=int(follows[kept - 1]),
        marked=True,
        cut_by=steps.cut_by,
        num_dropped=len(start) - kept,
        num_ignored=steps.num_ignored,
    )


@dataclass(frozen=True, kw_only=True)
class _HostSteps:
    """Steps of the training loop on the host, in order."""

    thread: int
    start: Ints
    end: Ints
    cut_by: str = ""
    num_ignored: int = 0


def _marked(trace: Trace, launches: Launches) -> _HostSteps | None:
    """Return the steps that the profiler marked; None without marks."""
    host = trace.host
    marks = trace.host_rows(r"^ProfilerStep#\d+$", Kind.OPERATOR, Kind.ANNOTATION)
    if len(marks) == 0:
        return None
    real = _real_marks(trace, launches, marks)
    thread = int(host.thread[real[0]])
    return _HostSteps(thread=thread, start=host.start[real], end=host.end[real], num_ignored=len(marks) - len(real))


def _between_updates(trace: Trace) -> _HostSteps | None:
    """Return the steps from the end of one update to the end of the next; None with too few updates.

    With several optimizers, the one that ends last counts: if one updates several times per update of another, that is
    the slower one.
    """
    host = trace.host
    updates = trace.host_rows(UPDATES, Kind.OPERATOR, Kind.ANNOTATION)
    if len(updates) < LEAST_UPDATES:
        return None
    last = updates[host.end[updates].argmax()]
    own = updates[(host.name[updates] == host.name[last]) & (host.thread[updates] == host.thread[last])]
    ends = np.sort(host.end[own])
    ends = ends[:: -_period(host.start[host.thread == host.thread[last]], ends)][::-1]
    if len(ends) < LEAST_UPDATES:
        return None
    return _HostSteps(thread=int(host.thread[last]), start=ends[:-1], end=ends[1:], cut_by=trace.names[host.name[last]])


def _period(starts: Ints, ends: Ints) -> int:
    """Return the number of updates per step, which can be several: optimizers of one class, such as a generator's and
    its critic's, share a range name.
    """
    counts = np.diff(np.searchsorted(np.sort(starts), ends))
    for period in range(1, len(ends) // LEAST_UPDATES + 1):
        if (abs(counts[period:] - counts[:-period]) <= (1 - ALIKE) * counts.max(initial=0)).all():
            return period
    return 1


def _real_marks(trace: Trace, launches: Launches, marks: Ints) -> Ints:
    """Return the step marks of the thread with the most device work launched inside its marks (ties: most marks, then
    longest). Marks that are empty or contain others are left out.
    """
    host = trace.host

    def rank(thread: int) -> tuple[int, int, int]:
        own = marks[host.thread[marks] == thread]
        start, end = host.start[own], host.end[own]
        return int(_launched(trace, launches, start, end)[1].sum()), len(own), int((end - start).sum())

    thread = max(np.unique(host.thread[marks]).tolist(), key=rank)
    marks = marks[host.thread[marks] == thread]
    longer = marks[host.end[marks] > host.start[marks]]
    marks = longer if len(longer) else marks[:1]
    end = host.end[marks]
    contains_next = np.concatenate([end[1:] <= end[:-1], [False]])
    real: Ints = marks[~contains_next]
    return real


def _first_start(trace: Trace, launches: Launches, start: int, end: int) -> int:
    """Return the start of the first step on the device: the end of the work launched before the step, if all of that
    work runs before the step's own; otherwise the step's start on the host.
    """
    work = trace.work
    real = work.kind != Kind.SYNC
    known = launches.row >= 0
    own = real & known & (launches.start >= start) & (launches.start < end)
    if not own.any():
        return start
    first_own = int(work.start[own].min())
    earlier = real & np.where(known, launches.start < start, work.start < first_own)
    last = int(work.end[earlier].max(initial=start))
    return max(start, last) if last <= first_own else start


def _launched(trace: Trace, launches: Launches, start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Return two values for each CPU window: the last end of the device operations that it launched (0 if none), and
    their number.
    """
    work = trace.work
    rows = np.flatnonzero((launches.row >= 0) & (work.kind != Kind.SYNC))
    step = np.searchsorted(start, launches.start[rows], side="right") - 1
    inside = (step >= 0) & (launches.start[rows] < end[np.maximum(step, 0)])
    rows, step = rows[inside], step[inside]
    last = np.zeros(len(start), dtype=np.int64)
    np.maximum.at(last, step, work.end[rows])
    return last, np.bincount(step, minlength=len(start))


def _busiest_thread(trace: Trace) -> int:
    operators = np.flatnonzero(np.isin(trace.host.kind, (Kind.OPERATOR, Kind.ANNOTATION)))
    threads = trace.host.thread[operators] if len(operators) else trace.host.thread
    return int(np.bincount(threads).argmax()) if len(threads) else 0
