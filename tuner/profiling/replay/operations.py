"""Device operations in the recorded steps, with the waits of each operation and of the host.

Streams wait for each other in calls of `cudaStreamWaitEvent`, for which a trace records neither event nor streams:
the next launch of the thread waits for the last operation of every other stream, if that had ended by then.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptune.tuner.costs.categories import PRIORITY, Category
from steptune.tuner.profiling.capture import Capture
from steptune.tuner.profiling.gaps import LATENCY_RANGE_NS
from steptune.tuner.profiling.intervals import Ints, median
from steptune.tuner.profiling.replay.chain import LAUNCH, SYNC, Chain, Floats, threads_of
from steptune.tuner.profiling.trace import Kind

BLOCKING_COPY_NS = 20_000
"""Minimum duration, in nanoseconds, of a copy call that counts as a wait if it lasts until its copy ends. Such a copy
uses pageable memory.
"""
FULL_QUEUE = 0.8
"""Minimum share of the launch queue that must be filled for a launch that takes longer than usual to count as waiting
for a free place.

When the queue is full, either few launches wait for many places, or each waits for the device's next operation.
"""
FEW_CALLS, QUICK = 30, 0.1
"""Minimum number of launches into a queue with free places, and a quantile. The usual duration of a launch is the
median over such launches; with fewer of them, it is the quantile over all launches.
"""
QUEUE_DEPTH = 1024
"""Default number of launches that CUDA's queue holds; up to 1,469 were seen on an H200."""
OWN_WAIT_NS = 10_000
"""Time after the launch of a collective within which waits between streams are caused by the communication library."""
INFERRED_NS, INFERRED_END_NS = 10_000, 8_000
"""Minimum unexplained delay of an operation, and maximum time since another stream's operation ended, for the operation
to count as waiting for that stream.
"""
LATENCY_NS, BETWEEN_NS, RETURN_NS, OWN_NS = 6_000.0, 1_000.0, 5_000.0, 2_000.0
"""Default latencies, in nanoseconds, if a trace shows none: from launch to start, between queued operations, and from
the end of a wait to the return of its call. The last value is the maximum host time of such a call without the wait.
"""
_COMMUNICATION = [PRIORITY[c] for c in (Category.COMMUNICATION, Category.PIPELINE_BUBBLE)]


@dataclass(frozen=True, kw_only=True)
class Operations:
    """Device operations that the chain of a process launches, in order of launch.

    Attributes:
        row: int64 row of `trace.work`.
        node: int64 node of the chain that launches it, not decreasing.
        start, end: int64 as recorded.
        stream: int64 number of its stream, from 0.
        duration: float64: time on the device, as recorded.
        latency: float64: time from the node that launches it to the earliest start.
        ahead: float64: time from that node to the launch call; 0 unless a thread beside the chain makes the call.
        after: float64: time from the end of the operations that it waits for to the earliest start.
        depends: By operation: operations of other streams that it waits for.
        collective: bool: True if ranks meet in it.
        group: By collective, in order: name of its process group; empty if not recorded.
        category: int64 `PRIORITY` number of its category.
        usual_latency, usual_after: Medians of `latency` and `after`.
        unexplained: Share of the steps in which operations start later than any edge explains.
        known: Share of the devices' time in operations whose launch is in the chain.
    """

    row: Ints
    node: Ints
    start: Ints
    end: Ints
    stream: Ints
    duration: Floats
    latency: Floats
    ahead: Floats
    after: Floats
    depends: dict[int, tuple[int, ...]]
    collective: npt.NDArray[np.bool_]
    category: Ints
    usual_latency: float
    usual_after: float
    unexplained: float
    known: float
    group: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.row)


def device_operations(capture: Capture, chain: Chain) -> tuple[Chain, Operations]:
    """Return the operations that a chain launches, and the chain with the waits of its nodes."""
    work, launches = capture.trace.work, capture.launches
    calls = np.flatnonzero(chain.kind == LAUNCH)
    by_row = np.argsort(chain.row[calls])
    rows = np.flatnonzero((launches.row >= 0) & (work.kind != Kind.SYNC))
    position = np.searchsorted(chain.row[calls][by_row], launches.row[rows])
    position = np.minimum(position, len(calls) - 1)
    node = calls[by_row][position]
    found = chain.row[node] == launches.row[rows]
    rows, node = rows[found], node[found]
    order = np.lexsort((work.start[rows], node))
    rows, node = rows[order], node[order]
    start, end = work.start[rows], work.end[rows]
    _, stream = np.unique(np.stack([work.device[rows], work.stream[rows]]), axis=1, return_inverse=True)
    stream = stream.reshape(-1)
    call = capture.trace.host.start[chain.row[node]]
    ahead = (call - chain.start[node]).astype(np.float64)
    before = _ends_before(capture, rows, stream, start, end)
    usual_latency, usual_after = _usual(start, call, before)
    is_collective = np.isin(capture.category[rows], _COMMUNICATION) & (work.kind[rows] == Kind.KERNEL)
    depends = _recorded_waits(capture, chain, node, start, end, stream, is_collective)
    allowed = _allowed(call + usual_latency, before, usual_after, end, depends)
    late = np.flatnonzero(start - allowed > INFERRED_NS)
    _infer(depends, late, node, start, end, stream)
    bound = before.copy()
    for number, others in depends.items():
        bound[number] = max(bound[number], *(float(end[other]) for other in others))
    queued = bound + usual_after > call + usual_latency
    latency = np.where(queued, np.minimum(usual_latency, start - call), start - call)
    delay = np.where(np.isfinite(bound), start - bound, 0.0)
    after = np.where(queued, delay, np.minimum(usual_after, delay))
    left = start - np.maximum(call + usual_latency, bound + usual_after)
    length = max(1, int(chain.end.max()) - int(chain.start.min()))
    operations = Operations(
        row=rows,
        node=node,
        start=start,
        end=end,
        stream=stream,
        duration=(end - start).astype(np.float64),
        latency=latency + ahead,
        ahead=ahead,
        after=after,
        depends=depends,
        collective=is_collective,
        group=tuple(
            capture.trace.collectives[record].group_name if record >= 0 else ""
            for record in capture.record[rows[is_collective]].tolist()
        ),
        category=capture.category[rows],
        usual_latency=usual_latency,
        usual_after=usual_after,
        unexplained=float(np.maximum(0.0, left - INFERRED_NS).sum() / length),
        known=_known(capture, rows),
    )
    return _waiting(capture, chain, operations), operations


def _ends_before(capture: Capture, rows: Ints, stream: Ints, start: Ints, end: Ints) -> Floats:
    """Return, for each operation, the latest end of the earlier ones on the same stream; -inf for the first."""
    work = capture.trace.work
    inside = np.zeros(len(work), dtype=bool)
    inside[rows] = True
    result = np.full(len(rows), -np.inf)
    for number in range(int(stream.max()) + 1):
        mine = np.flatnonzero(stream == number)
        row = rows[mine[0]]
        other = (work.device == work.device[row]) & (work.stream == work.stream[row]) & ~inside
        other &= (work.kind != Kind.SYNC) & (work.start < start[mine[0]])
        first = float(work.end[other].max()) if other.any() else -np.inf
        reached = np.maximum.accumulate(end[mine].astype(np.float64))
        result[mine] = np.maximum(first, np.concatenate([[-np.inf], reached[:-1]]))
    return result


def _usual(start: Ints, call: Ints, before: Floats) -> tuple[float, float]:
    """Return the median latency of launches into an empty stream, and the median delay between queued operations."""
    empty = (before < call) & (start > call)
    latency = median((start - call)[empty]) if empty.any() else LATENCY_NS
    queued = np.isfinite(before) & (before > call + latency)
    after = median((start - before)[queued]) if queued.any() else BETWEEN_NS
    return min(latency, LATENCY_RANGE_NS[1]), max(0.0, after)


def _allowed(launched: Floats, before: Floats, after: float, end: Ints, depends: dict[int, tuple[int, ...]]) -> Floats:
    bound = before.copy()
    for number, others in depends.items():
        bound[number] = max(bound[number], *(float(end[other]) for other in others))
    return np.maximum(launched, bound + after)


def _recorded_waits(
    capture: Capture,
    chain: Chain,
    node: Ints,
    start: Ints,
    end: Ints,
    stream: Ints,
    is_collective: npt.NDArray[np.bool_],
) -> dict[int, tuple[int, ...]]:
    """Return the operations of other streams that each operation waits for, from the calls that make streams wait."""
    trace, host = capture.trace, capture.trace.host
    rows = trace.host_rows(r"StreamWaitEvent", Kind.RUNTIME)
    own = np.unique(node[is_collective])
    waiting: set[int] = set(np.flatnonzero(is_collective).tolist()) if not len(rows) else set()
    first_of = np.searchsorted(node, np.arange(len(chain)))
    moments = {number: int(chain.start[n]) for number, n in zip(first_of[own].tolist(), own.tolist(), strict=True)}
    for thread in threads_of(capture):
        mine = rows[host.thread[rows] == thread]
        nodes = np.flatnonzero((chain.kind == LAUNCH) & (host.thread[np.maximum(chain.row, 0)] == thread))
        if not len(mine) or not len(nodes):
            continue
        follows = np.searchsorted(host.start[chain.row[nodes]], host.start[mine])
        known = follows < len(nodes)
        mine, follows = mine[known], nodes[follows[known]]
        collectives = own[host.thread[chain.row[own]] == thread]
        last = np.searchsorted(chain.start[collectives], host.start[mine]) - 1
        ended = chain.end[collectives[np.maximum(last, 0)]] if len(collectives) else host.start[mine]
        libraries = (last >= 0) & (host.start[mine] - ended < OWN_WAIT_NS) if len(collectives) else last >= 0
        for row, n in zip(mine[~libraries].tolist(), follows[~libraries].tolist(), strict=True):
            number = int(first_of[n])
            if number < len(node) and node[number] == n:
                waiting.add(number)
                moments[number] = min(moments.get(number, int(host.start[row])), int(host.start[row]))
    waiting |= set(first_of[own].tolist())
    launched = chain.start[node]
    by_stream = [np.flatnonzero(stream == number) for number in range(int(stream.max()) + 1)]
    depends: dict[int, tuple[int, ...]] = {}
    for number in sorted(waiting):
        moment = moments.get(number, int(launched[number]))
        others = []
        for other, members in enumerate(by_stream):
            if other == stream[number]:
                continue
            place = int(np.searchsorted(launched[members], moment)) - 1
            if place >= 0 and end[members[place]] <= start[number]:
                others.append(int(members[place]))
        if others:
            depends[number] = tuple(others)
    return depends


def _infer(depends: dict[int, tuple[int, ...]], late: Ints, node: Ints, start: Ints, end: Ints, stream: Ints) -> None:
    """Make each late operation that no edge explains depend on an operation of another stream that ended just before
    it.
    """
    by_end = np.argsort(end, kind="stable")
    ends = end[by_end]
    for number in late.tolist():
        last = int(np.searchsorted(ends, start[number], side="right"))
        first = int(np.searchsorted(ends, start[number] - INFERRED_END_NS))
        for place in by_end[first:last][::-1].tolist():
            if stream[place] != stream[number] and place < number:
                depends[number] = (*depends.get(number, ()), place)
                break


def _known(capture: Capture, rows: Ints) -> float:
    """Return the share of device time in operations whose launch is known: in the chain, or before the chain begins."""
    work, (low, high) = capture.trace.work, capture.steps.span
    real = (work.kind != Kind.SYNC) & (work.end > low) & (work.start < high)
    unknown = real & (capture.launches.row < 0)
    # What was launched before the window has no call in the trace, which is no fault of it.
    first = np.full(int(work.stream.max(initial=0)) + 1, high)
    np.minimum.at(first, work.stream[rows], work.start[rows])
    unknown &= work.start >= first[work.stream]
    time = work.end - work.start
    return 1.0 - float(time[unknown].sum() / max(1, time[real].sum()))


def _waiting(capture: Capture, chain: Chain, operations: Operations) -> Chain:
    """Return the chain with the streams that its synchronisations, blocking copies and full queues wait for."""
    trace = capture.trace
    calls = chain.kind == LAUNCH
    depth, queue = _queued(capture, chain, operations)
    deep = calls & (depth > FULL_QUEUE * queue)
    timed = chain.length > 0  # calls of a thread beside the chain take none of its time
    usual_call = _usual_call(chain.length[calls & ~deep & timed], chain.length[deep & timed])
    copies = trace.names_matching(r"Memcpy")[trace.host.name[np.maximum(chain.row, 0)]] & calls
    named = trace.names_matching(r"StreamSynchronize|EventSynchronize")
    length, returns = chain.length.copy(), chain.returns.copy()
    waits: dict[int, tuple[int, ...]] = {}
    first = np.searchsorted(operations.node, np.arange(len(chain) + 1))
    streams = [np.flatnonzero(operations.stream == n) for n in range(int(operations.stream.max()) + 1)]

    def wait(node: int, members: list[tuple[int, int]], own: float) -> None:
        waits[node] = tuple(stream for stream, _ in members)
        done = max(int(operations.end[number]) for _, number in members)
        real = done > chain.start[node]
        returns[node] = max(0, int(chain.end[node]) - done) if real else np.nan
        length[node] = min(length[node], own) if real else length[node]

    for node in np.flatnonzero(chain.kind == SYNC).tolist():
        copied = node - 1 if node and copies[node - 1] and named[trace.host.name[chain.row[node]]] else -1
        if copied >= 0 and first[copied + 1] > first[copied]:
            number = int(first[copied + 1]) - 1
            wait(node, [(int(operations.stream[number]), number)], OWN_NS)
            continue
        members = []
        for stream, numbers in enumerate(streams):
            place = int(np.searchsorted(numbers, first[node])) - 1
            if place >= 0 and operations.end[numbers[place]] <= chain.end[node] + OWN_NS:
                members.append((stream, int(numbers[place])))
        if members:
            wait(node, members, OWN_NS)
    for node in np.flatnonzero(copies & (chain.length > BLOCKING_COPY_NS)).tolist():
        last = int(first[node + 1]) - 1
        if chain.start[node] < operations.end[last] <= chain.end[node] + OWN_NS:
            wait(node, [(int(operations.stream[last]), last)], usual_call)
    known = returns[list(waits)]
    known = known[~np.isnan(known)]
    usual_return = median(known) if len(known) else RETURN_NS
    returns = np.where(np.isnan(returns), min(usual_return, RETURN_NS), returns)
    deep[list(waits)] = False
    length[deep] = np.minimum(length[deep], usual_call)
    return chain.having(length=length, returns=returns, waits=waits, queue=queue)


def _queued(capture: Capture, chain: Chain, operations: Operations) -> tuple[Ints, int]:
    """Return the number of queued launches at each launch, and the capacity of the devices' queues, in launches.

    What was launched before the window, and begins in it, is queued as well. A CUDA graph is one launch.
    """
    work, calls = capture.trace.work, chain.kind == LAUNCH
    first = np.searchsorted(operations.node, np.arange(len(chain) + 1))
    begun = operations.start[first[:-1][calls & (first[1:] > first[:-1])]]
    own_from = np.full(int(work.stream.max(initial=0)) + 1, chain.start[0])
    own_from[work.stream[operations.row]] = np.iinfo(np.int64).max
    np.minimum.at(own_from, work.stream[operations.row], operations.start)
    earlier = (capture.launches.row < 0) & (work.kind != Kind.SYNC) & (work.graph_node < 0)
    before = work.start[earlier & (work.start > chain.start[0]) & (work.start < own_from[work.stream])]
    begun = np.sort(np.concatenate([begun, before]))
    depth = np.where(calls, len(before) + np.cumsum(calls) - 1 - np.searchsorted(begun, chain.start), 0)
    return depth, max(QUEUE_DEPTH, int(depth.max(initial=0)))


def _usual_call(free: Floats, deep: Floats) -> float:
    """Return the usual duration of a launch.

    Args:
        free: Durations of launches into a queue with free places.
        deep: Durations of launches into a full queue, which wait.
    """
    if len(free) >= FEW_CALLS or not len(deep):
        return median(free) if len(free) else 0.0
    return float(np.quantile(np.concatenate([free, deep]), QUICK))
