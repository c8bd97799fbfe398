"""Several ranks' graphs at once: they meet in collectives, so that lateness is carried from one to the next."""

from __future__ import annotations

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
"""A rank is late where its own time between two meetings is so many times, and so much, over the others' median."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Ranks with the same collectives in the same order.

    Attributes:
        graphs: By rank.
        meetings: int64 of shape (collectives, ranks): the operation that each of them is.
        network: float64 by collective: from the last arrival to the end.
        arrived: float64 by collective: the last arrival, on the clock of the first rank.
        offsets: By rank: added to its times, they are those of the first one's clock.
    """

    graphs: tuple[Graph, ...]
    meetings: Ints
    network: Floats
    arrived: Floats
    offsets: tuple[float, ...]


class UnlikeRanksError(SteptuneError):
    """The graphs of ranks do not have the same collectives."""


def meet(graphs: Sequence[Graph]) -> Ranks:
    """Graphs that meet in all of their collectives, in order.

    Raises:
        UnlikeRanksError: They have different numbers of steps or collectives, or none.
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
    offsets = np.median(end[:, :1] - end, axis=0)
    arrived = (start + offsets).max(axis=1)
    network = np.maximum(0.0, (end + offsets - arrived[:, None]).min(axis=1))
    return Ranks(
        graphs=tuple(graphs),
        meetings=meetings,
        network=network,
        arrived=arrived,
        offsets=tuple(offsets.tolist()),
    )


def step_time_ns(ranks: Ranks, *, usual_delays: bool = False) -> float:
    """A step of the slowest rank in the steady state, in nanoseconds."""
    runs = []
    for graph in ranks.graphs:
        runs.append(simulate(graph, graph.operations.collective.tolist(), usual_delays=usual_delays))
    network = ranks.network.tolist()
    times: list[float] = []
    arrived = [next(run)[1] for run in runs]
    place = 0
    while not times:
        end = max(arrived) + network[place]
        place = (place + 1) % len(network)
        following = []
        for run in runs:
            try:
                following.append(run.send(end)[1])
            except StopIteration as done:
                times.append(float(done.value))
        arrived = following
    assert len(times) == len(runs), "ranks have the same collectives"
    return max(times)


def without_late_ranks(ranks: Ranks) -> Ranks:
    """No rank takes longer than the others from one meeting to the next.

    What it takes beyond their median goes: of its host, from the longest stretches; of its device, from all kernels.
    Beside a collective that waits, kernels are slower: there they take the least time that they take on any rank.
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
        for stretch in np.flatnonzero(_late(host[place], usual)).tolist():
            members = np.flatnonzero(nodes[place] == stretch)
            _shorten(gap, length, members, float(host[place][stretch] - usual[stretch]))
        usual = np.median(np.delete(device, place, axis=0), axis=0)
        factor = np.where(_late(device[place], usual), usual / np.maximum(1.0, device[place]), 1.0)
        scale = np.where(graph.operations.collective, 1.0, factor[stretches[place]])
        operations = replace(graph.operations, duration=graph.operations.duration * scale)
        edited.append(replace(graph, chain=graph.chain.having(gap=gap, length=length), operations=operations))
    return replace(ranks, graphs=tuple(edited))


def _late(own: Floats, usual: Floats) -> npt.NDArray[np.bool_]:
    return np.asarray((own > LATE_RATIO * usual) & (own - usual > LATE_NS))


def _shorten(gap: Floats, length: Floats, members: Ints, excess: float) -> None:
    """Takes an excess from the longest of some stretches of a host, one after the other."""
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
    """A rank's graph whose kernels beside a waiting collective take the least time of their like on all ranks."""
    graph = ranks.graphs[place]
    sizes = {len(one.operations) for one in ranks.graphs}
    if len(sizes) > 1:
        return graph
    least = np.min([one.operations.duration for one in ranks.graphs], axis=0)
    operations = graph.operations
    rows = ranks.meetings[:, place]
    low = operations.start[rows].astype(np.float64)
    high = np.maximum(low, ranks.arrived - ranks.offsets[place])
    waiting = high - low > LATE_NS
    low, high = np.maximum.accumulate(low[waiting]), np.maximum.accumulate(high[waiting])
    if not len(low):
        return graph
    first = np.searchsorted(high, operations.start, side="right")
    beside = (first < len(low)) & (low[np.minimum(first, len(low) - 1)] < operations.end) & ~operations.collective
    duration = np.where(beside, least, operations.duration)
    return replace(graph, operations=replace(operations, duration=duration))
