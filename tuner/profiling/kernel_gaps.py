"""Statistics of a device's gaps, and the longest gaps with the operations before and after each."""

from __future__ import annotations

import numpy as np

from steptune.tuner.costs.categories import CATEGORIES
from steptune.tuner.profiling.capture import Capture
from steptune.tuner.profiling.device_time import device_rows
from steptune.tuner.profiling.gap_sites import gap_sites
from steptune.tuner.profiling.gaps import Gaps
from steptune.tuner.profiling.intervals import Ints, median
from steptune.tuner.profiling.operator_calls import OperatorCalls
from steptune.tuner.profiling.source_lines import SourceLines
from steptune.tuner.trace_records import Gap, GapStats

BUCKETS = ("<1 us", "1-10 us", "10-100 us", "0.1-1 ms", "1-10 ms", ">10 ms")
BUCKET_EDGES_NS = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
"""Lower edges, in nanoseconds, of the buckets of gap lengths; the first bucket has none."""
NO_ROW = -1


def gap_stats(
    capture: Capture, device: int, gaps: Gaps, calls: OperatorCalls, source: SourceLines, top: int = 20
) -> GapStats:
    """Return statistics of all gaps of one device inside the steps, including gaps at the first and last boundary."""
    length = gaps.end - gaps.start
    bucket = np.searchsorted(BUCKET_EDGES_NS, length, side="right")
    time_ns = np.zeros(len(BUCKETS), dtype=np.int64)
    np.add.at(time_ns, bucket, length)
    counts = np.bincount(bucket, minlength=len(BUCKETS))
    longest = np.argsort(-length, kind="stable")[:top]
    return GapStats(
        count=len(length),
        total_ns=int(length.sum()),
        median_ns=int(median(length)) if len(length) else 0,
        p99_ns=int(np.quantile(length, 0.99)) if len(length) else 0,
        histogram=dict(zip(BUCKETS, counts.tolist(), strict=True)),
        time_ns=dict(zip(BUCKETS, time_ns.tolist(), strict=True)),
        longest=_described(capture, device, gaps, longest, calls, source),
        sites=gap_sites(capture.trace, gaps, top),
    )


def _described(
    capture: Capture, device: int, gaps: Gaps, numbers: Ints, calls: OperatorCalls, source: SourceLines
) -> tuple[Gap, ...]:
    trace, origin = capture.trace, capture.steps.span[0]
    before = rows_before(capture, device, gaps.start[numbers])
    category = dominant_categories(gaps, numbers)
    found = []
    for number, row_before, code in zip(numbers.tolist(), before.tolist(), category.tolist(), strict=True):
        row_after = int(gaps.next_row[number])
        found.append(
            Gap(
                start_ns=int(gaps.start[number]) - origin,
                length_ns=int(gaps.end[number] - gaps.start[number]),
                category=CATEGORIES[code].category.value,
                kernel_before=_name(trace.names, trace.work.name, row_before),
                kernel_after=_name(trace.names, trace.work.name, row_after),
                operator_before=_name(trace.names, trace.host.name, _launcher(calls, row_before)),
                operator_after=_name(trace.names, trace.host.name, _launcher(calls, row_after)),
                source=_source(capture, calls, source, row_after),
                module=source.modules.name(_launcher(calls, row_after)),
            )
        )
    return tuple(found)


def rows_before(capture: Capture, device: int, time: Ints) -> Ints:
    """Return, for each moment, the row of `trace.work` that ends exactly then (of several, the one that began last), or
    -1.
    """
    rows = device_rows(capture, device)
    work = capture.trace.work
    if len(rows) == 0:
        return np.full(len(time), NO_ROW, dtype=np.int64)
    rows = rows[np.lexsort((work.start[rows], work.end[rows]))]
    position = np.searchsorted(work.end[rows], time, side="right") - 1
    found = rows[np.maximum(position, 0)]
    return np.where((position >= 0) & (work.end[found] == time), found, NO_ROW)


def dominant_categories(gaps: Gaps, numbers: Ints) -> Ints:
    """Return, for each gap, the `PRIORITY` number of the category with the largest part of the gap; if categories tie,
    the smallest number.
    """
    place = np.full(len(gaps.start), NO_ROW, dtype=np.int64)
    place[numbers] = np.arange(len(numbers))
    row = place[gaps.piece_gap]
    wanted = row >= 0
    time = np.zeros((len(numbers), len(CATEGORIES)), dtype=np.int64)
    np.add.at(time, (row[wanted], gaps.piece_category[wanted]), (gaps.piece_end - gaps.piece_start)[wanted])
    best: Ints = time.argmax(axis=1)
    return best


def _launcher(calls: OperatorCalls, row: int) -> int:
    return int(calls.launched_by[row]) if row >= 0 else NO_ROW


def _name(names: tuple[str, ...], column: np.ndarray, row: int) -> str:
    return names[column[row]] if row >= 0 else ""


def _source(capture: Capture, calls: OperatorCalls, source: SourceLines, row: int) -> str:
    """Return the source line of the operator that launched an operation, or of its launch call."""
    if row < 0:
        return ""
    operator, launch = _launcher(calls, row), int(capture.launches.row[row])
    if operator >= 0 and (line := source.of(operator)):
        return line
    return source.at(int(capture.launches.start[row]), int(capture.launches.thread[row])) if launch >= 0 else ""
