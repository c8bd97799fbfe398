"""Operator calls of all host threads: self time, nesting, and the device operations that each launched."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptune.tuner.profiling.capture import Capture
from steptune.tuner.profiling.intervals import EMPTY, Ints
from steptune.tuner.profiling.launches import Launches
from steptune.tuner.profiling.nesting import nest
from steptune.tuner.profiling.trace import Kind, Trace

NO_ROW = -1


@dataclass(frozen=True, kw_only=True)
class OperatorCalls:
    """Every operator call of a trace.

    Attributes:
        parent: int64 by row of `trace.host`: row of the operator directly around each operator, or -1.
        self_ns: int64 by row of `trace.host`: time without the operators inside, within `span`.
        launched_by: int64 by row of `trace.work`: row in `trace.host` of the innermost operator that launched it,
            or -1. If no operator is around the launch call, the external id identifies it.
        span: Interval in which own time counts.
    """

    parent: Ints
    self_ns: Ints
    launched_by: Ints
    span: tuple[int, int]

    def around(self, marked: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return a mask over `trace.host` of the operators that contain an operator selected by the given mask."""
        found = np.zeros(len(marked), dtype=bool)
        rows = np.flatnonzero(marked)
        while len(rows):
            rows = np.unique(self.parent[rows])
            rows = rows[rows >= 0]
            rows = rows[~found[rows]]
            found[rows] = True
        return found

    def inside(self, marked: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return a mask over `trace.host` of the operators that an operator selected by the given mask contains."""
        found = np.zeros(len(marked), dtype=bool)
        has_parent = self.parent >= 0
        while True:
            wider = has_parent & (marked | found)[self.parent]
            if (wider == found).all():
                return found
            found = wider


def operator_calls(trace: Trace, launches: Launches, span: tuple[int, int]) -> OperatorCalls:
    """Link operators to each other and to the device operations that they launched.

    Args:
        span: Interval in which own time counts.
    """
    host = trace.host
    parent = np.full(len(host), NO_ROW, dtype=np.int64)
    self_ns = np.zeros(len(host), dtype=np.int64)
    launched_by = np.full(len(trace.work), NO_ROW, dtype=np.int64)
    operators = np.flatnonzero((host.kind == Kind.OPERATOR) & (host.end > host.start))
    by_thread = rows_by(operators, host.thread[operators])
    launched = np.flatnonzero(launches.row >= 0)
    launched_on = rows_by(launched, launches.thread[launched])
    for thread, rows in by_thread.items():
        forest = nest(host.start[rows], host.end[rows])
        inner = forest.parent >= 0
        parent[rows[inner]] = rows[forest.parent[inner]]
        start, end, owner = forest.segments()
        length = np.maximum(0, np.minimum(end, span[1]) - np.maximum(start, span[0]))
        np.add.at(self_ns, rows[owner], length)
        work = launched_on.get(thread, EMPTY)
        if len(work):
            launched_by[work] = owners(launches.start[work], start, end, rows[owner])
    _by_external_id(trace, launched_by)
    return OperatorCalls(parent=parent, self_ns=self_ns, launched_by=launched_by, span=span)


def device_time_of_operators(capture: Capture, calls: OperatorCalls) -> Ints:
    """Return, for each row of `trace.host`, the device time of the operations that it launched. Operations that overlap
    the steps count in full, others not at all.
    """
    work, (low, high) = capture.trace.work, capture.steps.span
    total = np.zeros(len(capture.trace.host), dtype=np.int64)
    launched = calls.launched_by
    rows = np.flatnonzero((launched >= 0) & (work.kind != Kind.SYNC) & (work.end > low) & (work.start < high))
    np.add.at(total, launched[rows], (work.end - work.start)[rows])
    return total


def rows_by(rows: Ints, keys: npt.NDArray[np.integer]) -> dict[int, Ints]:
    """Group rows by key, keeping their order within each group."""
    if len(rows) == 0:
        return {}
    order = np.argsort(keys, kind="stable")
    found, first = np.unique(keys[order], return_index=True)
    return dict(zip(found.tolist(), np.split(rows[order], first[1:]), strict=True))


def owners(time: Ints, start: Ints, end: Ints, owner: Ints) -> Ints:
    """Return the owner of the interval that contains each moment; -1 if no interval does."""
    position = np.searchsorted(start, time, side="right") - 1
    inside = (position >= 0) & (time < end[np.maximum(position, 0)])
    return np.where(inside, owner[np.maximum(position, 0)], NO_ROW)


def _by_external_id(trace: Trace, launched_by: Ints) -> None:
    host, work = trace.host, trace.work
    missing = np.flatnonzero((launched_by < 0) & (work.external >= 0))
    operators = np.flatnonzero((host.kind == Kind.OPERATOR) & (host.external >= 0))
    if len(missing) == 0 or len(operators) == 0:
        return
    operators = operators[np.argsort(host.external[operators], kind="stable")]
    keys = host.external[operators]
    position = np.minimum(np.searchsorted(keys, work.external[missing]), len(keys) - 1)
    known = keys[position] == work.external[missing]
    launched_by[missing[known]] = operators[position[known]]
