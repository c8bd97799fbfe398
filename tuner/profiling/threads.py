"""Threads of a process that launch device work: those that take turns with the thread that runs the steps, and those
that run concurrently with it.

The forward pass and autograd's threads take turns: while one launches, the others wait. A thread that copies batches
ahead launches at the same time, so that its calls cost the step no time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from steptune.tuner.profiling.capture import Capture
from steptune.tuner.profiling.intervals import pieces, union
from steptune.tuner.profiling.trace import Kind

AT_ONCE = 0.1
"""Minimum share of a thread's call time that must overlap calls of the thread that runs the steps for the two threads
to count as concurrent.
"""
MOST_BESIDE = 0.2
"""Maximum share of all launches that a concurrent thread may make; with more, the work of the steps itself is spread
over threads.
"""


def threads_beside(capture: Capture) -> list[int]:
    """Return the threads that launch device work concurrently with the thread that runs the steps, and those that
    launch only copies.
    """
    host, launches, steps = capture.trace.host, capture.launches, capture.steps
    low, high = steps.span
    inside = (launches.row >= 0) & (launches.start >= low) & (launches.start < high)
    threads, counts = np.unique(launches.thread[inside], return_counts=True)
    few = counts <= MOST_BESIDE * counts.sum()
    computing = np.unique(launches.thread[inside & (capture.trace.work.kind == Kind.KERNEL)])
    calls = (host.kind == Kind.RUNTIME) & (host.end > host.start)
    return [
        thread
        for thread in threads[few].tolist()
        if thread != steps.thread and (thread not in computing or _together(capture, calls, thread) > AT_ONCE)
    ]


def _together(capture: Capture, calls: npt.NDArray[np.bool_], thread: int) -> float:
    """Return the share of a thread's call time that overlaps calls of the thread that runs the steps."""
    host = capture.trace.host
    own, stepping = (calls & (host.thread == number) for number in (thread, capture.steps.thread))
    start, end = union(host.start[own], host.end[own])
    low, high, *_ = pieces(start, end, union(host.start[stepping], host.end[stepping]))
    return float((high - low).sum() / max(1, (end - start).sum()))
