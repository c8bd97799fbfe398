"""Lanes of every stream and thread, thinned out for a picture that can be looked at closely.

Long operations stay as they are, and so does what happens around the longest gaps, where one looks closely. Others,
shorter than the picture can show, are joined where they are neighbours, with the time in which something ran.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptune.tuner.profiling.capture import Capture
from steptune.tuner.profiling.categories import CATEGORIES, PRIORITY, Category
from steptune.tuner.profiling.device_time import device_rows
from steptune.tuner.profiling.intervals import EMPTY, Intervals, Ints, union
from steptune.tuner.profiling.nesting import nest
from steptune.tuner.profiling.segments import Segments
from steptune.tuner.profiling.trace import Kind
from steptune.tuner.trace_records import GapStats, Lane

MAX_SPANS = 3000
"""Of a lane: three to a pixel of most screens."""
NUM_GAPS = 20
MAX_STREAMS = 6
MAX_THREADS = 4
_CALLS = (Kind.OPERATOR, Kind.ANNOTATION, Kind.RUNTIME)
_NO_NAME = -1
_HOST = PRIORITY[Category.HOST]


@dataclass(frozen=True, kw_only=True)
class Spans:
    """Stretches of one lane, in order, that do not overlap.

    Attributes:
        start, end: int64 nanoseconds.
        category: int64 `PRIORITY` number.
        name: int64 index into the trace's names, or -1.
        count: int64 events in it.
        busy_ns: int64 time in it in which something ran.
    """

    start: Ints
    end: Ints
    category: Ints
    name: Ints
    count: Ints
    busy_ns: Ints

    def __len__(self) -> int:
        return len(self.start)


def lanes_of(capture: Capture, segments: Mapping[str, Segments], gaps: Mapping[str, GapStats]) -> tuple[Lane, ...]:
    """Lanes of each device and of its streams, then those of the threads.

    Args:
        segments: By device: they tile the steps.
        gaps: By device.
    """
    found = []
    closely = _around(capture, gaps)
    for device, tiles in segments.items():
        names = _device_names(capture, device)
        found.append(_lane(capture, device, "device", device, thinned(_tiles(tiles, names), MAX_SPANS, closely)))
        for stream, spans in _streams(capture, device):
            found.append(_lane(capture, device, "stream", f"stream {stream}", thinned(spans, MAX_SPANS, closely)))
    for label, spans in _threads(capture):
        found.append(_lane(capture, "", "thread", label, thinned(spans, MAX_SPANS, closely)))
    return tuple(found)


def _around(capture: Capture, gaps: Mapping[str, GapStats]) -> Intervals:
    """The longest gaps, the longest first, with some time before and after each."""
    longest = sorted((gap for stats in gaps.values() for gap in stats.longest), key=lambda gap: -gap.length_ns)
    start = np.array([gap.start_ns for gap in longest[:NUM_GAPS]], dtype=np.int64) + capture.steps.span[0]
    length = np.array([gap.length_ns for gap in longest[:NUM_GAPS]], dtype=np.int64)
    return start - 3 * length // 4, start + 7 * length // 4


def thinned(spans: Spans, max_spans: int, closely: Intervals = (EMPTY, EMPTY)) -> Spans:
    """At most `max_spans` of them: neighbours that are shorter than some width become one, and the width is no wider
    than it must be. A joined span is of the category with the most time in it and has the name of the longest event.

    Args:
        closely: Stretches in which nothing is joined: as many of them, in their order, as there is room for.
    """
    if len(spans) <= max_spans:
        return spans
    apart = _touching(spans, _that_fit(spans, closely, max_spans // 2))
    width = max(1, int(spans.end[-1] - spans.start[0]) // (8 * max_spans))
    while True:
        run = _runs(spans, width, apart)
        if run[-1] < max_spans:
            return _joined(spans, run)
        width *= 2


def _that_fit(spans: Spans, intervals: Intervals, room: int) -> Intervals:
    """The first of these intervals, as long as all spans in them find room; as disjoint ones."""
    low, high = intervals
    counts = np.searchsorted(spans.start, high) - np.searchsorted(spans.end, low, side="right")
    num = int(np.searchsorted(np.cumsum(counts), room, side="right"))
    return union(low[:num], high[:num])


def _touching(spans: Spans, intervals: Intervals) -> npt.NDArray[np.bool_]:
    """Which spans are partly or wholly in disjoint intervals."""
    low, high = intervals
    if len(low) == 0:
        return np.zeros(len(spans), dtype=bool)
    place = np.minimum(np.searchsorted(high, spans.start, side="right"), len(low) - 1)
    touching: npt.NDArray[np.bool_] = (low[place] < spans.end) & (high[place] > spans.start)
    return touching


def _runs(spans: Spans, width: int, apart: npt.NDArray[np.bool_]) -> Ints:
    """Number of the run that each span belongs to: a long one, or short neighbours in one stretch of this width."""
    short = ((spans.end - spans.start) < width) & ~apart
    bucket = (spans.start - spans.start[0]) // width  # from the first one: no width joins what lies around zero
    begins = ~(short[1:] & short[:-1] & (bucket[1:] == bucket[:-1]))
    run: Ints = np.concatenate([[0], np.cumsum(begins)])
    return run


def _joined(spans: Spans, run: Ints) -> Spans:
    first = np.flatnonzero(np.concatenate([[True], run[1:] != run[:-1]]))
    last = np.concatenate([first[1:], [len(run)]]) - 1
    num_categories = len(CATEGORIES)
    cells = np.bincount(run * num_categories + spans.category, spans.busy_ns, len(first) * num_categories)
    time = cells.reshape(len(first), num_categories)
    candidates = np.flatnonzero(spans.busy_ns == np.maximum.reduceat(spans.busy_ns, first)[run])
    longest = candidates[np.searchsorted(run[candidates], np.arange(len(first)))]
    return Spans(
        start=spans.start[first],
        end=spans.end[last],
        category=time.argmax(axis=1),
        name=spans.name[longest],
        count=np.add.reduceat(spans.count, first),
        busy_ns=np.add.reduceat(spans.busy_ns, first),
    )


def _tiles(segments: Segments, named: tuple[Ints, Ints, Ints]) -> Spans:
    """Spans of a device, with the name of what ran when each segment began."""
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
    """Starts, ends and names of what ran there, in order: of a CPU on the thread that runs the steps."""
    if device == "cpu":
        start, end, row = _innermost(capture, capture.steps.thread)
        return start, end, capture.trace.host.name[row].astype(np.int64)
    work = capture.trace.work
    rows = device_rows(capture, int(device.partition(":")[2]))
    return work.start[rows], work.end[rows], work.name[rows].astype(np.int64)


def _streams(capture: Capture, device: str) -> Iterator[tuple[int, Spans]]:
    """Those with the most time in operations, by number."""
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
    """Operations of one stream; clocks that let two overlap cut the later one."""
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
    """Those that do the most, the one that runs the steps first: the main thread. On a CPU that is the device."""
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
    """Starts, ends and rows in `trace.host` of the innermost call at each moment; marks of steps are none."""
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
    """Category of a thread's work at each moment, in the order in which gaps are blamed."""
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
