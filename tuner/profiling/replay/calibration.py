"""The profiler's cost: the least time for every event without which the replay takes the unprofiled step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from steptune.tuner.profiling.replay.graph import Graph, without_profiler

MOST_NS = 6_000.0
"""More than any event was seen to cost: 0.8 to 1.6 us on hosts of H200s, 0.7 to 5.2 us on one of an H100."""
USUAL_NS = 1_000.0
"""Where the step does not depend on it, because the device sets the pace."""
TOLERANCE = 0.015
CLOSE = 0.002
MOST_TRIES = 10


def event_cost_ns(step_time: Callable[[float], float], unprofiled_ns: float) -> float:
    """Cost of recording one event.

    Args:
        step_time: The step's simulated time, in nanoseconds, at a cost.
        unprofiled_ns: Time of a step without the profiler.
    """
    low, high = 0.0, MOST_NS
    slowest, fastest = step_time(low), step_time(high)
    if slowest - fastest < TOLERANCE * slowest:
        return USUAL_NS
    target = unprofiled_ns * (1 + TOLERANCE)
    if slowest <= target:
        return 0.0
    if fastest > target:
        return MOST_NS
    above, below = slowest - target, fastest - target
    for _ in range(MOST_TRIES):  # false position: the time is nearly linear in the cost
        middle = high - below * (high - low) / (below - above)
        miss = step_time(middle) - target
        if abs(miss) <= CLOSE * target:
            return middle
        if miss > 0:
            low, above, below = middle, miss, below / 2
        else:
            high, below, above = middle, miss, above / 2
    return high


def with_unprofiled_pace(graph: Graph, step_time: Callable[[Graph], float], unprofiled_ns: float) -> Graph:
    """The graph with workers that make batches as fast as in the unprofiled steps, where their pace is the steps' one.

    A window has few batches, whose times vary; the profiler does not slow workers.
    """
    chain = graph.chain
    if not chain.period:
        return graph
    paced = step_time(graph)
    if paced - step_time(replace(graph, chain=chain.having(period=0.0))) < TOLERANCE * paced:
        return graph
    return replace(graph, chain=chain.having(period=chain.period * unprofiled_ns / paced))


def calibrated(graph: Graph, cost_ns: float) -> Graph:
    """A graph as the step is without the profiler."""
    return replace(graph, chain=without_profiler(graph.chain, cost_ns))
