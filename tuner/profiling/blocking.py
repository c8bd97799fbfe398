"""Exposed communication that lengthens the steps."""

from __future__ import annotations

import numpy as np

from steptune.tuner.costs.categories import PRIORITY, Category
from steptune.tuner.profiling.capture import Capture
from steptune.tuner.profiling.gaps import LATENCY_RANGE_NS
from steptune.tuner.profiling.intervals import Intervals, Ints, distinct, pieces, union
from steptune.tuner.profiling.launches import NOT_LAUNCHED
from steptune.tuner.profiling.regions import Region, joined
from steptune.tuner.profiling.trace import Kind


def blocking_ns(capture: Capture, computing: Ints, start: Ints, end: Ints, code: Ints) -> dict[str, int]:
    """Return the exposed communication that lengthens the steps, in nanoseconds by category.

    Such communication delays an operation that was launched already, or a host that waits for the device.

    Where a busy host launched the next compute only later, the collective filled a stretch that would have been idle
    without it: faster communication would gain nothing there. Nor can a step become shorter than the host's work: a
    rank that runs ahead of its peers waits for them in collectives while its host is at work on the next step. Work
    without a launch counts as held up.

    Args:
        computing: Rows of the device's compute, in order.
        start, end, code: Segments with their categories.
    """
    work, launches = capture.trace.work, capture.launches
    waits = _waits(capture, computing)
    slack = _slack(capture, waits)
    result = {}
    for kind in (Category.COMMUNICATION, Category.PIPELINE_BUBBLE):
        mine = code == PRIORITY[kind]
        if not mine.any():
            continue
        low, high = start[mine], end[mine]
        position = np.searchsorted(work.start[computing], low, side="left")
        follows = position < len(computing)
        launch = np.full(len(low), NOT_LAUNCHED, dtype=np.int64)
        launch[follows] = launches.start[computing[position[follows]]]
        launch = np.clip(launch, low, high)
        held = int((high - launch).sum()) + _inside(low, launch, waits)
        result[kind.value] = min(held, slack)
        slack -= result[kind.value]
    return result


def _waits(capture: Capture, computing: Ints) -> Intervals:
    """Return the waits of launching threads for the device: synchronising calls, copies of pageable memory, and
    launches into a full queue.
    """
    trace, host = capture.trace, capture.trace.host
    copies = trace.host_rows(r"^(cuda|hip)Memcpy", Kind.RUNTIME)
    calls = distinct(capture.launches.row[computing])
    calls = calls[calls >= 0]
    blocked = calls[host.end[calls] - host.start[calls] > LATENCY_RANGE_NS[1]]
    waiting = [capture.regions.synchronisation, Region(trace, copies), Region(trace, blocked)]
    threads = {capture.steps.thread, *np.unique(host.thread[calls]).tolist()}
    parts = [joined(waiting, thread) for thread in threads]
    return union(np.concatenate([start for start, _ in parts]), np.concatenate([end for _, end in parts]))


def _slack(capture: Capture, waits: Intervals) -> int:
    """Return the slack of the host in the steps: the step time less the host's own work."""
    steps = capture.steps
    low, high = steps.span
    begun = steps.host_starts
    if len(begun) < 2:
        return high - low
    needed = int(begun[-1] - begun[0]) - _inside(begun[:1], begun[-1:], waits)
    return max(0, high - low - needed * len(steps) // (len(begun) - 1))


def _inside(start: Ints, end: Ints, cuts: Intervals) -> int:
    """Return the total time of disjoint intervals inside `cuts`."""
    low, high, _, _ = pieces(start, end, cuts)
    return int((high - low).sum())
