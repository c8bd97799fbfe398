"""A trace with the launches, steps and regions that every part of its analysis uses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptune.tuner.costs.categories import COMPUTE, PRIORITY, Category, classify_copy, classify_kernel
from steptune.tuner.profiling.communication import collective_records, communicates
from steptune.tuner.profiling.intervals import Ints
from steptune.tuner.profiling.launches import Launches, find_launches
from steptune.tuner.profiling.regions import Regions
from steptune.tuner.profiling.steps import StepWindows, find_steps
from steptune.tuner.profiling.trace import Kind, Trace
from steptune.tuner.records import StepPhase

PHASES = tuple(StepPhase)


@dataclass(frozen=True, kw_only=True)
class Capture:
    """One rank's trace, with its device operations linked to their launches and classified.

    Attributes:
        category: int64 by row of `trace.work`: `PRIORITY` number of the operation's category.
        phase: int64 by row of `trace.work`: number of the `StepPhase` that launched it.
        record: int64 by row of `trace.work`: index into `trace.collectives`, or -1.
    """

    trace: Trace
    launches: Launches
    regions: Regions
    steps: StepWindows
    category: Ints
    phase: Ints
    record: Ints

    @property
    def device_numbers(self) -> tuple[int, ...]:
        rows = self.trace.work_rows()
        return tuple(np.unique(self.trace.work.device[rows]).tolist())


def link(trace: Trace) -> Capture:
    """Find launches, steps and regions, and classify every device operation."""
    launches = find_launches(trace)
    regions = Regions(trace)
    steps = find_steps(trace, launches)
    record = collective_records(trace)
    recorded = _in_graph(trace, launches)
    # The host launches a graph as one: of its kernels, the update's are those over lists of tensors.
    updates = recorded & trace.names_matching(r"multi_tensor_apply")[trace.work.name]
    optimizer = regions.optimizer.contains(launches.thread, launches.start) | updates
    backward = regions.backward.contains(launches.thread, launches.start)
    recompute = regions.recompute.contains(launches.thread, launches.start)
    category = _categories(trace, record, optimizer, recompute)
    known = launches.row >= 0
    conditions = [
        (StepPhase.OPTIMIZER, optimizer),
        (StepPhase.RECOMPUTE, recompute),
        (StepPhase.BACKWARD, backward),
        (StepPhase.FORWARD, known & (launches.thread == steps.thread) & ~recorded),
    ]
    phase = np.full(len(trace.work), PHASES.index(StepPhase.OTHER), dtype=np.int64)
    for name, mask in reversed(conditions):
        phase[mask & known] = PHASES.index(name)
    return Capture(
        trace=trace,
        launches=launches,
        regions=regions,
        steps=steps,
        category=category,
        phase=phase,
        record=record,
    )


def _in_graph(trace: Trace, launches: Launches) -> npt.NDArray[np.bool_]:
    """Return a mask of operations launched by a CUDA graph; their phase cannot be read from the launching call."""
    graph_call = trace.names_matching(r"GraphLaunch")[trace.host.name]
    inside: npt.NDArray[np.bool_] = np.zeros(len(trace.work), dtype=bool)
    known = launches.row >= 0
    inside[known] = graph_call[launches.row[known]]
    return inside


def _categories(trace: Trace, record: Ints, optimizer: npt.NDArray[np.bool_], recompute: npt.NDArray[np.bool_]) -> Ints:
    work = trace.work
    used = np.unique(work.name)
    kernels = np.zeros(len(trace.names), dtype=np.int64)
    copies = np.zeros(len(trace.names), dtype=np.int64)
    for name in used.tolist():
        kernels[name] = PRIORITY[classify_kernel(trace.names[name])]
        copies[name] = PRIORITY[classify_copy(trace.names[name])]
    code = np.where(work.kind == Kind.COPY, copies[work.name], kernels[work.name])
    compute = np.isin(code, [PRIORITY[c] for c in COMPUTE])
    code[optimizer & compute] = PRIORITY[Category.OPTIMIZER]
    code[recompute & compute & ~optimizer] = PRIORITY[Category.RECOMPUTE]
    communication, pairs = communicates(trace, record)
    code[communication] = PRIORITY[Category.COMMUNICATION]
    code[pairs] = PRIORITY[Category.PIPELINE_BUBBLE]
    return code
