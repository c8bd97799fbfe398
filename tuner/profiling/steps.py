"""Step windows: from the first step's beginning, each to the end of its own device work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tuner.profiling.trace import Kind, Trace


@dataclass(frozen=True, kw_only=True)
class StepWindows:
    """Adjacent half-open windows that tile the profiled stretch."""

    windows: tuple[tuple[int, int], ...]
    thread: int
    """The thread that ran the steps."""

    @property
    def span(self) -> tuple[int, int]:
        return self.windows[0][0], self.windows[-1][1]


def find_steps(trace: Trace) -> StepWindows:
    """Device-adjusted windows of the steps that the profiler marked.

    A step ends when its CPU part and all device work launched inside it have ended; the next begins
    there. A trace without marks is one window over everything. On a trace without device work the
    windows are those of the CPU.
    """
    marks = trace.matching(r"^ProfilerStep#\d+$", Kind.OPERATOR, Kind.ANNOTATION)
    if len(marks) == 0:
        low, high = int(trace.start.min()), int(trace.end.max())
        return StepWindows(windows=((low, high),), thread=_busiest_thread(trace))
    thread = int(trace.thread[marks[0]])
    marks = marks[trace.thread[marks] == thread]
    launched_end = _launched_ends(trace, trace.start[marks], trace.end[marks])
    boundary = int(trace.start[marks[0]])
    windows = []
    for number, mark in enumerate(marks):
        end = max(int(trace.end[mark]), int(launched_end[number]))
        if number + 1 < len(marks) and launched_end[number] <= trace.start[marks[number + 1]]:
            end = max(end, int(trace.start[marks[number + 1]]))
        end = max(end, boundary)
        windows.append((boundary, end))
        boundary = end
    return StepWindows(windows=tuple(windows), thread=thread)


def _launched_ends(trace: Trace, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Last end of the device work that was launched inside each CPU window (0 if none)."""
    device = trace.indices(Kind.KERNEL, Kind.COPY)
    runtime = trace.indices(Kind.RUNTIME)
    last = np.zeros(len(start), dtype=np.int64)
    if len(device) == 0 or len(runtime) == 0:
        return last
    launch_of = dict(zip(trace.correlation[runtime].tolist(), trace.start[runtime].tolist(), strict=True))
    launches = np.array([launch_of.get(c, -1) for c in trace.correlation[device].tolist()], dtype=np.int64)
    step = np.searchsorted(start, launches, side="right") - 1
    inside = (launches >= 0) & (step >= 0)
    inside[inside] &= launches[inside] < end[step[inside]]
    np.maximum.at(last, step[inside], trace.end[device][inside])
    return last


def _busiest_thread(trace: Trace) -> int:
    operators = trace.indices(Kind.OPERATOR, Kind.ANNOTATION)
    chosen = operators if len(operators) else np.arange(len(trace))
    return int(np.bincount(trace.thread[chosen]).argmax())
