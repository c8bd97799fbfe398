"""Timeline lanes of devices, streams and threads: each event is a cell; if a lane has too many, short neighbouring
cells are merged.

Merging makes one cell for each category in an interval, with the category's exact time and number of events in the
interval. So a picture can always show how much of an interval was busy, and how much each category took: no cell hides
a gap or another category.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from steptune.tuner.costs.categories import CATEGORIES, PRIORITY, Category
from steptune.tuner.profiling.capture import Capture
from steptune.tuner.profiling.device_time import device_rows
from steptune.tuner.profiling.intervals import EMPTY, Ints
from steptune.tuner.profiling.nesting import nest
from steptune.tuner.profiling.segments import Segments
from steptune.tuner.profiling.trace import Kind
from steptune.tuner.trace_records import Lane

MAX_CELLS = 3000
"""Maximum number of cells in a lane of an analysis: three for each pixel of most screens."""
FULL_CELLS = 80_000
"""Maximum number of cells in a lane for a zoomed-in view: as one line of JSON, such a lane stays below the size limit
of stored lines.
"""
MAX_LANES = 24
"""Maximum number of lanes: more rows cannot be told apart on a screen."""
MAX_STREAMS = 6
MAX_THREADS = 4
_CALLS = (Kind.OPERATOR, Kind.ANNOTATION, Kind.RUNTIME)
_NO_NAME = -1
_HOST = PRIORITY[Category.HOST]


@dataclass(frozen=True, kw_only=True)
class Spans:
    """Cells of one lane in order. The intervals of cells do not overlap; cells merged in the same interval share its
    start and end.

    Attributes:
        start, end: int64 nanoseconds.
        category: int64 number of a category.
        name: int64 number of a name, or -1.
        count: int64 number of events in the cell.
        busy_ns: int64 time of the cell's category in it.
    """

    start: Ints
    end: Ints
    category: Ints
    name: Ints
    count: Ints
    busy_ns: Ints

    def __len__(self) -> int:
        return len(self.start)


def lanes_of(capture: Capture, segments: Mapping[str, Segments], max_cells: int = MAX_CELLS) -> tuple[Lane, ...]:
    """Return the lanes of each device and of its streams, then the lanes of the threads.

    Args:
        segments: Segments of each device, which tile the steps.
        max_cells: Maximum cells of a lane.
    """
    found = []
    for device, tiles in segments.items():
        names = _device_names(capture, device)
        found.append(_lane(capture, device, "device", device, merged(_tiles(tiles, names), max_cells)))
        for stream, spans in _streams(capture, device):
            found.append(_lane(capture, device, "stream", f"stream {stream}", merged(spans, max_cells)))
    for label, spans in _threads(capture):
        found.append(_lane(capture, "", "thread", label, merged(spans, max_cells)))
    return tuple(found)


def merged(spans: Spans, max_cells: int) -> Spans:
    """Merge neighbouring cells shorter than a width, which grows until at most `max_cells` cells are left. If even one
    cell per category is too many, everything is merged at the largest width.
    """
    if len(spans) <= max_cells:
        return spans
    extent = int(spans.end.max() - spans.start[0])
    width = max(1, extent // (8 * max_cells))
    while True:
        run = _runs(spans, width)
        if run[-1] < max_cells or width > extent:
            found = _joined(spans, run)
            if len(found) <= max_cells or width > extent:
                return found
        width *= 2


def merged_below(spans: Spans, width_ns: int) -> Spans:
    """Merge neighbouring cells shorter than a width if they begin in the same interval of this width."""
    if len(spans) == 0:
        return spans
    return _joined(spans, _runs(spans, width_ns))


def _runs(spans: Spans, width: int) -> Ints:
    """Return the run number of each cell. A run is one long cell, or short neighbouring cells that begin in the same
    interval of the given width.
    """
    short = (spans.end - spans.start) < width
    bucket = (spans.start - spans.start[0]) // width  # from the first one: no width joins what lies around zero
    together = (spans.start[1:] == spans.start[:-1]) & (spans.end[1:] == spans.end[:-1])
    begins = ~together & ~(short[1:] & short[:-1] & (bucket[1:] == bucket[:-1]))
    run: Ints = np.concatenate([[0], np.cumsum(begins)])
    return run


def _joined(spans: Spans, run: Ints) -> Spans:
    """Merge the cells of each run by category, and name each merged cell after its longest event."""
    num_runs = int(run[-1]) + 1
    low = np.full(num_runs, np.iinfo(np.int64).max)
    high = np.full(num_runs, np.iinfo(np.int64).min)
    np.minimum.at(low, run, spans.start)
    np.maximum.at(high, run, spans.end)
    keys, cell = np.unique(run * (int(spans.category.max()) + 1) + spans.category, return_inverse=True)
    order = np.lexsort((-np.arange(len(run)), spans.busy_ns, cell))
    longest = order[np.flatnonzero(np.concatenate([cell[order][1:] != cell[order][:-1], [True]]))]
    count, busy = np.zeros(len(keys), dtype=np.int64), np.zeros(len(keys), dtype=np.int64)
    np.add.at(count, cell, spans.count)
    np.add.at(busy, cell, spans.busy_ns)
    return Spans(
        start=low[run[longest]],
        end=high[run[longest]],
        category=spans.category[longest],
        name=spans.name[longest],
        count=count,
        busy_ns=busy,
    )


def _tiles(segments: Segments, named: tuple[Ints, Ints, Ints]) -> Spans:
    """Return a device's segments as cells, each with the name of the operation that ran when the segment began."""
    start, end, name = named
    length = segments.end - segments.start
    found = np.full(len(length), _NO_NAME, dtype=np.int64)
    if len(start):
        place = np.maximum(np.searchsorted(start, segments.start, side="right") - 1, 0)
        inside = (start[place] <= segments.start) & (segments.start < end[place])
        found = np.where(inside, name[place], _NO_NAME)
    return Spans(
        start=segments.start,
        end=segments.end,
        category=segments.category,
        name=found,
        count=np.ones(len(length), dtype=np.int64),
        busy_ns=length,
    )


def _device_names(capture: Capture, device: str) -> tuple[Ints, Ints, Ints]:
    """Return starts, ends and names of a device's operations in order; on a CPU, of the thread that runs the steps."""
    if device == "cpu":
        start, end, row = _innermost(capture, capture.steps.thread)
        return start, end, capture.trace.host.name[row].astype(np.int64)
    work = capture.trace.work
    rows = device_rows(capture, int(device.partition(":")[2]))
    return work.start[rows], work.end[rows], work.name[rows].astype(np.int64)


def _streams(capture: Capture, device: str) -> Iterator[tuple[int, Spans]]:
    """Yield the busiest streams of a device with their operations, in order of stream numbers."""
    if device == "cpu":
        return
    work, (low, high) = capture.trace.work, capture.steps.span
    rows = device_rows(capture, int(device.partition(":")[2]))
    numbers = np.unique(work.stream[rows]).tolist()
    spans = {stream: _in_order(capture, rows[work.stream[rows] == stream], low, high) for stream in numbers}
    busiest = sorted(spans, key=lambda stream: -int(spans[stream].busy_ns.sum()))[:MAX_STREAMS]
    for stream in sorted(busiest):
        if len(spans[stream]):
            yield stream, spans[stream]


def _in_order(capture: Capture, rows: Ints, low: int, high: int) -> Spans:
    """Return the operations of one stream; if two overlap because of inexact clocks, the later one is cut."""
    work = capture.trace.work
    end = np.clip(work.end[rows], low, high)
    reach = np.concatenate([[low], np.maximum.accumulate(end)[:-1]])
    start = np.maximum(np.clip(work.start[rows], low, high), reach)
    kept = end > start
    return _events(start[kept], end[kept], capture.category[rows[kept]], work.name[rows[kept]].astype(np.int64))


def _events(start: Ints, end: Ints, category: Ints, name: Ints) -> Spans:
    return Spans(
        start=start,
        end=end,
        category=category,
        name=name,
        count=np.ones(len(start), dtype=np.int64),
        busy_ns=end - start,
    )


def _threads(capture: Capture) -> Iterator[tuple[str, Spans]]:
    """Yield the busiest threads, the main thread (which runs the steps) first. On a CPU that thread is the device."""
    trace, stepping = capture.trace, capture.steps.thread
    num_events = np.bincount(trace.host.thread, minlength=len(trace.threads))
    candidates = np.argsort(-num_events, kind="stable")[: 2 * MAX_THREADS].tolist()
    on_cpu = not capture.device_numbers
    busy = {}
    for thread in dict.fromkeys([stepping, *candidates]):
        start, end, row = _innermost(capture, thread)
        if len(row) and not (on_cpu and thread == stepping):
            category = _host_categories(capture, thread, start)
            busy[thread] = _events(start, end, category, trace.host.name[row].astype(np.int64))
    order = sorted(busy, key=lambda thread: (thread != stepping, -int(busy[thread].busy_ns.sum())))
    for thread in order[:MAX_THREADS]:
        yield "main thread" if thread == stepping else f"thread {trace.threads[thread][1]}", busy[thread]


def _innermost(capture: Capture, thread: int) -> tuple[Ints, Ints, Ints]:
    """Return starts, ends and rows of `trace.host` for the intervals in which a call is the innermost one. Step marks
    are not counted as calls.
    """
    host, (low, high) = capture.trace.host, capture.steps.span
    marks = capture.trace.names_matching(r"^ProfilerStep#\d+$")
    start, end = np.clip(host.start, low, high), np.clip(host.end, low, high)
    rows = np.flatnonzero((host.thread == thread) & np.isin(host.kind, _CALLS) & ~marks[host.name] & (end > start))
    if len(rows) == 0:
        return EMPTY, EMPTY, EMPTY
    rows = rows[np.lexsort((rows, -end[rows], start[rows]))]
    first, last, owner = nest(start[rows], end[rows]).segments()
    return first, last, rows[owner]


def _host_categories(capture: Capture, thread: int, time: Ints) -> Ints:
    """Return the category of a thread's work at each moment, with the same priorities as for the causes of gaps."""
    regions = capture.regions
    category = np.full(len(time), _HOST, dtype=np.int64)
    threads = np.full(len(time), thread)
    for region, meaning in (
        (regions.optimizer, Category.OPTIMIZER_HOST),
        (regions.allocation, Category.ALLOCATION),
        (regions.synchronisation, Category.SYNCHRONISATION),
        (regions.loader, Category.DATA_WAIT),
        (regions.restart, Category.EPOCH_RESTART),
    ):
        category[region.contains(threads, time)] = PRIORITY[meaning]
    return category


def _lane(capture: Capture, device: str, kind: str, label: str, spans: Spans) -> Lane:
    origin = capture.steps.span[0]
    used, name = np.unique(spans.name, return_inverse=True)
    codes, category = np.unique(spans.category, return_inverse=True)
    return Lane(
        device=device,
        kind=kind,
        label=label,
        names=tuple(capture.trace.names[number] if number >= 0 else "" for number in used.tolist()),
        categories=tuple(CATEGORIES[number].category.value for number in codes.tolist()),
        start_ns=tuple((spans.start - origin).tolist()),
        length_ns=tuple((spans.end - spans.start).tolist()),
        name=tuple(name.tolist()),
        category=tuple(category.tolist()),
        count=tuple(spans.count.tolist()),
        busy_ns=tuple(spans.busy_ns.tolist()),
    )
