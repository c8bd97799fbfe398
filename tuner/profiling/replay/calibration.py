"""Cost of the profiler: the lowest cost at which the replayed step takes as long as the unprofiled one.

There are two costs, applied in turn: a time for every event, up to the limit that the trace sets, and, if the host was
slower still, a slowdown of all its work except stalls. An operator that only contains another one lasts as long as
recording it takes, so the trace itself bounds the first cost. All costs that bring the simulated step within the
tolerance of the unprofiled one agree with it equally: their middle is used, and their range gives the uncertainty of an
answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from steptune.tuner.profiling.replay.chain import LAUNCH
from steptune.tuner.profiling.replay.graph import Graph, without_profiler
from steptune.tuner.profiling.replay.scenarios import pace_ns, stalls
from steptune.tuner.profiling.stalls import LEAST_NS

MOST_SLOWDOWN = 2.5
"""Maximum factor by which the profiler slows a host, in addition to the cost of events; a total factor of 2.2 was
measured on an H100 host.
"""
EVENTS, ALL = 1.0, 2.0
"""Levels of the profiler's cost: the highest at which only recording events costs time, and the maximum. Between the
two, the host's own work is slower as well.
"""
USUAL = 0.5
"""Default level of the profiler's cost, at which recording an event costs half its maximum. It is used if the device
sets the pace, because the step time then does not depend on the level.
"""
TOLERANCE = 0.015
CLOSE = 0.002
MOST_TRIES = 10


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of the profiler on a host.

    Attributes:
        event_ns: Time of recording each event.
        slowdown: Factor by which the rest of the host's own work takes longer.
    """

    event_ns: float = 0.0
    slowdown: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Levels:
    """Level of the profiler's cost that is used, and the lowest and the highest level that agree with the step time
    without the profiler.
    """

    least: float = 0.0
    taken: float = 0.0
    largest: float = 0.0


def levels(step_time: Callable[[float], float], unprofiled_ns: float) -> Levels:
    """Find the levels of cost at which the simulated step takes as long as the unprofiled one.

    Args:
        step_time: The step's simulated time, in nanoseconds, at a level.
        unprofiled_ns: Time of a step without the profiler.
    """
    slowest, fastest = step_time(0.0), step_time(ALL)
    if slowest - fastest < TOLERANCE * slowest:
        return Levels(least=0.0, taken=USUAL, largest=ALL)
    least = _level(step_time, unprofiled_ns * (1 + TOLERANCE), (0.0, slowest), (ALL, fastest))
    largest = _level(step_time, unprofiled_ns, (0.0, slowest), (ALL, fastest))
    return Levels(least=least, taken=(least + largest) / 2, largest=largest)


def _level(
    step_time: Callable[[float], float], target_ns: float, low: tuple[float, float], high: tuple[float, float]
) -> float:
    """Find the lowest level of the profiler's cost at which the step takes no longer than the target, by false
    position: the step time is nearly linear in the level.
    """
    (left, above), (right, below) = (low[0], low[1] - target_ns), (high[0], high[1] - target_ns)
    if above <= 0:
        return left
    if below > 0:
        return right
    for _ in range(MOST_TRIES):
        middle = right - below * (right - left) / (below - above)
        miss = step_time(middle) - target_ns
        if abs(miss) <= CLOSE * target_ns:
            return middle
        if miss > 0:
            left, above, below = middle, miss, below / 2
        else:
            right, below, above = middle, miss, above / 2
    return right


def cost_at(graph: Graph, level: float) -> Cost:
    """Return the profiler's cost at a level, for the host of this graph."""
    most = graph.chain.recording_ns
    if level <= EVENTS:
        return Cost(event_ns=level * most)
    part = (level - EVENTS) / (ALL - EVENTS)
    return Cost(event_ns=most, slowdown=1 / (1 - part * (1 - 1 / MOST_SLOWDOWN)))


def own_cost(graph: Graph, largest: Cost, most_ns: float) -> Cost:
    """Return the profiler's cost on one rank, scaled from the largest cost of all ranks: recording an event takes a
    different time on each rank.

    Args:
        most_ns: Maximum cost of recording an event over all ranks.
    """
    return replace(largest, event_ns=largest.event_ns * graph.chain.recording_ns / most_ns)


def at_level(graph: Graph, level: float) -> Graph:
    """Return the graph with the profiler's cost at a level subtracted."""
    return calibrated(graph, cost_at(graph, level))


def calibrated(graph: Graph, cost: Cost) -> Graph:
    """Return the graph with the given cost of the profiler subtracted."""
    chain = without_profiler(graph.chain, cost.event_ns)
    if cost.slowdown == 1:
        return replace(graph, chain=chain)
    works = np.ones(len(chain), dtype=bool)
    works[stalls(graph.chain)] = False
    return replace(
        graph,
        chain=chain.having(
            gap=np.where(works, chain.gap / cost.slowdown, chain.gap),
            length=np.where(chain.kind == LAUNCH, chain.length / cost.slowdown, chain.length),
            tail=chain.tail / cost.slowdown if chain.tail <= max(LEAST_NS, pace_ns(chain)) else chain.tail,
        ),
    )


def with_unprofiled_pace(graph: Graph, step_time: Callable[[Graph], float], unprofiled_ns: float) -> Graph:
    """Return the graph with batches made at the pace of the unprofiled steps, if workers set the pace of the steps.

    A window has few batches, whose times vary; the profiler does not slow workers.
    """
    chain = graph.chain
    if not chain.period:
        return graph
    paced = step_time(graph)
    if paced - step_time(replace(graph, chain=chain.having(period=0.0))) < TOLERANCE * paced:
        return graph
    return replace(graph, chain=chain.having(period=chain.period * unprofiled_ns / paced))
