"""Simulation of a graph's steps, repeated until the steady state."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from operator import sub

from steptune.tuner.profiling.replay.chain import BATCH, LAUNCH
from steptune.tuner.profiling.replay.graph import Graph

PASSES = 4
SAME_NS = 0.5
"""Maximum change, in nanoseconds, of the streams' offsets from the host between two passes for the steady state to
count as reached.
"""
PREFETCHED = 2
"""Maximum number of batches that workers make ahead of the host."""
Meeting = Generator[tuple[int, float], float, float]


def step_time_ns(graph: Graph, *, usual_delays: bool = False) -> float:
    """Return the time of a step in the steady state, in nanoseconds.

    Args:
        usual_delays: Use the usual delay of every edge instead of the recorded one. Recorded delays reproduce the
            recorded starts whatever the edges are, so usual delays test the graph.
    """
    run = simulate(graph, usual_delays=usual_delays)
    try:
        next(run)
    except StopIteration as done:
        return float(done.value)
    raise AssertionError("a single graph must not wait for other ranks")


def simulate(  # noqa: C901, PLR0912, PLR0915  one loop: calls would cost more than what they do
    graph: Graph, meetings: Sequence[int] | None = None, *, usual_delays: bool = False, passes: int = PASSES
) -> Meeting:
    """Simulate one rank's steps repeatedly.

    For a single rank the simulation ends when a pass ends like the previous one, because all later ones would repeat
    it. Yields the number of the operation and the moment of every arrival in a collective in which ranks meet, and is
    sent the moment at which that collective ends; returns the time of a step in nanoseconds.

    Args:
        meetings: By operation: 1 if ranks meet in it, else 0.
    """
    chain, operations = graph.chain, graph.operations
    gap, length, kind = chain.gap.tolist(), chain.length.tolist(), chain.kind.tolist()
    returns, waits, period, queue = chain.returns.tolist(), chain.waits, chain.period, chain.queue
    first = _first(graph)
    stream, duration, depends = operations.stream.tolist(), operations.duration.tolist(), operations.depends
    if usual_delays:
        latency = (operations.ahead + operations.usual_latency).tolist()
        after = [operations.usual_after] * len(stream)
    else:
        latency, after = operations.latency.tolist(), operations.after.tolist()
    clocks = [0.0] * (max(stream, default=0) + 1)
    ends = [0.0] * len(stream)
    begun: list[float] = []
    time = ready = 0.0
    finished: list[tuple[float, float]] = []
    after_ops = [depends.get(number) for number in range(len(stream))]
    waiting = [waits.get(node) for node in range(len(kind))]
    meets = meetings if meetings is not None else [0] * len(stream)
    state: list[float] = []
    for _ in range(passes):
        for node, what in enumerate(kind):
            time += gap[node]
            if what == LAUNCH:
                if queue and len(begun) >= queue and begun[-queue] > time:
                    time = begun[-queue]
                begin = time
                for number in range(first[node], first[node + 1]):
                    bound = clocks[stream[number]]
                    others = after_ops[number]
                    if others is not None:
                        for other in others:
                            if ends[other] > bound:
                                bound = ends[other]
                    begin = time + latency[number]
                    bound += after[number]
                    if bound > begin:
                        begin = bound
                    end = (yield number, begin) if meets[number] else begin + duration[number]
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
            if waiting[node] is not None:
                time = max(time, max(clocks[number] for number in waits[node]) + returns[node])
        time += chain.tail
        finished.append((time, max(time, *clocks)))
        before, state = state, [ready - time if period else 0.0, *(clock - time for clock in clocks)]
        if meetings is None and before and max(map(abs, map(sub, state, before))) < SAME_NS:
            break
    rounds = (len(finished) - 1) * graph.num_steps
    return max(last - early for early, last in zip(finished[0], finished[-1], strict=True)) / rounds


def _first(graph: Graph) -> list[int]:
    """Return the index of the first operation of every node, followed by the number of operations."""
    first = graph.operations.node.searchsorted(range(len(graph.chain) + 1))
    return [int(number) for number in first]
