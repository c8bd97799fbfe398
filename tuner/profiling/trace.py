"""A trace as columns: the events of the host, the operations of devices, and the links between them.

Times are integer nanoseconds relative to the first event. Names, argument shapes and call stacks are
dictionary-encoded. `reader.read_trace` makes a trace from a file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from steptune.tuner.errors import SteptuneError

Ints = npt.NDArray[np.int64]
TRANSLATED = "translated"


class TraceError(SteptuneError):
    """Error for a file that is not a readable trace."""


class Kind(IntEnum):
    """Kind of an event: host kinds first, then device kinds."""

    OPERATOR = 0
    ANNOTATION = 1
    RUNTIME = 2
    OVERHEAD = 3
    PYTHON = 4
    KERNEL = 5
    COPY = 6
    SYNC = 7


@dataclass(frozen=True, kw_only=True)
class Host:
    """Events of host threads, sorted by start (longer first on ties).

    Attributes:
        start, end: int64 nanoseconds.
        kind: `Kind`, int8.
        name: int32 index into `Trace.names`.
        thread: int32 index into `Trace.threads`.
        correlation: int64 of a runtime call; -1 elsewhere.
        external: int64 id by which kernels refer to their operator; -1 if none.
        sequence: int64 autograd sequence number; -1 if none.
        forward_thread: int32 thread of the forward operator of a backward one; 0 in the forward pass, -1 if none.
        shape: int32 index into `Trace.shapes`; -1 if not recorded.
        stack: int32 index into `Trace.stacks`; -1 if not recorded.
    """

    start: Ints
    end: Ints
    kind: npt.NDArray[np.int8]
    name: npt.NDArray[np.int32]
    thread: npt.NDArray[np.int32]
    correlation: Ints
    external: Ints
    sequence: Ints
    forward_thread: npt.NDArray[np.int32]
    shape: npt.NDArray[np.int32]
    stack: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Operations of devices, sorted by start (longer first on ties).

    Attributes:
        start, end: int64 nanoseconds.
        kind: `Kind`, int8: a kernel, a copy or memset, or a wait.
        name: int32 index into `Trace.names`.
        device, stream: int32.
        correlation, external: int64 links to the host; -1 if none.
        num_bytes: int64 size of a copy; -1 if not recorded.
        occupancy: float32 estimated achieved occupancy, 0 to 1; NaN if not recorded.
        blocks_per_sm: float32; NaN if not recorded.
        graph_node: int64 node of a CUDA graph; -1 outside graphs.
    """

    start: Ints
    end: Ints
    kind: npt.NDArray[np.int8]
    name: npt.NDArray[np.int32]
    device: npt.NDArray[np.int32]
    stream: npt.NDArray[np.int32]
    correlation: Ints
    external: Ints
    num_bytes: Ints
    occupancy: npt.NDArray[np.float32]
    blocks_per_sm: npt.NDArray[np.float32]
    graph_node: Ints

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Record of one communication call in a trace.

    Attributes:
        external: Id that links a host record to its kernels; -1 if none.
        correlation: Correlation id of the kernel itself; -1 for a host record.
        name: Name in the library: "allreduce", "_allgather_base", "send", ...
        message_elements: Number of elements in the input or the output, whichever is larger.
    """

    external: int
    correlation: int
    name: str
    message_elements: int
    dtype: str
    group_name: str
    group_size: int
    sequence: int


@dataclass(frozen=True, kw_only=True)
class MemoryPoint:
    """Allocator totals at one moment, after the allocator allocated or freed a block.

    Attributes:
        address: Address of the block; 0 if not recorded.
        num_bytes: Size of the block; negative if it was freed.
    """

    time: int
    device: str
    allocated_bytes: int
    reserved_bytes: int
    address: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Device:
    """Device as the trace describes it."""

    number: int
    name: str
    total_memory_bytes: int
    num_sms: int
    compute_capability: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Trace of one rank.

    Attributes:
        rank, num_ranks: Rank and number of ranks; None and 1 if the trace does not record them.
        framing: Method of reading: "chunked" or "whole file"; `TRANSLATED` for files of other profilers.
        num_events: Number of events of every kind, those without a duration included.
        num_lost: Number of events that could not be decoded; events left out for other reasons are in `losses`.
        is_whole: False where the file ends in the middle or is damaged, so that whole stretches may be missing.
        losses: Descriptions of what was lost or repaired on reading.
        origin_ns: Nanoseconds subtracted from all times; adding it and `base_time_ns` gives the wall clock.
    """

    names: tuple[str, ...]
    threads: tuple[tuple[str, str], ...]
    shapes: tuple[bytes, ...]
    stacks: tuple[str, ...]
    host: Host
    work: Work
    collectives: tuple[Collective, ...]
    memory: tuple[MemoryPoint, ...]
    devices: tuple[Device, ...]
    rank: int | None
    num_ranks: int
    distributed: dict[str, Any]
    origin_ns: int
    base_time_ns: int
    framing: str
    num_events: int
    num_lost: int
    is_whole: bool
    losses: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.host) + len(self.work)

    def names_matching(self, pattern: str) -> npt.NDArray[np.bool_]:
        """Return a mask of the entries of `names` that match a pattern."""
        search = re.compile(pattern).search
        return np.fromiter((search(name) is not None for name in self.names), dtype=bool, count=len(self.names))

    def host_rows(self, pattern: str, *kinds: Kind) -> Ints:
        """Return rows of host events that have one of these kinds and a matching name."""
        wanted = self.names_matching(pattern)[self.host.name] & np.isin(self.host.kind, kinds)
        return np.flatnonzero(wanted)

    def work_rows(self, device: int | None = None) -> Ints:
        """Return rows of kernels, copies and memsets on all devices (or one), without waits."""
        wanted = self.work.kind != Kind.SYNC
        if device is not None:
            wanted &= self.work.device == device
        return np.flatnonzero(wanted)

    @property
    def span(self) -> tuple[int, int]:
        """Return the first start and the last end of all events."""
        starts = [int(table.start[0]) for table in (self.host, self.work) if len(table)]
        ends = [int(table.end.max()) for table in (self.host, self.work) if len(table)]
        return min(starts), max(ends)
