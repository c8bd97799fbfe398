"""Time of a CPU in exclusive segments, by the innermost operator on the thread that runs the steps.

Time in which that thread runs no operator while another thread runs a collective is communication.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from steptune.tuner.costs.categories import CATEGORIES, COMPUTE, PRIORITY, Category, classify_operator
from steptune.tuner.profiling.capture import PHASES, Capture
from steptune.tuner.profiling.communication import ANNOTATIONS, POINT_TO_POINT, collective_name
from steptune.tuner.profiling.intervals import Intervals, Ints, cover, pieces
from steptune.tuner.profiling.nesting import Nest, nest
from steptune.tuner.profiling.regions import HOST, LOADER, OPTIMIZER, RESTART
from steptune.tuner.profiling.segments import Segments
from steptune.tuner.profiling.trace import Trace
from steptune.tuner.records import StepPhase

_INHERITS = -1
_STICKY = tuple(PRIORITY[c] for c in (Category.OPTIMIZER, Category.DATA_WAIT, Category.EPOCH_RESTART))
_COMPUTE = tuple(PRIORITY[c] for c in COMPUTE)


def cpu_time(capture: Capture) -> Segments:
    """Return the CPU's time during the steps as non-overlapping segments without gaps, each with one category."""
    trace, span = capture.trace, capture.steps.span
    rows = stepping_rows(capture)
    host = trace.host
    forest = nest(np.clip(host.start[rows], *span), np.clip(host.end[rows], *span))
    updating = capture.regions.optimizer.contains(host.thread[rows], host.start[rows])
    category = _categories(trace, rows, forest, updating)
    recompute = capture.regions.recompute.contains(host.thread[rows], host.start[rows])
    category[recompute & np.isin(category, _COMPUTE)] = PRIORITY[Category.RECOMPUTE]
    phase = _phases(capture, rows, category)
    start, end, owner = forest.segments()
    code, during = category[owner], phase[owner]
    closure = ~capture.regions.optimizer.contains(np.full(len(start), capture.steps.thread), start)
    closure &= code == PRIORITY[Category.OPTIMIZER]
    code[closure], during[closure] = PRIORITY[Category.HOST], -1
    segments = _with_waits(capture, *_filled(span, start, end, code))
    return Segments(
        start=segments[0],
        end=segments[1],
        category=segments[2],
        phases=_filled(span, start, end, during, missing=-1),
        overlapped={},
        blocking={},
        num_recorded=np.bincount(category, minlength=len(CATEGORIES)),
    )


def stepping_rows(capture: Capture) -> Ints:
    """Return the rows of the operators and annotations inside the steps, on the thread that runs the steps, by start
    time.
    """
    host, (low, high) = capture.trace.host, capture.steps.span
    wanted = np.isin(host.kind, HOST) & (host.thread == capture.steps.thread)
    start, end = np.clip(host.start, low, high), np.clip(host.end, low, high)
    rows = np.flatnonzero(wanted & (end > start))
    # Cutting at the span's beginning makes ties of what began before it: the longer first again.
    return rows[np.lexsort((rows, -end[rows], start[rows]))]


def _categories(trace: Trace, rows: Ints, forest: Nest, updating: npt.NDArray[np.bool_]) -> Ints:
    """Return the category of each operator; an operator that cannot be classified by name gets its parent operator's
    category.

    Args:
        updating: True for operators that run in a step of the optimizer, outside its closure.
    """
    by_name = np.array([_class_of(name) for name in trace.names], dtype=np.int64)
    own = by_name[trace.host.name[rows]]
    category = np.full(len(rows), PRIORITY[Category.HOST], dtype=np.int64)
    for level in forest.levels:
        parent = forest.parent[level]
        outer = np.where(parent >= 0, category[parent], PRIORITY[Category.HOST])
        outer[~updating[level] & (outer == PRIORITY[Category.OPTIMIZER])] = PRIORITY[Category.HOST]
        inherits = (own[level] == _INHERITS) | np.isin(outer, _STICKY)
        category[level] = np.where(inherits, outer, own[level])
    return category


def _class_of(name: str) -> int:
    if re.search(LOADER, name):
        return PRIORITY[Category.DATA_WAIT]
    if re.search(RESTART, name):
        return PRIORITY[Category.EPOCH_RESTART]
    if re.search(OPTIMIZER, name):
        return PRIORITY[Category.OPTIMIZER]
    if name.startswith("ProfilerStep#"):
        return PRIORITY[Category.HOST]
    category = classify_operator(name) or (Category.OTHER_COMPUTE if name.startswith("aten::") else None)
    return _INHERITS if category is None else PRIORITY[category]


def _phases(capture: Capture, rows: Ints, category: Ints) -> Ints:
    """Return, for each operator, the index of its phase in `PHASES`; -1 for operators that do not compute."""
    host = capture.trace.host
    backward = capture.regions.backward.contains(host.thread[rows], host.start[rows])
    phase = np.where(backward, PHASES.index(StepPhase.BACKWARD), PHASES.index(StepPhase.FORWARD))
    phase[category == PRIORITY[Category.RECOMPUTE]] = PHASES.index(StepPhase.RECOMPUTE)
    phase[category == PRIORITY[Category.OPTIMIZER]] = PHASES.index(StepPhase.OPTIMIZER)
    computing = (*_COMPUTE, PRIORITY[Category.RECOMPUTE], PRIORITY[Category.OPTIMIZER])
    phase[~np.isin(category, computing)] = -1
    return phase


def _filled(
    span: tuple[int, int], start: Ints, end: Ints, code: Ints, missing: int = PRIORITY[Category.HOST]
) -> tuple[Ints, Ints, Ints]:
    """Return the segments, with the time between them filled by segments of the category `missing`."""
    edges_low = np.concatenate([[span[0]], end])
    edges_high = np.concatenate([start, [span[1]]])
    between = edges_high > edges_low
    low = np.concatenate([start, edges_low[between]])
    high = np.concatenate([end, edges_high[between]])
    codes = np.concatenate([code, np.full(int(between.sum()), missing, dtype=np.int64)])
    order = np.argsort(low, kind="stable")
    return low[order], high[order], codes[order]


def _with_waits(capture: Capture, start: Ints, end: Ints, category: Ints) -> tuple[Ints, Ints, Ints]:
    """Count host time as exposed communication where another thread's collective was running.

    Time inside operators that only dispatch others (autograd's) stays the host's.
    """
    trace, steps = capture.trace, capture.steps
    rows = trace.host_rows(ANNOTATIONS, *HOST)
    if len(rows) == 0:
        return start, end, category
    pairs = np.array([collective_name(trace.names[name]) in POINT_TO_POINT for name in trace.host.name[rows].tolist()])
    operators = np.flatnonzero((trace.host.kind == HOST[1]) & (trace.host.thread == steps.thread))

    def spans(chosen: Ints) -> Intervals:
        return trace.host.start[chosen], trace.host.end[chosen]

    low, high, owner = cover(steps.span, [spans(operators), spans(rows[~pairs]), spans(rows[pairs])])
    codes = np.array([0, PRIORITY[Category.COMMUNICATION], PRIORITY[Category.PIPELINE_BUBBLE], 0])[owner]
    first, last, whole, cut = pieces(start, end, (low, high))
    waits = (codes[cut] > 0) & (category[whole] == PRIORITY[Category.HOST])
    return first, last, np.where(waits, codes[cut], category[whole])
