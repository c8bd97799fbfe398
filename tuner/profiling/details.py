"""A second window of the same steps, with call stacks and argument shapes, joined to the first by the order of calls.

Recording stacks slows the host several times, so that no time is ever taken from such a window. What it knows of an
operator's nth call in the steps (its shapes, its `nn.Module`, its line) is said of the nth call in the first window,
where both windows call that operator equally often. Others are left without.
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
    """A window with stacks and shapes.

    Attributes:
        num_steps: Steps in it.
        memory: Of the allocator, where it recorded that, too.
    """

    trace: Trace
    source: SourceLines
    num_steps: int
    memory: tuple[MemoryStats, ...]


@dataclass(frozen=True, kw_only=True)
class DetailsFile:
    """The trace of such a window.

    Attributes:
        blocks_before, blocks_after: Memory of the job's tensors when it began and when it ended, where that is known.
    """

    path: Path
    num_steps: int
    blocks_before: tuple[Block, ...] = ()
    blocks_after: tuple[Block, ...] = ()


def read_details(file: DetailsFile) -> Details:
    """Read a window.

    Raises:
        TraceError: The file is not a trace that can be read.
    """
    details = details_of(read_trace(file.path), file.num_steps)
    memory = with_classes(details.memory, details.trace, file.blocks_before, file.blocks_after)
    return replace(details, memory=memory)


def details_of(trace: Trace, num_steps: int) -> Details:
    """Details of a trace that was read."""
    capture = link(trace)
    calls = operator_calls(trace, capture.launches, trace.span)
    source = SourceLines(trace, calls)
    return Details(trace=trace, source=source, num_steps=num_steps, memory=memory_stats(capture))


def matched(trace: Trace, steps: StepWindows, details: Details) -> Ints:
    """Rows of operators in the other window, by row of `trace.host`; -1 where there is none."""
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
    """Rows of operators that begin in a stretch, in order."""
    host = trace.host
    rows = np.flatnonzero((host.kind == Kind.OPERATOR) & (host.start >= low) & (host.start < high))
    if len(rows) == 0:
        return {}
    rows = rows[np.argsort(host.name[rows], kind="stable")]
    names, first = np.unique(host.name[rows], return_index=True)
    return {trace.names[name]: own for name, own in zip(names.tolist(), np.split(rows, first[1:]), strict=True)}


def seen_in(match: Ints, time_ns: Ints, num_rows: int) -> Ints:
    """Times by row of `trace.host`, said of the matching rows of the other window."""
    found = np.zeros(num_rows, dtype=np.int64)
    known = match >= 0
    np.add.at(found, match[known], time_ns[known])
    return found


def with_shapes(trace: Trace, details: Details, match: Ints) -> Trace:
    """The trace with shapes of arguments from the other window, where it has none itself."""
    if (trace.host.shape >= 0).any():
        return trace
    shape = np.where(match >= 0, details.trace.host.shape[match], np.int32(-1)).astype(np.int32)
    return replace(trace, shapes=details.trace.shapes, host=replace(trace.host, shape=shape))


def joined_lines(trace: Trace, calls: OperatorCalls, steps: StepWindows, details: Details, match: Ints) -> SourceLines:
    """Lines and modules of a trace that has none itself, from the other window."""
    theirs = details.source.modules
    modules = theirs.seen_from(match, times=len(steps) // details.num_steps)
    return SourceLines(trace, calls, modules, lambda row: details.source.of(int(match[row])) if match[row] >= 0 else "")
