"""Chain of the host's work in the recorded steps: launches, synchronisations, batches and allocations as nodes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from steptune.tuner.profiling.capture import Capture
from steptune.tuner.profiling.intervals import Ints, distinct, median, pieces, union
from steptune.tuner.profiling.nesting import nest
from steptune.tuner.profiling.regions import ALLOCATION_CALLS, SYNC_CALLS, joined
from steptune.tuner.profiling.threads import threads_beside
from steptune.tuner.profiling.trace import Kind

Floats = npt.NDArray[np.float64]
LAUNCH, SYNC, BATCH, ALLOCATION = range(4)
ALLOCATION_NS = 50_000
"""Minimum duration of an allocation that becomes a node; shorter ones count as ordinary calls."""
HAND_OVER_NS = 300_000
"""Maximum time of taking a finished batch from a worker, in nanoseconds."""
PACED = 0.25
"""Share of batches for which the host must wait (at least two batches) before loader workers count as setting the pace.
The share is small because several workers deliver batches close together.
"""
RECORDING_NS = 1_600.0, 6_000.0
"""Range, in nanoseconds, to which the estimated maximum cost of recording one event is clipped: the cost was 800 to
1,600 ns on H200 hosts, and 700 to 5,200 ns on an H100 host.
"""
RECORDED = (Kind.OPERATOR, Kind.ANNOTATION, Kind.RUNTIME, Kind.PYTHON)
FEW_NODES = 2
FEW_HOLDERS = 30
HELD_TIMES = 2.0
"""Maximum cost of recording an event, as a multiple of the self time of an operator that only calls another operator.
"""


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Nodes of the chain of the host's work, in order.

    Attributes:
        kind: int8 by node.
        row: int64 by node: row of `trace.host`; -1 for a batch.
        start, end: int64 by node, as recorded.
        step: int64 by node: number of its step, from 0.
        gap: float64 by node: the host's own time between the node before and this one.
        length: float64 by node: the host's own time in it, without waits.
        silent: float64 by node: the part of the gap in which no optimizer's step runs.
        gap_events, length_events: float64 by node: events that the profiler recorded in them.
        tail, tail_events: The host's own time, and recorded events, from the last node to the end of its step.
        waits: By node: streams whose last earlier operation the host waits for.
        returns: float64 by node: time from the end of that operation until the host continues.
        period: Time between two batches if workers set the pace; else 0.
        queue: Launches that the devices' queues hold before a launch waits for a place.
        recording_ns: Maximum cost of recording an event.
    """

    kind: npt.NDArray[np.int8]
    row: Ints
    start: Ints
    end: Ints
    step: Ints
    gap: Floats
    length: Floats
    silent: Floats
    gap_events: Floats
    length_events: Floats
    tail: float
    tail_events: float
    waits: dict[int, tuple[int, ...]]
    returns: Floats
    period: float
    queue: int
    recording_ns: float = RECORDING_NS[1]

    def __len__(self) -> int:
        return len(self.kind)

    def having(self, **changes: Any) -> Chain:
        """Return the chain with replaced columns."""
        return replace(self, **changes)


def threads_of(capture: Capture) -> list[int]:
    """Return the thread that runs the steps, and the threads that launch device work in them."""
    launches, steps = capture.launches, capture.steps
    inside = (launches.row >= 0) & (launches.start >= steps.host_starts[0]) & (launches.start < steps.host_end)
    return sorted({steps.thread, *np.unique(launches.thread[inside]).tolist()})


def launching_calls(capture: Capture) -> Ints:
    """Return rows of `trace.host` that launch operations. A device's record of a synchronisation does not count."""
    launched = (capture.launches.row >= 0) & (capture.trace.work.kind != Kind.SYNC)
    return distinct(capture.launches.row[launched])


def host_chain(capture: Capture) -> Chain | None:
    """Return the chain as recorded, before the waits of its nodes are known; None without launches."""
    host, steps = capture.trace.host, capture.steps
    low, high = int(steps.host_starts[0]), steps.host_end
    inside = (host.start >= low) & (host.start < high)
    aside = threads_beside(capture)
    threads = [thread for thread in threads_of(capture) if thread not in aside]
    mine = np.isin(host.thread, threads) & inside
    launching = launching_calls(capture)
    calls = launching[mine[launching]]
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
    beside = launching[(np.isin(host.thread, aside) & inside)[launching]]
    moment = _beside(host.start[beside], start, end, low)
    start, end = np.concatenate([start, moment]), np.concatenate([end, moment])
    rows, kind = np.concatenate([rows, beside]), np.concatenate([kind, np.full(len(beside), LAUNCH)])
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
        silent=_silent(capture, threads, reached, begin),
        gap_events=_count(events, reached, begin),
        length_events=_count(events, begin, np.maximum(begin, end)),
        tail=float(max(0, high - last)),
        tail_events=float(_count(events, np.array([last]), np.array([max(high, last)]))[0]),
        waits={},
        returns=np.zeros(len(kind)),
        period=period,
        queue=0,
        recording_ns=_recording_ns(capture, mine),
    )


def _beside(launched: Ints, start: Ints, end: Ints, low: int) -> Ints:
    """Return the moments at which launches of a concurrent thread are inserted into the chain: the end of the host's
    work before each launch.

    Such launches take none of the chain's time, and no pause of the chain delays them.
    """
    order = np.argsort(start, kind="stable")
    reached = np.concatenate([[low], np.maximum.accumulate(end[order])])
    moment: Ints = np.minimum(launched, reached[np.searchsorted(start[order], launched, side="right")])
    return moment


def _silent(capture: Capture, threads: list[int], start: Ints, end: Ints) -> Floats:
    """Return the share of each interval that lies outside optimizer steps, because host work in an optimizer step is no
    stall.
    """
    parts = [joined((capture.regions.optimizer,), thread) for thread in threads]
    busy = union(np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts]))
    low, high, whole, _ = pieces(start, end, busy)
    covered = np.bincount(whole, weights=(high - low).astype(np.float64), minlength=len(start))
    return np.asarray(1.0 - covered / np.maximum(1, end - start))


def _recording_ns(capture: Capture, mine: npt.NDArray[np.bool_]) -> float:
    """Return the maximum cost of recording an event, estimated from operators that only call another operator."""
    host = capture.trace.host
    rows = np.flatnonzero(mine & np.isin(host.kind, (Kind.OPERATOR, Kind.RUNTIME)) & (host.end > host.start))
    rows = rows[host.thread[rows] == capture.steps.thread]
    rows = rows[np.lexsort((-host.end[rows], host.start[rows]))]
    nested = nest(host.start[rows], host.end[rows])
    inner = np.flatnonzero(nested.parent >= 0)
    alone = np.bincount(nested.parent[inner], minlength=len(rows))[nested.parent[inner]] == 1
    operators = host.kind[rows] == Kind.OPERATOR
    inner = inner[alone & operators[inner] & operators[nested.parent[inner]]]
    if len(inner) < FEW_HOLDERS:
        return RECORDING_NS[1]
    length = nested.end - nested.start
    return float(np.clip(HELD_TIMES * median(length[nested.parent[inner]] - length[inner]), *RECORDING_NS))


def _calls(capture: Capture, pattern: str, mine: npt.NDArray[np.bool_]) -> Ints:
    rows = capture.trace.host_rows(pattern, Kind.RUNTIME)
    return rows[mine[rows]]


def _count(events: Ints, start: Ints, end: Ints) -> Floats:
    return (np.searchsorted(events, end) - np.searchsorted(events, start)).astype(np.float64)


def _batches(capture: Capture, threads: list[int], start: Ints, end: Ints, span: tuple[int, int]) -> tuple[Ints, Ints]:
    """Return, for each wait for a batch, the longest interval in it without a call."""
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
    """Return the time between two batches and the node lengths without waits for batches, if loader workers set the
    pace; otherwise 0 and the unchanged lengths.
    """
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
