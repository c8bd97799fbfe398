"""Conversion of events to the columns of a trace.

The event categories (`cat`) had other names before 2022 ("Kernel", "Runtime"); ROCm and others have their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from steptune.tuner.profiling.argument_shapes import NEEDS_VALUES
from steptune.tuner.profiling.events import NO_RAW, Args, Event, ExactEvent, Header
from steptune.tuner.profiling.times import NO_TIME, nanoseconds, times
from steptune.tuner.profiling.trace import Collective, Device, Host, Ints, Kind, MemoryPoint, Trace, TraceError, Work
from steptune.tuner.wording import counted

_HOST = {
    "cpu_op": Kind.OPERATOR,
    "operator": Kind.OPERATOR,
    "user_annotation": Kind.ANNOTATION,
    "cuda_runtime": Kind.RUNTIME,
    "cuda_driver": Kind.RUNTIME,
    "hip_runtime": Kind.RUNTIME,
    "hip_driver": Kind.RUNTIME,
    "runtime": Kind.RUNTIME,
    "driver": Kind.RUNTIME,
    "xpu_runtime": Kind.RUNTIME,
    "xpu_driver": Kind.RUNTIME,
    "mtia_runtime": Kind.RUNTIME,
    "privateuse1_runtime": Kind.RUNTIME,
    "privateuse1_driver": Kind.RUNTIME,
    "overhead": Kind.OVERHEAD,
    "python_function": Kind.PYTHON,
}
_WORK = {
    "kernel": Kind.KERNEL,
    "concurrent_kernel": Kind.KERNEL,
    "gpu_memcpy": Kind.COPY,
    "gpu_memset": Kind.COPY,
    "memcpy": Kind.COPY,
    "memset": Kind.COPY,
    "cuda_sync": Kind.SYNC,
    "xpu_sync": Kind.SYNC,
    "collective_comm": Kind.KERNEL,
}
MEMORY_EVENT = "[memory]"
MOST_NS = 2**62
"""Maximum absolute time (146 years): the sum and the difference of two smaller times fit into an int64."""
NS_PER_YEAR = 365 * 86_400 * 10**9


class Columns:
    """Builder of a trace from events that are added chunk by chunk."""

    def __init__(self) -> None:
        self._names = _Interner()
        self._threads = _Interner()
        self._shapes = _Interner({b"": -1})
        self._stacks = _Interner({"": -1})
        self._host = _Table(_HOST_TYPES)
        self._work = _Table(_WORK_TYPES)
        self._collectives: list[Collective] = []
        self._memory: list[MemoryPoint] = []
        self._group_of = _Groups()
        self._num_negative = 0
        self._num_untimed = 0
        self.num_events = 0

    def take(self, events: Sequence[Event] | Sequence[ExactEvent], *, exact: bool = False) -> None:
        """Add a chunk of the file's events.

        Raises:
            InexactTimesError: Floats cannot hold these times. Nothing was taken.
        """
        groups: list[list[Any]] = [[], [], [], []]
        append = [group.append for group in groups]
        group_of = self._group_of
        for event in events:
            append[group_of[event.cat]](event)
        _, host, work, instants = groups
        host = [event for event in host if event.ph == "X"]
        work = [event for event in work if event.ph == "X"]
        host_times, work_times = times(host, exact), times(work, exact)
        if host:
            self._host.add(self._timed(self._host_columns(host, *host_times)))
        if work:
            self._work.add(self._timed(self._work_columns(work, *work_times)))
        for event in instants:
            if event.name == MEMORY_EVENT:
                self._take_memory(event, exact)
        self.num_events += len(events)

    def finish(self, header: Header, *, framing: str, num_lost: int, is_whole: bool, losses: Sequence[str]) -> Trace:
        """Build the trace of all added events.

        Raises:
            TraceError: No event has a time, or they lie too far apart.
        """
        host, work = self._host.taken(), self._work.taken()
        firsts = [int(table[0].min()) for table in (host, work) if len(table[0])]
        if not firsts:
            raise TraceError(f"it holds no timed event{self._instead()}: record it with torch.profiler.profile(...)")
        origin = min(firsts)
        losses = [*losses]
        if self._num_negative:
            losses.append(f"{counted(self._num_negative, 'event')} with a negative duration, treated as instants")
        if self._num_untimed:
            losses.append(f"{counted(self._num_untimed, 'event')} without a time, left out")
        base = header.base_time_ns if isinstance(header.base_time_ns, int) else 0
        if abs(origin + base) >= MOST_NS:
            losses.append(f"baseTimeNanoseconds={base} is not a valid clock time and was ignored")
            base = 0
        last = max(int(table[1].max()) for table in (host, work) if len(table[0]))
        if last - origin >= MOST_NS:
            years = (last - origin) / NS_PER_YEAR
            raise TraceError(f"its events span {years:.0f} years, so one of its clocks is wrong: record it again")
        host, work = _in_order(host, origin), _in_order(work, origin)
        rank, num_ranks, distributed = _ranks(header.distributed)
        return Trace(
            names=tuple(self._names),
            threads=tuple((str(pid), str(tid)) for pid, tid in self._threads),
            shapes=tuple(self._shapes),
            stacks=tuple(self._stacks),
            host=Host(**dict(zip(_HOST_TYPES, host, strict=True))),
            work=Work(**dict(zip(_WORK_TYPES, work, strict=True))),
            collectives=tuple(self._collectives),
            memory=tuple(sorted((replace(p, time=p.time - origin) for p in self._memory), key=lambda p: p.time)),
            devices=_devices(header.device_properties),
            rank=rank,
            num_ranks=num_ranks,
            distributed=distributed,
            origin_ns=origin,
            base_time_ns=base,
            framing=framing,
            num_events=self.num_events,
            num_lost=num_lost,
            is_whole=is_whole,
            losses=tuple(losses),
        )

    def _instead(self) -> str:
        """Describe which events the file has instead of torch.profiler's."""
        others = sorted({category for category, group in self._group_of.items() if category and not group})
        if not others and not self.num_events:
            return ""
        if not others:
            return f" of torch.profiler ({counted(self.num_events, 'event')} without a category)"
        return (
            f" of a category that torch.profiler writes (looked for cpu_op, cuda_runtime, kernel and the like), but "
            f"{counted(self.num_events, 'event')} of {', '.join(map(repr, others[:3]))}"
        )

    # --- one piece --------------------------------------------------------------------------------

    def _timed(self, columns: tuple[npt.NDArray[Any], ...]) -> tuple[npt.NDArray[Any], ...]:
        """Return the events that have a time; an event that would end before its start ends at its start."""
        start, end, *_ = columns
        negative = end < start
        if negative.any():
            self._num_negative += int(negative.sum())
            np.maximum(start, end, out=end)
        known = start != NO_TIME
        if known.all():
            return columns
        self._num_untimed += len(known) - int(known.sum())
        return tuple(column[known] for column in columns)

    def _host_columns(self, events: list[Any], start: Ints, end: Ints) -> tuple[npt.NDArray[Any], ...]:
        args = [event.args for event in events]
        self._take_collectives(args)
        threads = map(self._threads.__getitem__, [(event.pid, event.tid) for event in events])
        return (
            start,
            end,
            _kinds(events, _HOST),
            self._name_ids(events),
            np.fromiter(threads, np.int32, len(events)),
            _ints([a.correlation for a in args], np.int64),
            _either([a.external for a in args], [a.external_old for a in args]),
            _ints([a.sequence for a in args], np.int64),
            _ints([a.forward_thread for a in args], np.int32),
            self._shape_ids(events),
            np.fromiter(map(self._stacks.__getitem__, [a.call_stack for a in args]), np.int32, len(args)),
        )

    def _work_columns(self, events: list[Any], start: Ints, end: Ints) -> tuple[npt.NDArray[Any], ...]:
        args = [event.args for event in events]
        self._take_collectives(args)
        streams = _ints([a.stream for a in args], np.int32)
        for row in np.flatnonzero(streams < 0).tolist():
            streams[row] = _stream_of(events[row].tid)
        occupancy = np.array([a.occupancy for a in args], np.float32)
        blocks_per_sm = np.array([a.blocks_per_sm for a in args], np.float32)
        return (
            start,
            end,
            _kinds(events, _WORK),
            self._name_ids(events),
            np.maximum(_ints([a.device for a in args], np.int32), 0),
            streams,
            _ints([a.correlation for a in args], np.int64),
            _either([a.external for a in args], [a.external_old for a in args]),
            _ints([a.num_bytes for a in args], np.int64),
            np.where(occupancy < 0, np.float32(np.nan), occupancy / np.float32(100)),
            np.where(blocks_per_sm < 0, np.float32(np.nan), blocks_per_sm),
            _ints([a.graph_node for a in args], np.int64),
        )

    def _name_ids(self, events: list[Any]) -> npt.NDArray[np.int32]:
        return np.fromiter(map(self._names.__getitem__, [event.name for event in events]), np.int32, len(events))

    def _shape_ids(self, events: list[Any]) -> npt.NDArray[np.int32]:
        """Return an id for each event's argument text: shapes and types as recorded, with the values that determine an
        operator's work.
        """
        if all(event.args.dims is NO_RAW for event in events):
            return np.full(len(events), -1, np.int32)
        return np.fromiter(map(self._shapes.__getitem__, map(_shape_text, events)), np.int32, len(events))

    def _take_collectives(self, events: list[Args]) -> None:
        self._collectives += [
            Collective(
                external=args.external,
                correlation=args.correlation,
                name=args.collective,
                message_elements=max(args.in_elements, args.out_elements),
                dtype=args.dtype,
                group_name=args.group_name,
                group_size=args.group_size,
                sequence=args.collective_sequence,
            )
            for args in events
            if args.collective
        ]

    def _take_memory(self, event: Any, exact: bool) -> None:
        args = event.args
        if args.total_allocated < 0:
            return
        time = int(nanoseconds([event.ts], exact)[0])
        if time == NO_TIME:
            self._num_untimed += 1
            return
        self._memory.append(
            MemoryPoint(
                time=time,
                device=f"cuda:{args.device_id}" if args.device_type > 0 else "cpu",
                allocated_bytes=args.total_allocated,
                reserved_bytes=max(0, args.total_reserved),
                **_block(args),
            )
        )


def _block(args: Args) -> dict[str, int]:
    """Return the address and the size of the memory block that an allocator event describes; empty unless the event has
    both as integers.
    """
    if type(args.address) is not int or type(args.block_bytes) is not int or not args.address:
        return {}
    return {"address": args.address, "num_bytes": args.block_bytes}


_HOST_TYPES = {
    "start": np.int64,
    "end": np.int64,
    "kind": np.int8,
    "name": np.int32,
    "thread": np.int32,
    "correlation": np.int64,
    "external": np.int64,
    "sequence": np.int64,
    "forward_thread": np.int32,
    "shape": np.int32,
    "stack": np.int32,
}
_WORK_TYPES = {
    "start": np.int64,
    "end": np.int64,
    "kind": np.int8,
    "name": np.int32,
    "device": np.int32,
    "stream": np.int32,
    "correlation": np.int64,
    "external": np.int64,
    "num_bytes": np.int64,
    "occupancy": np.float32,
    "blocks_per_sm": np.float32,
    "graph_node": np.int64,
}


class _Table:
    """Columns that grow chunk by chunk, in place: many small arrays would fragment memory, and joining them would take
    twice the memory.
    """

    def __init__(self, types: Mapping[str, Any]) -> None:
        self._types = tuple(types.values())
        self._columns = [bytearray() for _ in types]

    def add(self, columns: Sequence[npt.NDArray[Any]]) -> None:
        for grown, column, dtype in zip(self._columns, columns, self._types, strict=True):
            grown += np.ascontiguousarray(column, dtype).data

    def taken(self) -> list[npt.NDArray[Any]]:
        """Return the columns. The table is empty afterwards."""
        columns, self._columns = self._columns, [bytearray() for _ in self._types]
        return [np.frombuffer(column, dtype) for column, dtype in zip(columns, self._types, strict=True)]


class _Interner(dict[Any, int]):
    """Mapping that gives every new key the next number."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number


class _Groups(dict[str, int]):
    """Mapping from event categories to the number of a table: 0 none, 1 host, 2 device, 3 instants."""

    def __missing__(self, category: str) -> int:
        lowered = category.lower()
        number = 1 if lowered in _HOST else 2 if lowered in _WORK else 3 if lowered in ("", "cpu_instant_event") else 0
        self[category] = number
        return number


def _kinds(events: list[Any], kinds: Mapping[str, Kind]) -> npt.NDArray[np.int8]:
    categories = [event.cat for event in events]
    found = {category: kinds[category.lower()] for category in set(categories)}
    return np.fromiter(map(found.__getitem__, categories), np.int8, len(categories))


def _ints(values: list[int], dtype: type[np.signedinteger[Any]]) -> npt.NDArray[Any]:
    """Convert integers to an array, with -1 (not recorded) for those out of range: writers store -1 as unsigned."""
    try:
        return np.array(values, dtype)
    except OverflowError:
        limits = np.iinfo(dtype)
        return np.array([value if limits.min <= value <= limits.max else -1 for value in values], dtype)


def _either(new: list[int], old: list[int]) -> Ints:
    values = _ints(new, np.int64)
    missing = values < 0
    return np.where(missing, _ints(old, np.int64), values) if missing.any() else values


def _stream_of(tid: int | str) -> int:
    """Return the stream number from a thread name ("stream 7" in old traces)."""
    digits = re.search(r"\d+", str(tid))
    return int(digits.group()) if digits else 0


def _shape_text(event: Any) -> bytes:
    args: Args = event.args
    if args.dims is NO_RAW:
        return b""
    text = bytes(args.dims) + b"|" + bytes(args.types)
    told = args.values is not NO_RAW and NEEDS_VALUES.search(event.name)
    return text + b"|" + bytes(args.values) if told else text


def _in_order(columns: list[npt.NDArray[Any]], origin: int) -> list[npt.NDArray[Any]]:
    """Sort columns by time and make times relative to the origin. Each column is freed once it is sorted."""
    order = _by_time(*columns[:2])
    columns.reverse()
    start, end, *rest = [columns.pop()[order] for _ in range(len(columns))]
    start -= origin
    end -= origin
    return [start, end, *rest]


def _by_time(start: Ints, end: Ints) -> Ints:
    """Return the order of events by start time. Of events with the same start, the longest is first; events with the
    same start and end keep their order in the file.
    """
    order: Ints = np.argsort(start, kind="stable")
    sorted_start = start[order]
    tied = np.zeros(len(order), dtype=bool)
    same = sorted_start[1:] == sorted_start[:-1]
    tied[1:] |= same
    tied[:-1] |= same
    rows = order[tied]
    order[tied] = rows[np.lexsort((rows, -end[rows], start[rows]))]
    return order


def _ranks(distributed: Any) -> tuple[int | None, int, dict[str, Any]]:
    if not isinstance(distributed, dict):
        return None, 1, {}
    rank, size = distributed.get("rank"), distributed.get("world_size", 1)
    return (rank if isinstance(rank, int) else None), (size if isinstance(size, int) else 1), distributed


def _devices(properties: Any) -> tuple[Device, ...]:
    """Return the devices that the trace describes; malformed entries are left out."""
    rows = [row for row in properties if isinstance(row, dict)] if isinstance(properties, list) else []
    return tuple(
        Device(
            number=_count(row.get("id", number)),
            name=str(row.get("name") or ""),
            total_memory_bytes=_count(row.get("totalGlobalMem")),
            num_sms=_count(row.get("numSms")),
            compute_capability=(_count(row.get("computeMajor")), _count(row.get("computeMinor"))),
        )
        for number, row in enumerate(rows)
    )


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0
