"""Time of one device during the steps, as non-overlapping segments."""

from __future__ import annotations

import numpy as np

from steptune.tuner.costs.categories import CATEGORIES, COMPUTING, PRIORITY, Category
from steptune.tuner.profiling.blocking import blocking_ns
from steptune.tuner.profiling.capture import PHASES, Capture
from steptune.tuner.profiling.gaps import Blame, Gaps, find_gaps
from steptune.tuner.profiling.intervals import Intervals, Ints, cover, union_length
from steptune.tuner.profiling.segments import RUNTIME_COST, Segments
from steptune.tuner.profiling.trace import Kind

_GAP = -1
RECORDED = (Kind.OPERATOR, Kind.ANNOTATION, Kind.RUNTIME, Kind.PYTHON)
OVERLAPPING = (Category.COMMUNICATION, Category.PIPELINE_BUBBLE, Category.COPY_H2D, Category.COPY_D2H)


def device_rows(capture: Capture, device: int) -> Ints:
    """Return the rows of a device's operations that overlap the steps."""
    low, high = capture.steps.span
    rows = capture.trace.work_rows(device)
    work = capture.trace.work
    return rows[(work.end[rows] > low) & (work.start[rows] < high)]


def device_time(capture: Capture, device: int) -> tuple[Segments, Gaps]:
    """Return the device's time during the steps, idle time included, as non-overlapping segments. Also return the idle
    gaps with their causes.
    """
    span, work = capture.steps.span, capture.trace.work
    rows = device_rows(capture, device)
    category = capture.category[rows]

    def intervals(mask: np.ndarray) -> Intervals:
        return work.start[rows[mask]], work.end[rows[mask]]

    codes = np.unique(category)
    start, end, owner = cover(span, [intervals(category == code) for code in codes])
    code = np.where(owner == _GAP, _GAP, codes[owner] if len(codes) else _GAP)
    idle = code == _GAP
    blame = Blame(capture.trace, capture.regions, capture.steps)
    gaps = find_gaps(capture.trace, capture.steps, rows, capture.launches, blame, start[idle], end[idle])
    busy = ~idle
    start = np.concatenate([start[busy], gaps.piece_start])
    end = np.concatenate([end[busy], gaps.piece_end])
    code = np.concatenate([code[busy], gaps.piece_category])
    order = np.argsort(start, kind="stable")
    computes = np.isin(category, [PRIORITY[c] for c in COMPUTING])
    phase = capture.phase[rows]
    phases = cover(span, [intervals(computes & (phase == number)) for number in range(len(PHASES))])
    segments = Segments(
        start=start[order],
        end=end[order],
        category=code[order],
        phases=phases,
        overlapped=_overlapped(capture, rows, category, computes),
        blocking=blocking_ns(capture, rows[computes], start[order], end[order], code[order]),
        num_recorded=_num_recorded(capture, gaps),
    )
    return segments, gaps


def _overlapped(capture: Capture, rows: Ints, category: Ints, computes: np.ndarray) -> dict[str, int]:
    """Return the time of communication and copies that compute hides. It is reported separately and is not part of the
    sum of the exclusive categories.
    """
    work, span = capture.trace.work, capture.steps.span
    start, end = np.clip(work.start[rows], *span), np.clip(work.end[rows], *span)
    compute = union_length(start[computes], end[computes])
    result = {}
    for kind in OVERLAPPING:
        own = category == PRIORITY[kind]
        if own.any():
            joint = union_length(start[own | computes], end[own | computes])
            result[kind.value] = union_length(start[own], end[own]) + compute - joint
    return result


def _num_recorded(capture: Capture, gaps: Gaps) -> Ints:
    """Return the number of host events recorded while the device waited for the host, by category.

    Each event lengthened the wait, so profiling overhead is distributed in proportion to these numbers.
    """
    host = capture.trace.host
    counts = np.zeros(len(CATEGORIES), dtype=np.int64)
    recorded = np.flatnonzero(np.isin(host.kind, RECORDED))
    launched = gaps.next_row >= 0
    thread = np.where(launched, capture.launches.thread[gaps.next_row], capture.steps.thread)[gaps.piece_gap]
    for number in np.unique(thread).tolist():
        rows = recorded[host.thread[recorded] == number]
        costs = np.where(host.kind[rows] == Kind.RUNTIME, RUNTIME_COST, 1)
        total = np.concatenate([[0], np.cumsum(costs)])
        mine = thread == number
        first, last = (np.searchsorted(host.start[rows], edge[mine]) for edge in (gaps.piece_start, gaps.piece_end))
        np.add.at(counts, gaps.piece_category[mine], total[last] - total[first])
    # A launch begins where its latency does, but recording it keeps the host, not the device.
    counts[PRIORITY[Category.HOST]] += counts[PRIORITY[Category.LAUNCH_LATENCY]]
    counts[PRIORITY[Category.LAUNCH_LATENCY]] = 0
    return counts
