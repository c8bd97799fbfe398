"""Work that only some steps have: an evaluation inside the loop, drawing samples, a second update.

It is not a stall, because the host keeps dispatching, and not a slow step, which runs the same operations as others. So
the number of operations reveals it, and its time is the compute of those steps beyond that of the others.
"""

from __future__ import annotations

import numpy as np
from msgspec import structs

from steptune.tuner.costs.categories import COMPUTE
from steptune.tuner.profiling.capture import Capture
from steptune.tuner.profiling.intervals import Ints, median
from steptune.tuner.profiling.replay.answers import EXTRA, as_replayed
from steptune.tuner.profiling.replay.graph import Graph
from steptune.tuner.profiling.replay.scenarios import without_steps
from steptune.tuner.profiling.replay.simulate import step_time_ns
from steptune.tuner.profiling.trace import Kind
from steptune.tuner.records import Breakdown, Replay
from steptune.tuner.trace_records import ExtraWork

LEAST_STEPS = 4
MORE = 1.2
"""Minimum number of operations for a step to count as doing extra work, as a multiple of the median over the steps."""
USUAL = r"^ProfilerStep#|^Optimizer\.|^autograd::|^PyTorch Profiler|^torch/|^<|^nn\.Module: "
"""Pattern for names that do not identify extra work: annotations of PyTorch and its profiler, and functions outside the
user's code.
"""


def extra_work(capture: Capture, breakdown: Breakdown, device: int | None) -> ExtraWork | None:
    """Find work that only a few steps do; None if all steps do the same, or if most do the extra work.

    Args:
        breakdown: Breakdown of the device.
        device: Number of the device; None on a CPU.
    """
    count = len(breakdown.steps)
    if count < LEAST_STEPS or count != len(capture.steps):
        return None
    operations = np.bincount(_step_of(capture, _operations(capture, device)), minlength=count)
    more = operations >= MORE * median(operations)
    if not more.any() or 2 * more.sum() > count:
        return None
    computed = np.array([sum(step.get(category.value, 0) for category in COMPUTE) for step in breakdown.steps])
    beyond = computed[more] - median(computed[~more])
    return ExtraWork(
        steps=tuple((np.flatnonzero(more) + 1).tolist()),
        time_ns=int(np.maximum(beyond, 0).sum()),
        name=_name(capture, more),
    )


def with_extra_work(
    replay: Replay, graph: Graph, extra: ExtraWork | None, num_steps: int, unprofiled_ns: float | None
) -> Replay:
    """Return the replay with one more result: the share saved if no step did extra work. It is simulated by leaving out
    the steps with extra work.

    Args:
        graph: Graph of the window's first steps.
        num_steps: Number of all steps of the window, which the graph's steps represent.
    """
    simulated = [step - 1 for step in extra.steps if step <= graph.num_steps] if extra is not None else []
    if replay.refusal or extra is None or not simulated or graph.num_steps - len(simulated) < LEAST_STEPS:
        return replay
    graph = as_replayed(graph, replay, unprofiled_ns)
    usual = step_time_ns(without_steps(graph, simulated))
    more = max(0.0, step_time_ns(graph) - usual) * graph.num_steps / len(simulated)
    more *= len(extra.steps) / num_steps
    return structs.replace(replay, saved={**replay.saved, EXTRA: more / (usual + more)})


def _operations(capture: Capture, device: int | None) -> Ints:
    """Return the launch time of each operation in the steps; on a CPU, the start of each operator."""
    trace, launches = capture.trace, capture.launches
    if device is None:
        host = trace.host
        found = host.start[(host.kind == Kind.OPERATOR) & (host.thread == capture.steps.thread)]
    else:
        found = launches.start[(trace.work.device == device) & (launches.row >= 0)]
    first, last = _begins(capture)[0], max(capture.steps.host_end, capture.steps.span[1])
    inside: Ints = found[(found >= first) & (found < last)]
    return inside


def _begins(capture: Capture) -> Ints:
    steps = capture.steps
    return steps.host_starts if len(steps.host_starts) else steps.boundaries[:-1]


def _step_of(capture: Capture, time: Ints) -> Ints:
    """Return the number of the step that contains each moment, from 0."""
    step: Ints = np.searchsorted(_begins(capture), time, side="right") - 1
    return step


def _name(capture: Capture, more: np.typing.NDArray[np.bool_]) -> str:
    """Return the longest annotation, or else Python function, that only the steps with extra work have."""
    trace, host = capture.trace, capture.trace.host
    first, last = _begins(capture)[0], capture.steps.span[1]
    usual = trace.names_matching(USUAL)[host.name]
    for kind in (Kind.ANNOTATION, Kind.PYTHON):
        rows = np.flatnonzero(
            (host.kind == kind)
            & (host.thread == capture.steps.thread)
            & ~usual
            & (host.start >= first)
            & (host.end <= last)
        )
        in_more = more[_step_of(capture, host.start[rows])]
        only = rows[in_more & ~np.isin(host.name[rows], host.name[rows[~in_more]])]
        if len(only):
            times = np.bincount(host.name[only], weights=host.end[only] - host.start[only])
            return trace.names[int(times.argmax())]
    return ""
