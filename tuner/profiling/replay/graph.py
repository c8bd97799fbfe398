"""Dependency graph of a rank's recorded steps: one chain of host calls, and the device operations that they launch.

Times are measured; edges follow rules. All threads that launch form one chain, because forward and backward threads
take turns; launches of a thread beside them have a place in the chain, but take none of its time. An operation begins
when its launch, the previous operation on its stream, and the operations of other streams that it waits for allow it.
Of these edges the one that bound its start carries the whole measured delay, the others the usual one.

Sources: Daydream (Zhu et al., ATC 2020) for the graph and its edits, dPRO (Hu et al., MLSys 2022) for several ranks,
Lumos (Liang et al., MLSys 2025) for edges between streams in Kineto traces.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from steptune.tuner.profiling.capture import Capture
from steptune.tuner.profiling.replay.chain import Chain, Floats, host_chain, launching_calls
from steptune.tuner.profiling.replay.operations import Operations, device_operations

LEAST_STEPS, MOST_STEPS, MOST_LAUNCHES = 2, 10, 10_000
"""Minimum and maximum number of steps of a graph, and maximum number of its launches. Every answer simulates the whole
graph, so only the first steps of a longer capture are used.
"""
MOST_OVERHEAD = 0.85
"""Maximum share of an interval of host time that may count as the cost of recording its events."""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The recorded steps of one rank.

    Attributes:
        recorded_ns: Time of a recorded step, as in the breakdown.
    """

    num_steps: int
    recorded_ns: float
    chain: Chain
    operations: Operations

    @property
    def size(self) -> int:
        """Return the number of host nodes and device operations."""
        return len(self.chain) + len(self.operations)


def build_graph(capture: Capture) -> Graph | None:
    """Build the graph of the steps that the profiler marked; None without marks or without device work that the steps
    launch.
    """
    if not capture.steps.marked:
        return None
    steps = capture.steps.first(_num_replayed(capture))
    capture = replace(capture, steps=steps)
    chain = host_chain(capture)
    if chain is None:
        return None
    chain, operations = device_operations(capture, chain)
    low, high = steps.span
    return Graph(num_steps=len(steps), recorded_ns=(high - low) / len(steps), chain=chain, operations=operations)


def _num_replayed(capture: Capture) -> int:
    """Return the number of simulated steps: as many as launch at most `MOST_LAUNCHES` operations, but at least two."""
    steps, calls = capture.steps, launching_calls(capture)
    per_step = np.histogram(capture.trace.host.start[calls], [*steps.host_starts.tolist(), steps.host_end])[0]
    return int(max(LEAST_STEPS, (np.cumsum(per_step[:MOST_STEPS]) <= MOST_LAUNCHES).sum()))


def without_profiler(chain: Chain, cost_ns: float) -> Chain:
    """Return the chain without the profiler's cost of recording events. At most the share `MOST_OVERHEAD` of each
    interval of host time is removed.
    """

    def less(time: Floats, events: Floats) -> Floats:
        return np.asarray(np.maximum(time - cost_ns * events, (1 - MOST_OVERHEAD) * time))

    return chain.having(
        gap=less(chain.gap, chain.gap_events),
        length=less(chain.length, chain.length_events),
        tail=float(less(np.array([chain.tail]), np.array([chain.tail_events]))[0]),
    )
