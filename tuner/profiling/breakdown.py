"""Breakdown of a trace: every nanosecond of the profiled steps in one category.

On a device: what the device does, first compute, then communication and copies that compute does not
hide; where it does nothing, a gap (`gaps`). On a CPU: the innermost operator on the thread that runs
the steps (`cpu_time`). The sum of the categories is the step, for every step, asserted in integers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
import numpy as np

from steptune.tuner.costs.categories import CATEGORIES, HOST_CATEGORIES, Category
from steptune.tuner.profiling.capture import PHASES, Capture
from steptune.tuner.profiling.facts import facts_of_trace
from steptune.tuner.profiling.intervals import Ints, histogram
from steptune.tuner.profiling.quality import capture_quality
from steptune.tuner.profiling.segments import Segments
from steptune.tuner.profiling.stalls import find_stalls
from steptune.tuner.profiling.trace import Kind, Trace
from steptune.tuner.records import Breakdown

TOP_OPERATORS = 40
ATTENTION = re.compile(r"attention|flash|fmha|sdpa|compute_dot_do_o")
"""Pattern for attention's operators and kernels, whose names show which backend ran."""
LIBRARY_OPERATOR = re.compile(r"(?!aten::|autograd::|c10d::|inductor::|prim::|profiler::|torch::)\w+::\w+(\.\w+)?")
"""Pattern for operators of libraries other than PyTorch."""
OWN_KERNEL = re.compile(
    r"(?!(void )?(at::|at_cuda_|c10::|std::|cub::|thrust::|\(anonymous|(_ZN\d+)?cutlass|cask|cudnn|cublas|gemm|nvjet"
    r"|nccl|internal::|sm\d|ampere_|hopper_|turing_|volta_|maxwell_|pytorch_|fmha_|triton_))[A-Za-z_]"
)
"""Pattern for kernels that neither PyTorch, nor Inductor, nor a library of CUDA brings. Where a graph replays the step
no operator is recorded, and only the kernel's name shows that it ran.
"""
WAITS_FOR_OTHERS = (Category.COMMUNICATION, Category.PIPELINE_BUBBLE, Category.QUEUED)
MAX_EVENT_OVERHEAD_NS = 3_000
"""Maximum time to record one operator: 0.2 to 1.7 us were measured on hosts with H100 and H200 GPUs
(benchmarks/overhead_correction.py).
"""


def breakdown_of(
    capture: Capture, device: str, segments: Segments, unprofiled_step_time_ns: int | None = None
) -> Breakdown:
    """Return the breakdown of a device or the CPU, from time segments with one category each."""
    boundaries = capture.steps.boundaries
    number = None if device == "cpu" else int(device.removeprefix("cuda:"))
    by_step = histogram(segments.start, segments.end, segments.category, len(CATEGORIES), boundaries)
    lengths = np.diff(boundaries)
    assert np.array_equal(by_step.sum(axis=1), lengths), "categories must sum to the length of every step"
    totals = _named(by_step.sum(axis=0))
    step_time_ns = int(lengths.sum())
    num_steps = len(lengths)
    rescaled = {}
    if unprofiled_step_time_ns:
        rescaled = rescale(
            totals,
            num_steps,
            unprofiled_step_time_ns,
            num_recorded=_named(segments.num_recorded),
            on_cpu=device == "cpu",
        )
    return Breakdown(
        rank=capture.trace.rank or 0,
        device=device,
        num_steps=num_steps,
        step_time_ns=step_time_ns,
        categories=totals,
        quality=capture_quality(capture, device, totals, unprofiled_step_time_ns),
        unprofiled_step_time_ns=unprofiled_step_time_ns,
        rescaled=rescaled,
        overlapped=segments.overlapped,
        blocking=segments.blocking,
        steps=tuple({name: value for name, value in _named(row).items() if value} for row in by_step),
        phases=_phases(segments, boundaries),
        operators=_top_names(capture.trace, capture.steps.span),
        copies=_copies(capture.trace, capture.steps.span),
        facts=facts_of_trace(capture, number),
        stalls=find_stalls(capture, segments, number),
    )


def rescale(
    categories: Mapping[str, int],
    num_steps: int,
    unprofiled_step_time_ns: int,
    *,
    num_recorded: Mapping[str, int],
    on_cpu: bool,
) -> dict[str, int]:
    """Rescale the categories per step so that their sum is the unprofiled step time.

    The profiler makes the host slower, by a few microseconds for every event that it records, and leaves
    kernels almost unchanged. So the categories of the host (on a CPU: all) and the waits for data are reduced by the
    excess in proportion to the events recorded in them, none below zero. What that many events
    cannot explain is how far these steps were slower by chance: it is taken from the same categories in
    proportion to their time, then from what waits for other ranks and streams, whose hosts the profiler slowed
    as well, and only then from all. Where the profiled steps were the faster ones, all categories grow alike. A
    stretch without length has nothing to scale.
    """
    per_step = {name: value / num_steps for name, value in categories.items()}
    total = sum(per_step.values())
    if not total:
        return {}
    excess = total - unprofiled_step_time_ns
    if excess <= 0:
        return _rounded({n: v * unprofiled_step_time_ns / total for n, v in per_step.items()}, unprofiled_step_time_ns)
    waits = (Category.DATA_WAIT, Category.EPOCH_RESTART)
    slowed = [n for n in per_step if on_cpu or n in HOST_CATEGORIES or n in waits]
    events = {n: num_recorded.get(n, 0) / num_steps for n in slowed}
    explained = min(excess, MAX_EVENT_OVERHEAD_NS * sum(events.values()))
    excess += _take(per_step, explained, events) - explained
    excess = _take(per_step, excess, {n: per_step[n] for n in slowed})
    excess = _take(per_step, excess, {n: per_step[n] for n in per_step if n in WAITS_FOR_OTHERS})
    _take(per_step, excess, dict(per_step))
    return _rounded(per_step, unprofiled_step_time_ns)


def _take(values: dict[str, float], amount: float, weights: dict[str, float]) -> float:
    """Subtract an amount from values in proportion to weights, without making any value negative; return the part that
    could not be subtracted.
    """
    open_names = {n for n, weight in weights.items() if weight > 0 and values[n] > 0}
    while amount > 1e-6 and open_names:
        total = sum(weights[n] for n in open_names)
        shares = {n: amount * weights[n] / total for n in open_names}
        for name, share in shares.items():
            taken = min(share, values[name])
            values[name] -= taken
            amount -= taken
        emptied = {n for n in open_names if values[n] <= 0}
        if not emptied:
            break
        open_names -= emptied
    return amount


def with_epoch_restart(breakdown: Breakdown, restart_ns_per_step: int) -> Breakdown:
    """Add the cost of starting an epoch, spread over its steps, to the rescaled step."""
    if not breakdown.rescaled:
        return breakdown
    rescaled = dict(breakdown.rescaled)
    rescaled[Category.EPOCH_RESTART.value] = rescaled.get(Category.EPOCH_RESTART.value, 0) + restart_ns_per_step
    return msgspec.structs.replace(breakdown, rescaled=rescaled)


def _rounded(values: dict[str, float], total: int) -> dict[str, int]:
    """Round the values to integers that sum to `total`, by largest remainders."""
    whole = {name: int(value) for name, value in values.items()}
    missing = total - sum(whole.values())
    by_remainder = sorted(values, key=lambda name: whole[name] - values[name])
    step = 1 if missing > 0 else -1
    position = 0
    while missing != 0 and by_remainder:
        name = by_remainder[position % len(by_remainder)]
        if whole[name] + step >= 0:
            whole[name] += step
            missing -= step
        position += 1
    return whole


def _named(row: Ints) -> dict[str, int]:
    return {info.category.value: int(value) for info, value in zip(CATEGORIES, row.tolist(), strict=True)}


def _phases(segments: Segments, boundaries: Ints) -> dict[str, int]:
    start, end, phase = segments.phases
    known = phase >= 0
    totals = np.bincount(phase[known], weights=None, minlength=len(PHASES)) * 0
    np.add.at(totals, phase[known], (end - start)[known])
    return {name.value: int(value) for name, value in zip(PHASES, totals.tolist(), strict=True)}


def _top_names(trace: Trace, span: tuple[int, int]) -> tuple[str, ...]:
    """Return the names of operators and kernels inside the steps: those with the most time, and, however short, those
    of attention, of other libraries' operators (`library::operator`, such as fused kernels), and of kernels
    that no known library brings.
    """
    totals = np.zeros(len(trace.names), dtype=np.int64)
    for table, kind in ((trace.host, Kind.OPERATOR), (trace.work, Kind.KERNEL)):
        rows = (table.kind == kind) & (table.start >= span[0]) & (table.start < span[1])
        np.add.at(totals, table.name[rows], (table.end - table.start)[rows])
    order = [name for name in np.argsort(-totals, kind="stable").tolist() if totals[name] > 0]
    longest, others = order[:TOP_OPERATORS], order[TOP_OPERATORS:]
    kernels = set(np.unique(trace.work.name[trace.work.kind == Kind.KERNEL]).tolist())
    kept = [name for name in others if _is_kept(trace.names[name], name in kernels)]
    return tuple(trace.names[name] for name in [*longest, *kept])


def _is_kept(name: str, is_kernel: bool) -> bool:
    own = OWN_KERNEL.match(name) if is_kernel else LIBRARY_OPERATOR.fullmatch(name)
    return own is not None or ATTENTION.search(name) is not None


def _copies(trace: Trace, span: tuple[int, int]) -> tuple[str, ...]:
    work = trace.work
    rows = (work.kind == Kind.COPY) & (work.start >= span[0]) & (work.start < span[1])
    return tuple(trace.names[name] for name in np.unique(work.name[rows]).tolist())
