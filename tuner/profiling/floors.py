"""Least time of each call: the time for its FLOP at the device's peak, or for its compulsory bytes at the memory
bandwidth, whichever is longer.

It is a lower bound (Williams et al., "Roofline", CACM 2009): a kernel may be unable to reach it, and data that stays in
a cache needs no memory access. A call without a work model has no floor; none is guessed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptune.tuner.costs.categories import PRIORITY, Category
from steptune.tuner.profiling.call_work import CallGroups, Mask
from steptune.tuner.profiling.capture import Capture
from steptune.tuner.profiling.facts import kernel_dtype
from steptune.tuner.profiling.operator_calls import OperatorCalls
from steptune.tuner.profiling.peaks import BFLOAT16, FLOAT8, FLOAT16, FLOAT32, TF32, Peak
from steptune.tuner.profiling.trace import Kind
from steptune.tuner.profiling.work import Work

Floats = npt.NDArray[np.float64]
ARITHMETIC = {"half": FLOAT16, "bfloat16": BFLOAT16}
FEWER = re.compile(r"winograd|fft", re.IGNORECASE)
"""Pattern for convolution kernels that need fewer multiplications than the convolution's FLOP count."""
COPIES = (PRIORITY[Category.COPY_H2D], PRIORITY[Category.COPY_D2H])


@dataclass(frozen=True, kw_only=True)
class Floors:
    """Minimum possible times (floors) of calls and of device operations.

    Attributes:
        of_call_ns: Least time of a call by row of `trace.host`; NaN if unknown.
        of_work_ns: Least time of an operation by row of `trace.work`: the call's floor, distributed over the call's
            operations; if unknown, the operation's own time.
        by_memory: Whether bytes take longer than FLOP, by row of `trace.host`.
        ideal_ns: Time of a call's FLOP at the peak, by row of `trace.host`; 0 without FLOP, NaN if the arithmetic is
            unknown.
    """

    of_call_ns: Floats
    of_work_ns: Floats
    by_memory: Mask
    ideal_ns: Floats


def floors_of(capture: Capture, calls: OperatorCalls, groups: CallGroups, peak: Peak) -> Floors:
    """Return the least times of the calls whose work is known."""
    host, work = capture.trace.host, capture.trace.work
    compute, memory, ideal = (np.full(len(groups), np.nan) for _ in range(3))
    kernels = _main_kernels(capture, calls, groups)
    for number, one in groups.works.items():
        compute[number], memory[number], ideal[number] = _least_times(one, kernels.get(number, ""), peak)
    floor = np.fmax(compute, memory)
    of_call, ideal_ns = np.full(len(host), np.nan), np.full(len(host), np.nan)
    own = groups.counted & ~_copies(capture, calls)
    rows, group = groups.row[own[groups.row]], groups.group[own[groups.row]]
    of_call[rows] = floor[group]
    ideal_ns[rows] = ideal[group]
    by_memory: Mask = np.zeros(len(host), dtype=bool)
    by_memory[rows] = np.nan_to_num(memory[group]) > np.nan_to_num(compute[group])
    # A call's floor is shared out over its kernels by their time; a kernel faster than it has its own time.
    share = np.divide(of_call, groups.time_ns, where=groups.time_ns > 0, out=np.full(len(host), np.nan))
    launched, time = calls.launched_by, (work.end - work.start).astype(np.float64)
    part = np.where(launched >= 0, share[np.maximum(launched, 0)], np.nan)
    return Floors(
        of_call_ns=of_call,
        of_work_ns=np.where(np.isnan(part), time, np.minimum(time, time * part)),
        by_memory=by_memory,
        ideal_ns=ideal_ns,
    )


def _copies(capture: Capture, calls: OperatorCalls) -> Mask:
    """Return a mask of calls that copy between host and device: the device's memory bandwidth does not limit them."""
    found: Mask = np.zeros(len(capture.trace.host), dtype=bool)
    launched = calls.launched_by[np.isin(capture.category, COPIES)]
    found[launched[launched >= 0]] = True
    return found


def _least_times(work: Work, kernel: str, peak: Peak) -> tuple[float, float, float]:
    """Return the time of a call at the device's peak rates, in nanoseconds, by three measures: its necessary FLOP, its
    bytes, and its FLOP as counted.
    """
    rate = peak.flops_per_s.get(_arithmetic(work.dtype, kernel), np.nan)
    needed = np.nan if work.needed_flops is None or FEWER.search(kernel) else work.needed_flops / rate * 1e9
    counted = 0.0 if work.flops is None else work.flops / rate * 1e9
    memory = np.nan if work.num_bytes is None else work.num_bytes / peak.bytes_per_s * 1e9
    return needed, memory, counted


def _arithmetic(dtype: str, kernel: str) -> str:
    """Return the dtype in which a matmul computes, from the dtype of its arguments. For FP32, the kernel's name tells
    whether it is TF32.
    """
    if dtype.startswith(FLOAT8):
        return FLOAT8
    if dtype != "float":
        return ARITHMETIC.get(dtype, "")
    said = kernel_dtype(kernel)
    return said if said in (FLOAT32, TF32) else ""


def _main_kernels(capture: Capture, calls: OperatorCalls, groups: CallGroups) -> dict[int, str]:
    """Return, for each group of calls, the name of the kernel with the most time."""
    work, host = capture.trace.work, capture.trace.host
    group_of = np.full(len(host), -1, dtype=np.int64)
    group_of[groups.row] = groups.group
    rows = np.flatnonzero((calls.launched_by >= 0) & (work.kind == Kind.KERNEL))
    group = group_of[calls.launched_by[rows]]
    rows, group = rows[group >= 0], group[group >= 0]
    width = len(capture.trace.names)
    keys, number = np.unique(group * width + work.name[rows], return_inverse=True)
    time = np.bincount(number, weights=work.end[rows] - work.start[rows], minlength=len(keys))
    order = np.argsort(time, kind="stable")
    # Of each group the last, which has the most time, stays.
    return {int(keys[n] // width): capture.trace.names[int(keys[n] % width)] for n in order.tolist()}
