"""Replay of the steps with each kernel at its minimum possible time: the maximum share of the step that faster kernels
could save.

A kernel that overlaps with other work, or waits for a late host, saves less of the step than its time above the floor.
"""

from __future__ import annotations

import numpy as np
from msgspec import structs

from steptune.tuner.profiling.capture import Capture
from steptune.tuner.profiling.floors import Floors
from steptune.tuner.profiling.replay.answers import ROOFLINE, as_replayed
from steptune.tuner.profiling.replay.graph import Graph
from steptune.tuner.profiling.replay.scenarios import at_floors
from steptune.tuner.profiling.replay.simulate import step_time_ns
from steptune.tuner.records import Replay
from steptune.tuner.trace_records import Roofline

NUM_REPLAYED = 1
"""Number of kernels that are simulated individually: every simulation lengthens the analysis."""


def with_floors(
    capture: Capture, found: Roofline, floors: Floors, graph: Graph, replay: Replay, unprofiled_ns: float | None
) -> tuple[Roofline, Replay]:
    """Add to the roofline and the replay the shares of the step that would be saved if kernels took their minimum
    possible time. If the steps cannot be replayed, return both unchanged.
    """
    if replay.refusal or not replay.step_time_ns or not found.kernels:
        return found, replay
    work, names = capture.trace.work, capture.trace.names
    least = floors.of_work_ns
    graph = as_replayed(graph, replay, unprofiled_ns)
    whole = replay.step_time_ns

    def saved(chosen: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> float:
        return max(0.0, 1 - step_time_ns(at_floors(graph, np.where(chosen, least, np.inf))) / whole)

    rows = list(found.kernels)
    for place, row in enumerate(rows[:NUM_REPLAYED]):
        mine = work.name == names.index(row.name)
        rows[place] = structs.replace(row, saved_share=saved(mine))
    everywhere = saved(np.ones(len(work), dtype=bool))
    return (
        structs.replace(found, kernels=tuple(rows)),
        structs.replace(replay, saved={**replay.saved, ROOFLINE: everywhere}),
    )
