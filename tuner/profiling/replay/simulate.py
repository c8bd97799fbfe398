"""A graph's steps, simulated again and again: what a step takes in the steady state."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from steptune.tuner.profiling.replay.chain import BATCH, LAUNCH
from steptune.tuner.profiling.replay.graph import Graph

PASSES = 4
PREFETCHED = 2
"""Batches that workers make ahead of the host, at most."""
Meeting = Generator[tuple[int, float], float, float]


def step_time_ns(graph: Graph, *, usual_delays: bool = False) -> float:
    """A step in the steady state, in nanoseconds.

    Args:
        usual_delays: Take the usual delay of every edge, not the recorded one. The recorded ones return the recorded
            starts whatever the edges are; so this tests the graph.
    """
    run = simulate(graph, usual_delays=usual_delays)
    try:
        next(run)
    except StopIteration as done:
        return float(done.value)
    raise AssertionError("a graph alone meets no other rank")


def simulate(  # noqa: C901, PLR0912  one loop: calls would cost more than what they do
    graph: Graph, meetings: Sequence[int] | None = None, *, usual_delays: bool = False, passes: int = PASSES
) -> Meeting:
    """One rank's steps, over and over.

    Yields the number of the operation and the moment of every arrival in a collective that ranks meet in, and is sent
    when it ends; returns the time of a step in nanoseconds.

    Args:
        meetings: By operation: whether ranks meet in it.
    """
    chain, operations = graph.chain, graph.operations
    gap, length, kind = chain.gap.tolist(), chain.length.tolist(), chain.kind.tolist()
    returns, waits, period, queue = chain.returns.tolist(), chain.waits, chain.period, chain.queue
    first = _first(graph)
    stream, duration, depends = operations.stream.tolist(), operations.duration.tolist(), operations.depends
    if usual_delays:
        latency, after = [operations.usual_latency] * len(stream), [operations.usual_after] * len(stream)
    else:
        latency, after = operations.latency.tolist(), operations.after.tolist()
    clocks = [0.0] * (max(stream, default=0) + 1)
    ends = [0.0] * len(stream)
    begun: list[float] = []
    time = ready = 0.0
    finished: list[tuple[float, float]] = []
    for _ in range(passes):
        for node, what in enumerate(kind):
            time += gap[node]
            if what == LAUNCH:
                if queue and len(begun) >= queue and begun[-queue] > time:
                    time = begun[-queue]
                begin = time
                for number in range(first[node], first[node + 1]):
                    bound = clocks[stream[number]]
                    for other in depends.get(number, ()):
                        if ends[other] > bound:
                            bound = ends[other]
                    begin = max(time + latency[number], bound + after[number])
                    if meetings is not None and meetings[number]:
                        end = yield number, begin
                    else:
                        end = begin + duration[number]
                    ends[number] = end
                    if end > clocks[stream[number]]:
                        clocks[stream[number]] = end
                begun.append(begin)
                time += length[node]
            elif what == BATCH and period:
                time = max(time + length[node], ready)
                ready = max(ready, time - PREFETCHED * period) + period
            else:
                time += length[node]
            if node in waits:
                time = max(time, max(clocks[number] for number in waits[node]) + returns[node])
        time += chain.tail
        finished.append((time, max(time, *clocks)))
    rounds = (passes - 1) * graph.num_steps
    return max(last - early for early, last in zip(finished[0], finished[-1], strict=True)) / rounds


def _first(graph: Graph) -> list[int]:
    """The first operation of every node, and their number."""
    first = graph.operations.node.searchsorted(range(len(graph.chain) + 1))
    return [int(number) for number in first]
