"""Collectives of one rank: size, duration, and the part of it that is exposed.

A collective consists of the kernels of one record of the communication library; without records, of those that one
annotation ("nccl:all_to_all") launched, or of one kernel recognised by its name. On a CPU it is the annotation of the
thread that runs it ("gloo:all_reduce"), which lasts from the call to the end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from steptune.tuner.costs.categories import COMPUTING, PRIORITY, Category
from steptune.tuner.network.collective_costs import bus_bytes_per_s
from steptune.tuner.profiling.argument_shapes import item_bytes, parse_arguments
from steptune.tuner.profiling.capture import Capture
from steptune.tuner.profiling.communication import ANNOTATIONS, collective_name
from steptune.tuner.profiling.intervals import Intervals, Ints, median, pieces, union
from steptune.tuner.profiling.regions import HOST
from steptune.tuner.profiling.segments import Segments
from steptune.tuner.profiling.trace import Kind, Trace
from steptune.tuner.records import CollectiveStats

_COMMUNICATION = tuple(PRIORITY[c] for c in (Category.COMMUNICATION, Category.PIPELINE_BUBBLE))
_COMPUTING = tuple(PRIORITY[c] for c in COMPUTING)


@dataclass(frozen=True, kw_only=True)
class Message:
    """Kind and size of a collective. If the trace does not record them, `num_bytes` is 0 and `sequence` is -1."""

    name: str
    group: str
    group_size: int
    num_bytes: int
    dtype: str
    sequence: int = -1


@dataclass(frozen=True, kw_only=True)
class CollectiveCalls:
    """The collectives of one rank, in order.

    Attributes:
        messages: Kind and size of each call.
        start, end: int64 nanoseconds by call, of the rank's own clock, as in its trace.
        step: int64 by call: number N of the `ProfilerStep#N` that launched it; -1 outside, 0 without marks.
        busy_ns: int64 by call: time of its kernels inside the steps.
        exposed_ns: int64 by call: the part of `busy_ns` that no compute hides. Simultaneous calls each count in full.
        exposed_start, exposed_end: int64, disjoint and in order: what counts as exposed communication in the steps,
            on the same clock.
    """

    messages: tuple[Message, ...]
    start: Ints
    end: Ints
    step: Ints
    busy_ns: Ints
    exposed_ns: Ints
    exposed_start: Ints
    exposed_end: Ints

    def __len__(self) -> int:
        return len(self.messages)

    def shifted(self, by_ns: int) -> CollectiveCalls:
        """Return the calls with all times shifted by `by_ns`."""
        times = ("start", "end", "exposed_start", "exposed_end")
        return replace(self, **{name: getattr(self, name) + by_ns for name in times})


def collective_calls(capture: Capture, segments: Segments, device: int | None) -> CollectiveCalls:
    """Return the collectives that run in the steps on one device, or on a CPU (`device` None).

    Args:
        segments: Segments of that device or CPU, from which compute is read.
    """
    start, end, launch, owner, messages = _on_cpu(capture) if device is None else _on_device(capture, device)
    low, high = capture.steps.span
    computing = np.isin(segments.category, _COMPUTING)
    compute = union(segments.start[computing], segments.end[computing])
    first, last = np.clip(start, low, high), np.clip(end, low, high)
    exposed = segments.category == PRIORITY[Category.COMMUNICATION]
    count = len(messages)
    busy, hidden = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    np.add.at(busy, owner, last - first)
    np.add.at(hidden, owner, _inside(first, last, compute))
    begin, finish = np.full(count, np.iinfo(np.int64).max), np.full(count, np.iinfo(np.int64).min)
    called = begin.copy()
    np.minimum.at(begin, owner, start)
    np.maximum.at(finish, owner, end)
    np.minimum.at(called, owner, launch)
    order = np.lexsort((begin, called))
    return CollectiveCalls(
        messages=tuple(messages[number] for number in order.tolist()),
        start=begin[order],
        end=finish[order],
        step=_steps(capture, called[order]),
        busy_ns=busy[order],
        exposed_ns=(busy - hidden)[order],
        exposed_start=segments.start[exposed],
        exposed_end=segments.end[exposed],
    )


def _inside(start: Ints, end: Ints, intervals: Intervals) -> Ints:
    """Return, for each span from `start` to `end`, the length of its part inside `intervals`, which are disjoint."""
    low, high, whole, _ = pieces(start, end, intervals)
    total = np.zeros(len(start), dtype=np.int64)
    np.add.at(total, whole, high - low)
    return total


def _steps(capture: Capture, time: Ints) -> Ints:
    """Return the step number of each moment, from the `ProfilerStep#N` mark around it; -1 outside all marks, 0 if the
    trace has no marks.
    """
    trace = capture.trace
    marks = trace.host_rows(r"^ProfilerStep#\d+$", *HOST)
    marks = marks[trace.host.thread[marks] == capture.steps.thread]
    if len(marks) == 0:
        return np.zeros(len(time), dtype=np.int64)
    numbers = np.array([int(trace.names[name].partition("#")[2]) for name in trace.host.name[marks]], dtype=np.int64)
    position = np.maximum(np.searchsorted(trace.host.start[marks], time, side="right") - 1, 0)
    inside = (trace.host.start[marks][position] <= time) & (time < trace.host.end[marks][position])
    return np.where(inside, numbers[position], -1)


_Found = tuple[Ints, Ints, Ints, Ints, list[Message]]
"""Collectives found in a trace: start, end, launch time and call index of each operation, then the kind and size of
each call.
"""


def _on_device(capture: Capture, device: int) -> _Found:
    trace, work, (low, high) = capture.trace, capture.trace.work, capture.steps.span
    rows = np.flatnonzero(
        (work.device == device)
        & (work.kind == Kind.KERNEL)
        & np.isin(capture.category, _COMMUNICATION)
        & (work.end > low)
        & (work.start < high)
    )
    annotation = _annotations_around(capture, rows)
    record = capture.record[rows]
    # Keys of three kinds that cannot meet: records, annotations, single kernels.
    key = np.where(record >= 0, record, len(trace.collectives) + len(trace.host) + rows)
    by_note = (record < 0) & (annotation >= 0)
    key[by_note] = len(trace.collectives) + annotation[by_note]
    _, first, owner = np.unique(key, return_index=True, return_inverse=True)
    messages = [
        _message(trace, int(record[i]), int(annotation[i]), trace.names[work.name[rows[i]]]) for i in first.tolist()
    ]
    known = capture.launches.row[rows] >= 0
    launch = np.where(known, capture.launches.start[rows], work.start[rows])
    return work.start[rows], work.end[rows], launch, owner, messages


def _annotations_around(capture: Capture, rows: Ints) -> Ints:
    """Return, for each operation, the row in `trace.host` of the communication library's annotation that encloses its
    launch; -1 if there is none.
    """
    trace, launches = capture.trace, capture.launches
    host = trace.host
    found = np.full(len(rows), -1, dtype=np.int64)
    notes = trace.host_rows(ANNOTATIONS, *HOST)
    for thread in np.unique(host.thread[notes]).tolist():
        mine = notes[host.thread[notes] == thread]
        here = np.flatnonzero((launches.row[rows] >= 0) & (launches.thread[rows] == thread))
        time = launches.start[rows[here]]
        position = np.searchsorted(host.start[mine], time, side="right") - 1
        note = mine[np.maximum(position, 0)]
        inside = (position >= 0) & (time < host.end[note])
        found[here[inside]] = note[inside]
    return found


def _on_cpu(capture: Capture) -> _Found:
    trace, host, (low, high) = capture.trace, capture.trace.host, capture.steps.span
    rows = trace.host_rows(ANNOTATIONS, *HOST)
    rows = rows[(host.end[rows] > low) & (host.start[rows] < high)]
    messages = [_message(trace, -1, row, trace.names[host.name[row]]) for row in rows.tolist()]
    return host.start[rows], host.end[rows], host.start[rows], np.arange(len(rows)), messages


def _message(trace: Trace, record: int, annotation: int, kernel: str) -> Message:
    """Return the kind and size of a collective, from a record, an annotation or the name of a kernel."""
    if record >= 0:
        said = trace.collectives[record]
        return Message(
            name=collective_name(said.name),
            group=said.group_name,
            group_size=said.group_size or trace.num_ranks,
            num_bytes=said.message_elements * item_bytes(said.dtype),
            dtype=said.dtype,
            sequence=said.sequence,
        )
    if annotation < 0:
        return Message(name=collective_name(kernel), group="", group_size=trace.num_ranks, num_bytes=0, dtype="")
    shape = int(trace.host.shape[annotation])
    tensors = [t for t in parse_arguments(trace.shapes[shape]).tensors if t] if shape >= 0 else []
    return Message(
        name=collective_name(trace.names[trace.host.name[annotation]].partition(":")[2]),
        group="",
        group_size=trace.num_ranks,
        num_bytes=max((tensor.num_bytes for tensor in tensors), default=0),
        dtype="",
    )


def bus_bandwidth(message: Message, time_ns: float | None) -> float | None:
    """Return the bus bandwidth in bytes per second; None if size or time is unknown."""
    if not time_ns or time_ns < 0 or not message.num_bytes or message.group_size < 2:
        return None
    return bus_bytes_per_s(message.name, message.num_bytes, message.group_size, time_ns)


def kinds_of(messages: tuple[Message, ...]) -> dict[Message, list[int]]:
    """Group the indices of calls by the kind and size of their collective."""
    found: dict[Message, list[int]] = {}
    for number, message in enumerate(messages):
        kind = Message(
            name=message.name,
            group=message.group,
            group_size=message.group_size,
            num_bytes=message.num_bytes,
            dtype=message.dtype,
        )
        found.setdefault(kind, []).append(number)
    return found


def collective_stats(calls: CollectiveCalls) -> tuple[CollectiveStats, ...]:
    """Return statistics by kind, the most time first. Bus bandwidth is computed from the median duration, waits
    included.
    """
    found = []
    for kind, numbers in kinds_of(calls.messages).items():
        usual = median((calls.end - calls.start)[numbers])
        found.append(
            CollectiveStats(
                name=kind.name,
                group=kind.group,
                group_size=kind.group_size,
                message_bytes=kind.num_bytes,
                dtype=kind.dtype,
                count=len(numbers),
                total_ns=int(calls.busy_ns[numbers].sum()),
                exposed_ns=int(calls.exposed_ns[numbers].sum()),
                bus_bytes_per_s=bus_bandwidth(kind, usual),
            )
        )
    return tuple(sorted(found, key=lambda stats: -stats.total_ns))
