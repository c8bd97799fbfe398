"""A second window of the same steps, with call stacks and argument shapes, joined to the first by the order of calls.

Recording stacks makes the host several times slower, so times of such a window are never used. The data on an
operator's nth call in the steps (its shapes, its `nn.Module`, its line) is assigned to the nth call in the first
window, if both windows call that operator equally often. Other operators get no data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from steptune.tuner.profiling.capture import link
from steptune.tuner.profiling.intervals import Ints
from steptune.tuner.profiling.memory import memory_stats
from steptune.tuner.profiling.operator_calls import NO_ROW, OperatorCalls, operator_calls
from steptune.tuner.profiling.reader import read_trace
from steptune.tuner.profiling.source_lines import SourceLines
from steptune.tuner.profiling.steps import StepWindows
from steptune.tuner.profiling.tensor_memory import Block, with_classes
from steptune.tuner.profiling.trace import Kind, Trace
from steptune.tuner.trace_records import MemoryStats


@dataclass(frozen=True, kw_only=True)
class Details:
    """Window with call stacks and argument shapes.

    Attributes:
        num_steps: Number of steps in it.
        memory: Allocator statistics, if the window recorded them.
    """

    trace: Trace
    source: SourceLines
    num_steps: int
    memory: tuple[MemoryStats, ...]


@dataclass(frozen=True, kw_only=True)
class DetailsFile:
    """Trace file of a window with details.

    Attributes:
        blocks_before, blocks_after: Memory of the job's tensors at the window's beginning and its end, if known.
    """

    path: Path
    num_steps: int
    blocks_before: tuple[Block, ...] = ()
    blocks_after: tuple[Block, ...] = ()


def read_details(file: DetailsFile) -> Details:
    """Read a window with details from its file.

    Raises:
        TraceError: The file is not a trace that can be read.
    """
    details = details_of(read_trace(file.path), file.num_steps)
    memory = with_classes(details.memory, details.trace, file.blocks_before, file.blocks_after)
    return replace(details, memory=memory)


def details_of(trace: Trace, num_steps: int) -> Details:
    """Build the window with details from a trace in memory."""
    capture = link(trace)
    calls = operator_calls(trace, capture.launches, trace.span)
    source = SourceLines(trace, calls)
    return Details(trace=trace, source=source, num_steps=num_steps, memory=memory_stats(capture))


def matched(trace: Trace, steps: StepWindows, details: Details) -> Ints:
    """Return, for each row of `trace.host`, the row of the matching operator in the details window; -1 if there is
    none.
    """
    match = np.full(len(trace.host), NO_ROW, dtype=np.int64)
    if not steps.marked:
        return match
    theirs = _by_name(details.trace, *details.trace.span)
    bounds = [*steps.host_starts.tolist(), steps.host_end]
    for first in range(0, len(steps), details.num_steps):
        if first + details.num_steps <= len(steps):
            for name, rows in _by_name(trace, bounds[first], bounds[first + details.num_steps]).items():
                others = theirs.get(name)
                if others is not None and len(others) == len(rows):
                    match[rows] = others
    return match


def _by_name(trace: Trace, low: int, high: int) -> dict[str, Ints]:
    """Return the rows of the operators that begin in an interval, grouped by name; each group is in row order."""
    host = trace.host
    rows = np.flatnonzero((host.kind == Kind.OPERATOR) & (host.start >= low) & (host.start < high))
    if len(rows) == 0:
        return {}
    rows = rows[np.argsort(host.name[rows], kind="stable")]
    names, first = np.unique(host.name[rows], return_index=True)
    return {trace.names[name]: own for name, own in zip(names.tolist(), np.split(rows, first[1:]), strict=True)}


def seen_in(match: Ints, time_ns: Ints, num_rows: int) -> Ints:
    """Return the time of each row of the details window: the sum over all rows of `trace.host` that match it."""
    found = np.zeros(num_rows, dtype=np.int64)
    known = match >= 0
    np.add.at(found, match[known], time_ns[known])
    return found


def with_shapes(trace: Trace, details: Details, match: Ints) -> Trace:
    """Return the trace with argument shapes from the details window, if it has none itself."""
    if (trace.host.shape >= 0).any():
        return trace
    shape = np.where(match >= 0, details.trace.host.shape[match], np.int32(-1)).astype(np.int32)
    return replace(trace, shapes=details.trace.shapes, host=replace(trace.host, shape=shape))


def joined_lines(trace: Trace, calls: OperatorCalls, steps: StepWindows, details: Details, match: Ints) -> SourceLines:
    """Return source lines and modules from the details window, for a trace without call stacks."""
    theirs = details.source.modules
    modules = theirs.seen_from(match, times=len(steps) // details.num_steps)
    return SourceLines(trace, calls, modules, lambda row: details.source.of(int(match[row])) if match[row] >= 0 else "")
