"""The host's work in the recorded steps, as one chain of nodes: launches, synchronisations, batches, allocations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from steptune.tuner.profiling.capture import Capture
from steptune.tuner.profiling.intervals import Ints, pieces, union
from steptune.tuner.profiling.regions import ALLOCATION_CALLS, SYNC_CALLS, joined
from steptune.tuner.profiling.trace import Kind

Floats = npt.NDArray[np.float64]
LAUNCH, SYNC, BATCH, ALLOCATION = range(4)
ALLOCATION_NS = 50_000
"""Shorter allocations are calls like others."""
HAND_OVER_NS = 300_000
"""Taking a batch that is ready from a worker lasts at most so long."""
PACED = 0.25
"""Workers set the pace where the host waits for them in at least this share of the batches, and twice: several of them
deliver their batches close together.
"""
RECORDED = (Kind.OPERATOR, Kind.ANNOTATION, Kind.RUNTIME, Kind.PYTHON)
FEW_NODES = 2


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Nodes of the host, in order.

    Attributes:
        kind: int8 by node.
        row: int64 by node of `trace.host`; -1 of a batch.
        start, end: int64 by node, as recorded.
        step: int64 by node: number of its step, from 0.
        gap: float64 by node: the host's own time between the node before and this one.
        length: float64 by node: the host's own time in it, without what it waits for.
        gap_events, length_events: float64 by node: events that the profiler recorded in them.
        tail, tail_events: The same after the last node, until its step ends.
        waits: By node, streams whose last operation before it the host waits for.
        returns: float64 by node: from the end of what it waits for until the host goes on.
        period: Time between two batches, where workers set the pace; else 0.
        queue: Launches that the devices' queues hold before a launch waits for a place.
    """

    kind: npt.NDArray[np.int8]
    row: Ints
    start: Ints
    end: Ints
    step: Ints
    gap: Floats
    length: Floats
    gap_events: Floats
    length_events: Floats
    tail: float
    tail_events: float
    waits: dict[int, tuple[int, ...]]
    returns: Floats
    period: float
    queue: int

    def __len__(self) -> int:
        return len(self.kind)

    def having(self, **changes: Any) -> Chain:
        """The same with other columns."""
        return replace(self, **changes)


def threads_of(capture: Capture) -> list[int]:
    """The thread that runs the steps, and those that launch device work in them."""
    launches, steps = capture.launches, capture.steps
    inside = (launches.row >= 0) & (launches.start >= steps.host_starts[0]) & (launches.start < steps.host_end)
    return sorted({steps.thread, *np.unique(launches.thread[inside]).tolist()})


def launching_calls(capture: Capture) -> Ints:
    """Rows of `trace.host` that launch operations. A device's record of a synchronisation is none."""
    launched = (capture.launches.row >= 0) & (capture.trace.work.kind != Kind.SYNC)
    return np.unique(capture.launches.row[launched])


def host_chain(capture: Capture) -> Chain | None:
    """The chain as recorded, before it is known what its nodes wait for; None without launches."""
    host, steps = capture.trace.host, capture.steps
    low, high = int(steps.host_starts[0]), steps.host_end
    threads = threads_of(capture)
    mine = np.isin(host.thread, threads) & (host.start >= low) & (host.start < high)
    calls = launching_calls(capture)
    calls = calls[mine[calls]]
    if len(calls) < FEW_NODES:
        return None
    syncs = _calls(capture, SYNC_CALLS, mine)
    syncs = np.setdiff1d(syncs, calls)
    allocations = np.setdiff1d(_calls(capture, ALLOCATION_CALLS, mine), calls)
    allocations = allocations[host.end[allocations] - host.start[allocations] > ALLOCATION_NS]
    rows = np.concatenate([calls, syncs, allocations])
    kind = np.repeat(np.array([LAUNCH, SYNC, ALLOCATION]), [len(calls), len(syncs), len(allocations)])
    start, end = host.start[rows], host.end[rows]
    batch_start, batch_end = _batches(capture, threads, start, end, (low, high))
    start, end = np.concatenate([start, batch_start]), np.concatenate([end, batch_end])
    rows = np.concatenate([rows, np.full(len(batch_start), -1)])
    kind = np.concatenate([kind, np.full(len(batch_start), BATCH)])
    order = np.lexsort((-end, start))
    start, end, rows, kind = start[order], np.minimum(end[order], high), rows[order], kind[order]
    reached = np.concatenate([[low], np.maximum.accumulate(end)[:-1]])
    begin = np.maximum(start, reached)
    events = np.sort(host.start[mine & np.isin(host.kind, RECORDED)])
    length = np.maximum(0, end - begin).astype(np.float64)
    period, length = _paced(capture, kind, length)
    last = max(int(end.max()), low)
    return Chain(
        kind=kind.astype(np.int8),
        row=rows,
        start=start,
        end=end,
        step=np.searchsorted(steps.host_starts, start, side="right") - 1,
        gap=(begin - reached).astype(np.float64),
        length=length,
        gap_events=_count(events, reached, begin),
        length_events=_count(events, begin, np.maximum(begin, end)),
        tail=float(max(0, high - last)),
        tail_events=float(_count(events, np.array([last]), np.array([max(high, last)]))[0]),
        waits={},
        returns=np.zeros(len(kind)),
        period=period,
        queue=0,
    )


def _calls(capture: Capture, pattern: str, mine: npt.NDArray[np.bool_]) -> Ints:
    rows = capture.trace.host_rows(pattern, Kind.RUNTIME)
    return rows[mine[rows]]


def _count(events: Ints, start: Ints, end: Ints) -> Floats:
    return (np.searchsorted(events, end) - np.searchsorted(events, start)).astype(np.float64)


def _batches(capture: Capture, threads: list[int], start: Ints, end: Ints, span: tuple[int, int]) -> tuple[Ints, Ints]:
    """The longest stretch without a call in each wait for a batch."""
    regions = (capture.regions.loader, capture.regions.restart)
    parts = [joined(regions, thread) for thread in threads]
    low, high = union(np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts]))
    inside = (low >= span[0]) & (low < span[1])
    low, high = low[inside], np.minimum(high[inside], span[1])
    calls = union(start, end)
    free = np.concatenate([[span[0]], calls[1]]), np.concatenate([calls[0], [span[1]]])
    first, last, whole, _ = pieces(low, high, free)
    longest = np.lexsort((last - first, whole))
    chosen = longest[np.concatenate([whole[longest][1:] != whole[longest][:-1], [True]])] if len(whole) else longest
    return first[chosen], last[chosen]


def _paced(capture: Capture, kind: Ints, length: Floats) -> tuple[float, Floats]:
    """The time between two batches that workers make, and lengths without the waits for them."""
    batches = np.flatnonzero(kind == BATCH)
    workers = capture.trace.names_matching(r"_MultiProcess")[capture.trace.host.name[capture.regions.loader.rows]]
    if len(batches) < FEW_NODES or not workers.any():
        return 0.0, length
    waits = length[batches] > HAND_OVER_NS
    if waits.mean() < PACED or waits.sum() < FEW_NODES:
        return 0.0, length
    low, high = capture.steps.span
    period = (high - low) / len(batches)
    length = length.copy()
    length[batches] = np.minimum(length[batches], min(HAND_OVER_NS, float(length[batches].min())))
    return period, length
