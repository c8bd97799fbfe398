"""Cost of the profiler: the lowest at which the replay takes as long as the unprofiled step.

Two costs, one after the other: a time for every event, as long as the trace allows it, and, where the host was slower
still, the same part of everything that it did but stand still. An operator that only holds another one lasts as long as
recording it takes, so a trace itself bounds the first. Costs that leave the simulated step within the tolerance of the
unprofiled one agree with it alike: their middle is taken, their ends say how sure an answer is.
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
"""Largest slowdown of a host under the profiler, beside the cost of events: 2.2 times was seen on one of an H100, in
all.
"""
EVENTS, ALL = 1.0, 2.0
"""Levels of cost: up to the first, events alone cost something; the last is the most."""
USUAL = 0.5
"""Level where the step does not depend on it, because the device sets the pace: recording an event costs as much as an
operator lasts that only holds another one.
"""
TOLERANCE = 0.015
CLOSE = 0.002
MOST_TRIES = 10


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of the profiler to a host.

    Attributes:
        event_ns: Of every recorded event.
        slowdown: How many times as long the rest of the host's own work took.
    """

    event_ns: float = 0.0
    slowdown: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Levels:
    """Level of cost, and the least and the largest that agree with the unprofiled step."""

    least: float = 0.0
    taken: float = 0.0
    largest: float = 0.0


def levels(step_time: Callable[[float], float], unprofiled_ns: float) -> Levels:
    """Levels of cost at which the simulated step takes the unprofiled one.

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
    """The least level at which the step takes no longer, by false position: its time is nearly linear in the level."""
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
    """The cost of a level to the host of a graph."""
    most = graph.chain.recording_ns
    if level <= EVENTS:
        return Cost(event_ns=level * most)
    part = (level - EVENTS) / (ALL - EVENTS)
    return Cost(event_ns=most, slowdown=1 / (1 - part * (1 - 1 / MOST_SLOWDOWN)))


def own_cost(graph: Graph, largest: Cost, most_ns: float) -> Cost:
    """The cost to one of several ranks, of which the largest is known: recording an event costs each its own time.

    Args:
        most_ns: The most that recording an event can have cost any of the ranks.
    """
    return replace(largest, event_ns=largest.event_ns * graph.chain.recording_ns / most_ns)


def at_level(graph: Graph, level: float) -> Graph:
    """Cost to one of several ranks, of which the largest is known: each rank has its own time for recording an
    event.
    """
    return calibrated(graph, cost_at(graph, level))


def calibrated(graph: Graph, cost: Cost) -> Graph:
    """A graph as the step is without the profiler."""
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
