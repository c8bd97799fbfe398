"""Joint replay of several ranks' graphs, linked by their collectives: a delay carries over from one collective to the
next.

Ranks run one program: the nth collective of each of them is the same call. It is one meeting of all ranks or, if
its process groups have only some of them (FSDP within a host, replicas between hosts), one meeting per group: a late
rank delays its own group, and other groups through shared ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from steptune.tuner.errors import SteptuneError
from steptune.tuner.profiling.intervals import Ints
from steptune.tuner.profiling.replay.chain import Floats
from steptune.tuner.profiling.replay.graph import Graph
from steptune.tuner.profiling.replay.simulate import simulate

LATE_RATIO, LATE_NS = 1.2, 200_000
"""Limits for a rank to count as late between two collectives: minimum ratio of the rank's time, without waits, to the
other ranks' median, and minimum excess over this median in nanoseconds.
"""
SLOW_HOST, SLOW_DEVICE = 1.2, 1.05
"""Minimum ratio of a rank's time over all steps, without waits, to the other ranks' median for the rank to count as
slow: one limit for the host, one for the device.

A slow rank is late wherever it takes longer, however little. Kernels vary less than hosts.
"""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Ranks with the same collectives in the same order.

    Attributes:
        graphs: Graph of each rank.
        meetings: int64 of shape (collectives, ranks): the operation of each collective on each rank.
        group: int64 of the same shape: the first rank of those that meet.
        network: float64 of the same shape: time from the last arrival in its group to the end.
        arrived: float64 of the same shape: time of the last arrival in its group, on the clock of the first rank.
        offsets: Offset of each rank, added to its times to convert them to the first rank's clock.
    """

    graphs: tuple[Graph, ...]
    meetings: Ints
    group: Ints
    network: Floats
    arrived: Floats
    offsets: tuple[float, ...]


class UnlikeRanksError(SteptuneError):
    """Error for ranks whose graphs do not have the same collectives."""


def meet(graphs: Sequence[Graph]) -> Ranks:
    """Match the collectives of the ranks' graphs in order, and return the matched ranks.

    Raises:
        UnlikeRanksError: The graphs have different numbers of steps or collectives, or no collective.
    """
    counts = sorted({(graph.num_steps, int(graph.operations.collective.sum())) for graph in graphs})
    if len(counts) > 1:
        raise UnlikeRanksError(f"ranks recorded different numbers of steps or collectives: {counts}")
    if not counts[0][1]:
        raise UnlikeRanksError("no collective is recorded")
    meetings = np.stack([np.flatnonzero(graph.operations.collective) for graph in graphs], axis=1)
    columns = list(zip(graphs, meetings.T, strict=True))
    start = np.stack([graph.operations.start[rows] for graph, rows in columns], axis=1).astype(np.float64)
    end = np.stack([graph.operations.end[rows] for graph, rows in columns], axis=1).astype(np.float64)
    group = _groups(graphs)
    offsets = _offsets(end, group)
    arrived = _by_group(np.maximum, start + offsets, group)
    network = np.maximum(0.0, _by_group(np.minimum, end + offsets - arrived, group))
    return Ranks(
        graphs=tuple(graphs),
        meetings=meetings,
        group=group,
        network=network,
        arrived=arrived,
        offsets=tuple(offsets.tolist()),
    )


def _groups(graphs: Sequence[Graph]) -> Ints:
    """Return, for each collective and rank, the first rank of the process group with which the rank takes part.

    Raises:
        UnlikeRanksError: Ranks of one group call its collectives at different positions in their programs.
    """
    names = np.array([graph.operations.group for graph in graphs], dtype=np.str_).T
    found = np.zeros(names.shape, dtype=np.int64)
    for name in np.unique(names).tolist():
        called = names == name
        members = called.any(axis=0)
        if not (called[called.any(axis=1)] == members).all():
            raise UnlikeRanksError(f"ranks call the collectives of the process group {name!r} at different positions")
        found[called] = int(members.argmax())
    return found


def _by_group(least_or_most: np.ufunc, values: Floats, group: Ints) -> Floats:
    """Return, for each rank, the least or the largest value among the ranks of its group."""
    rows = np.broadcast_to(np.arange(len(values))[:, None], values.shape)
    found = values.copy()
    least_or_most.at(found, (rows, group), values)
    return np.asarray(found[rows, group])


def _offsets(end: Floats, group: Ints) -> Floats:
    """Return the clock offset of each rank relative to the first, from collectives that end on both at the same time.
    Offsets pass from known ranks to the others through shared groups; a rank that no group connects uses all
    collectives.
    """
    offsets = np.median(end[:, :1] - end, axis=0)
    known = [0]
    for other in known:
        for rank in range(end.shape[1]):
            together = group[:, rank] == group[:, other]
            if rank not in known and together.any():
                offsets[rank] = offsets[other] + np.median((end[:, other] - end[:, rank])[together])
                known.append(rank)
    return np.asarray(offsets)


def step_time_ns(ranks: Ranks, *, usual_delays: bool = False) -> float:
    """Return the time of a step of the slowest rank in the steady state, in nanoseconds."""
    runs = []
    for graph in ranks.graphs:
        runs.append(simulate(graph, graph.operations.collective.tolist(), usual_delays=usual_delays))
    network = ranks.network.tolist()
    group = ranks.group.tolist()
    members = [Counter(row) for row in group]
    times: list[float] = []
    met = [0] * len(runs)
    come: dict[tuple[int, int], list[tuple[int, float]]] = {}
    arrived = [(rank, next(run)[1]) for rank, run in enumerate(runs)]
    while arrived:
        rank, time = arrived.pop()
        place = met[rank] % len(network)
        first = group[place][rank]
        here = come.setdefault((met[rank], first), [])
        here.append((rank, time))
        if len(here) < members[place][first]:
            continue
        end = max(time for _, time in here) + network[place][rank]
        for one, _ in come.pop((met[rank], first)):
            met[one] += 1
            try:
                arrived.append((one, runs[one].send(end)[1]))
            except StopIteration as done:
                times.append(float(done.value))
    assert len(times) == len(runs), "all ranks must have the same collectives"
    return max(times)


def without_late_ranks(ranks: Ranks) -> Ranks:
    """Return the ranks with all lateness removed: between two collectives, no rank takes longer than the others.

    A late rank's excess over the others' median is removed: on its host from the longest intervals, on its device from
    all kernels. Kernels beside a waiting collective are slower, so they get the least time that they take on any rank.
    """
    graphs = [_beside_waiting(ranks, place) for place in range(len(ranks.graphs))]
    stretches = [
        np.searchsorted(rows, np.arange(len(g.operations))) for g, rows in zip(graphs, ranks.meetings.T, strict=True)
    ]
    count = len(ranks.meetings) + 1
    device = np.stack(
        [
            np.bincount(s, weights=np.where(g.operations.collective, 0.0, g.operations.duration), minlength=count)
            for g, s in zip(graphs, stretches, strict=True)
        ]
    )
    nodes = [
        np.searchsorted(g.operations.node[rows], np.arange(len(g.chain)))
        for g, rows in zip(graphs, ranks.meetings.T, strict=True)
    ]
    host = np.stack(
        [
            np.bincount(n, weights=g.chain.gap + g.chain.length, minlength=count)
            for g, n in zip(graphs, nodes, strict=True)
        ]
    )
    edited = []
    for place, graph in enumerate(graphs):
        usual = np.median(np.delete(host, place, axis=0), axis=0)
        gap, length = graph.chain.gap.copy(), graph.chain.length.copy()
        for stretch in np.flatnonzero(_late(host[place], usual, SLOW_HOST)).tolist():
            members = np.flatnonzero(nodes[place] == stretch)
            _shorten(gap, length, members, float(host[place][stretch] - usual[stretch]))
        usual = np.median(np.delete(device, place, axis=0), axis=0)
        late = _late(device[place], usual, SLOW_DEVICE)
        factor = np.where(late, usual / np.maximum(1.0, device[place]), 1.0)
        scale = np.where(graph.operations.collective, 1.0, factor[stretches[place]])
        operations = replace(graph.operations, duration=graph.operations.duration * scale)
        edited.append(replace(graph, chain=graph.chain.having(gap=gap, length=length), operations=operations))
    return replace(ranks, graphs=tuple(edited))


def _late(own: Floats, usual: Floats, slow: float) -> npt.NDArray[np.bool_]:
    """Return a mask of the intervals between collectives in which a rank is late.

    Args:
        slow: Ratio to the others from which the rank as a whole is slow, and late wherever it takes longer.
    """
    if own.sum() > slow * usual.sum() and own.sum() - usual.sum() > LATE_NS:
        return np.asarray(own > usual)
    return np.asarray((own > LATE_RATIO * usual) & (own - usual > LATE_NS))


def _shorten(gap: Floats, length: Floats, members: Ints, excess: float) -> None:
    """Remove an excess of host time from the given nodes and the gaps before them, the longest first."""
    stretches = sorted(
        ((float(column[node]), which, node) for which, column in enumerate((gap, length)) for node in members.tolist()),
        reverse=True,
    )
    for value, which, node in stretches:
        taken = min(excess, value)
        (gap, length)[which][node] -= taken
        excess -= taken
        if excess <= 0:
            return


def _beside_waiting(ranks: Ranks, place: int) -> Graph:
    """Return a rank's graph in which kernels during a waiting collective take their least time over all ranks."""
    graph = ranks.graphs[place]
    sizes = {len(one.operations) for one in ranks.graphs}
    if len(sizes) > 1:
        return graph
    least = np.min([one.operations.duration for one in ranks.graphs], axis=0)
    operations = graph.operations
    rows = ranks.meetings[:, place]
    low = operations.start[rows].astype(np.float64)
    high = np.maximum(low, ranks.arrived[:, place] - ranks.offsets[place])
    waiting = high - low > LATE_NS
    low, high = np.maximum.accumulate(low[waiting]), np.maximum.accumulate(high[waiting])
    if not len(low):
        return graph
    first = np.searchsorted(high, operations.start, side="right")
    beside = (first < len(low)) & (low[np.minimum(first, len(low) - 1)] < operations.end) & ~operations.collective
    duration = np.where(beside, least, operations.duration)
    return replace(graph, operations=replace(operations, duration=duration))
