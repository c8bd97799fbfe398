"""Reading a Kineto trace (the JSON of torch.profiler) into columns of integer nanoseconds.

The format and its traps are documented where the fields are read. Events keep only what a breakdown
needs; names are dictionary-encoded. Times are relative to the first event, so that no precision is
lost to a float.
"""

from __future__ import annotations

import gzip
import re
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tuner.errors import SteptuneError

Ints = npt.NDArray[np.int64]


class TraceError(SteptuneError):
    """The file is not a trace that can be read."""


class Kind(IntEnum):
    OPERATOR = 0
    ANNOTATION = 1
    RUNTIME = 2
    KERNEL = 3
    COPY = 4
    SYNC = 5
    OVERHEAD = 6


_KINDS: dict[str, Kind] = {
    "cpu_op": Kind.OPERATOR,
    "operator": Kind.OPERATOR,
    "user_annotation": Kind.ANNOTATION,
    "cuda_runtime": Kind.RUNTIME,
    "cuda_driver": Kind.RUNTIME,
    "hip_runtime": Kind.RUNTIME,
    "runtime": Kind.RUNTIME,
    "kernel": Kind.KERNEL,
    "gpu_memcpy": Kind.COPY,
    "gpu_memset": Kind.COPY,
    "memcpy": Kind.COPY,
    "memset": Kind.COPY,
    "cuda_sync": Kind.SYNC,
    "overhead": Kind.OVERHEAD,
}


class _Args(msgspec.Struct, rename={"external_id": "External id", "external_id_old": "external id"}):
    correlation: int | float | None = None
    external_id: Any = None
    external_id_old: Any = None
    device: Any = None
    stream: Any = None


class _Event(msgspec.Struct):
    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float | int | str | None = None
    dur: float | int | str | None = None
    pid: Any = None
    tid: Any = None
    args: _Args | None = None


class _File(msgspec.Struct):
    traceEvents: list[_Event] = []
    deviceProperties: list[Any] = []
    distributedInfo: Any = None


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Events as parallel columns, sorted by start (longer first on ties).

    Attributes:
        start, end: int64 nanoseconds relative to the first event.
        kind: `Kind` of each event.
        name: Index into `names`.
        thread: Dense number of the (pid, tid) pair.
        device, correlation: -1 where the event has none.
    """

    names: tuple[str, ...]
    start: Ints
    end: Ints
    kind: Ints
    name: Ints
    thread: Ints
    device: Ints
    correlation: Ints
    rank: int
    num_ranks: int

    def __len__(self) -> int:
        return len(self.start)

    def indices(self, *kinds: Kind) -> Ints:
        return np.flatnonzero(np.isin(self.kind, kinds))

    def name_of(self, index: int) -> str:
        return self.names[int(self.name[index])]

    def matching(self, pattern: str, *kinds: Kind) -> Ints:
        """Indices of events of these kinds whose name matches."""
        found = re.compile(pattern)
        names = np.fromiter((bool(found.search(name)) for name in self.names), dtype=bool, count=len(self.names))
        chosen = self.indices(*kinds)
        matched: Ints = chosen[names[self.name[chosen]]]
        return matched


def read_trace(path: Path) -> Trace:
    """Reads `.json` or `.json.gz`.

    Raises:
        TraceError: The file is empty, not JSON, or holds no timed event.
    """
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        file = msgspec.json.decode(data, type=_File)
    except (OSError, EOFError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from None
    except msgspec.DecodeError as error:
        raise TraceError(f"{path} is not a torch.profiler trace: {error}") from None
    distributed = file.distributedInfo if isinstance(file.distributedInfo, dict) else {}
    return _columns(path, file.traceEvents, int(distributed.get("rank", 0)), int(distributed.get("world_size", 1)))


def _columns(path: Path, events: list[_Event], rank: int, num_ranks: int) -> Trace:
    names: dict[str, int] = {}
    threads: dict[tuple[str, str], int] = {}
    rows: list[tuple[int, int, int, int, int, int, int]] = []
    for event in events:
        kind = _KINDS.get(event.cat.lower())
        if event.ph != "X" or kind is None or event.ts is None:
            continue
        start = _nanoseconds(event.ts)
        duration = _nanoseconds(event.dur or 0)
        args = event.args
        on_device = kind in (Kind.KERNEL, Kind.COPY, Kind.SYNC)
        rows.append(
            (
                start,
                start + max(0, duration),
                int(kind),
                names.setdefault(event.name, len(names)),
                threads.setdefault((str(event.pid), str(event.tid)), len(threads)),
                _integer(args.device if args else None, default=0) if on_device else -1,
                _integer(args.correlation if args else None, default=-1),
            )
        )
    if not rows:
        raise TraceError(f"{path} holds no timed event: record it with torch.profiler.profile(...)")
    table = np.array(rows, dtype=np.int64)
    table[:, :2] -= table[:, 0].min()
    table = table[np.lexsort((-table[:, 1], table[:, 0]))]

    def column(number: int) -> Ints:
        return np.ascontiguousarray(table[:, number])

    return Trace(
        names=tuple(names),
        start=column(0),
        end=column(1),
        kind=column(2),
        name=column(3),
        thread=column(4),
        device=column(5),
        correlation=column(6),
        rank=rank,
        num_ranks=num_ranks,
    )


def _nanoseconds(microseconds: float | int | str) -> int:
    """Microseconds with three decimals to integer nanoseconds, exactly where a float is exact."""
    if isinstance(microseconds, int):
        return microseconds * 1000
    value = float(microseconds)
    if value != value:
        return 0
    whole = int(value)
    return whole * 1000 + round((value - whole) * 1000)


def _integer(value: Any, default: int) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return default
