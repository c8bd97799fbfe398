"""Roofline of a step: the least time of each call by its FLOP and bytes, and model FLOPs utilisation (MFU).

Operators, kernels and modules are listed by their time above the floor (`floors`), the largest potential first.

MFU is defined as for PaLM (Chowdhery et al. 2022, appendix B): the FLOP of the matmuls, convolutions and attention of
forward and backward pass, as `torch.utils.flop_counter` counts them, at the peak of the arithmetic that ran, over the
time of the step. Checkpointed activations computed again do not count, nor do matmuls of an optimizer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from steptune.tuner.costs.categories import COMPUTING, PRIORITY, Category, classify_operator
from steptune.tuner.profiling.call_work import CallGroups, Mask
from steptune.tuner.profiling.capture import Capture
from steptune.tuner.profiling.floors import Floors, floors_of
from steptune.tuner.profiling.intervals import Ints
from steptune.tuner.profiling.modules import Modules
from steptune.tuner.profiling.operator_calls import OperatorCalls
from steptune.tuner.profiling.peaks import peak_of
from steptune.tuner.profiling.trace import Kind
from steptune.tuner.trace_records import Roofline, RooflineRow

LEAST_KNOWN = 0.95
"""Minimum share of the matmul time that must have a FLOP count for the FLOP of the step to be reported."""
MULTIPLYING = (Category.MATMUL, Category.ATTENTION)
NO_SHAPES = "argument shapes were not recorded; they require record_shapes=True"


def roofline(
    capture: Capture, calls: OperatorCalls, groups: CallGroups, modules: Modules, step_ns: float, top: int = 20
) -> tuple[Roofline, Floors | None]:
    """Return the roofline of the steps, and the least time of each call; None instead of the least times if they are
    unknown.

    Args:
        step_ns: Time of a step, without the profiler if known.
        top: Maximum number of operators, kernels and modules in the lists.
    """
    trace = capture.trace
    names = {device.number: device.name for device in trace.devices}
    devices = {names.get(number, "") for number in capture.device_numbers}
    name = devices.pop() if len(devices) == 1 else ""
    peak = peak_of(name) if name else None
    if not groups.works:
        return Roofline(device=name, peak_known=peak is not None, silent=NO_SHAPES), None
    flops, counted = _model_flops(capture, calls, groups)
    floors = floors_of(capture, calls, groups, peak) if peak is not None else None
    rows: dict[str, tuple[RooflineRow, ...]] = {}
    mfu = known = None
    if floors is not None:
        known = _known_share(capture, calls, floors)
        rows = {
            "operators": _operators(capture, groups, modules, floors, top),
            "kernels": _kernels(capture, calls, floors, top),
            "modules": _modules(groups, modules, floors, top),
        }
        ideal_ns = float(floors.ideal_ns[counted].sum()) / len(capture.steps) / len(capture.device_numbers)
        mfu = ideal_ns / step_ns if flops and step_ns and np.isfinite(ideal_ns) else None
    return Roofline(
        device=name,
        peak_known=peak is not None,
        bytes_per_s=peak.bytes_per_s if peak is not None else None,
        flops_per_s=dict(peak.flops_per_s) if peak is not None else {},
        step_flops=flops,
        mfu=mfu,
        known_share=known,
        silent="" if flops is not None else _uncounted(capture, calls, groups),
        **rows,
    ), floors


def _model_flops(capture: Capture, calls: OperatorCalls, groups: CallGroups) -> tuple[float | None, Mask]:
    """Return the model's FLOP per step, and a mask of the calls counted; None if too much matmul time has no count."""
    host, regions = capture.trace.host, capture.regions
    one = np.array([groups.works[n].flops or 0 if n in groups.works else 0 for n in range(len(groups))], np.float64)
    by_row = np.zeros(len(host))
    by_row[groups.row] = one[groups.group]
    counted = groups.counted & (by_row > 0)
    rows = np.flatnonzero(counted)
    apart = regions.recompute.contains(host.thread[rows], host.start[rows])
    apart |= regions.optimizer.contains(host.thread[rows], host.start[rows])
    counted[rows[apart]] = False
    if 1 - _uncounted_share(capture, calls, groups) < LEAST_KNOWN:
        return None, counted
    return float(by_row[counted].sum()) / len(capture.steps), counted


def _uncounted(capture: Capture, calls: OperatorCalls, groups: CallGroups) -> str:
    share = _uncounted_share(capture, calls, groups)
    return f"the FLOP count is unknown for {share:.0%} of the time of matmuls and attention"


def _uncounted_share(capture: Capture, calls: OperatorCalls, groups: CallGroups) -> float:
    """Return the share of the time of matmuls and attention that has no FLOP count."""
    has_flops = np.zeros(len(groups), dtype=bool)
    has_flops[[n for n, work in groups.works.items() if work.flops is not None]] = True
    own = np.zeros(len(capture.trace.host), dtype=bool)
    own[groups.row] = has_flops[groups.group] & groups.counted[groups.row]
    # The gradient of a convolution counts for the operators that compute it, such as `_slow_conv2d_backward`.
    covered = own | calls.inside(own)
    if capture.device_numbers:
        multiplying, time = _multiplying_work(capture)
        launched = calls.launched_by
        known = (launched >= 0) & covered[np.maximum(launched, 0)]
        whole, with_count = time[multiplying].sum(), time[multiplying & known].sum()
    else:
        classes = [classify_operator(name) in MULTIPLYING for name in groups.names]
        multiplying = np.array(classes, dtype=bool)[groups.group]
        time = groups.time_ns[groups.row]
        # An operator around one that counts leaves the work to it.
        around = calls.around(own)[groups.row]
        whole = time[multiplying & ~around].sum()
        with_count = time[multiplying & covered[groups.row]].sum()
    return 1 - float(with_count) / float(whole) if whole else 0.0


def _multiplying_work(capture: Capture) -> tuple[Mask, Ints]:
    work, (low, high) = capture.trace.work, capture.steps.span
    inside = (work.kind == Kind.KERNEL) & (work.end > low) & (work.start < high)
    chosen = np.isin(capture.category, [PRIORITY[category] for category in MULTIPLYING])
    return inside & chosen, work.end - work.start


def _known_share(capture: Capture, calls: OperatorCalls, floors: Floors) -> float:
    """Return the share of the computing kernels' time for which a least time is known."""
    work, (low, high) = capture.trace.work, capture.steps.span
    inside = (work.kind == Kind.KERNEL) & (work.end > low) & (work.start < high)
    inside &= np.isin(capture.category, [PRIORITY[category] for category in COMPUTING])
    time = work.end - work.start
    launched = calls.launched_by
    known = (launched >= 0) & ~np.isnan(floors.of_call_ns[np.maximum(launched, 0)])
    whole = time[inside].sum()
    return float(time[inside & known].sum() / whole) if whole else 0.0


def _above(time_ns: float, floor_ns: float) -> float:
    return max(0.0, time_ns - floor_ns)


def _operators(
    capture: Capture, groups: CallGroups, modules: Modules, floors: Floors, top: int
) -> tuple[RooflineRow, ...]:
    """Return operators by name and shapes; those that exceed their minimum possible time the most come first."""
    rows = groups.row[~np.isnan(floors.of_call_ns[groups.row])]
    group_of = np.full(len(capture.trace.host), -1, dtype=np.int64)
    group_of[groups.row] = groups.group
    group = group_of[rows]
    time = np.bincount(group, weights=groups.time_ns[rows], minlength=len(groups))
    floor = np.bincount(group, weights=floors.of_call_ns[rows], minlength=len(groups))
    count = np.bincount(group, minlength=len(groups))
    first = np.full(len(groups), len(capture.trace.host), dtype=np.int64)
    np.minimum.at(first, group, rows)
    order = np.argsort(-np.maximum(0.0, time - floor), kind="stable")
    return tuple(
        RooflineRow(
            name=groups.names[n],
            shapes=groups.arguments[n].text,
            module=modules.name(int(first[n])),
            count=int(count[n]),
            time_ns=round(time[n]),
            floor_ns=round(min(time[n], floor[n])),
            limit="memory" if floors.by_memory[first[n]] else "compute",
            flops=_total(groups.works[n].flops, count[n]),
            num_bytes=_total(groups.works[n].num_bytes, count[n]),
        )
        for n in order.tolist()
        if count[n]
    )[:top]


def _total(amount: int | None, count: int) -> float | None:
    return None if amount is None else float(amount) * int(count)


def _kernels(capture: Capture, calls: OperatorCalls, floors: Floors, top: int) -> tuple[RooflineRow, ...]:
    """Return kernels by name, counting only those whose operator has a known least time."""
    work, names = capture.trace.work, capture.trace.names
    launched = calls.launched_by
    known = (launched >= 0) & ~np.isnan(floors.of_call_ns[np.maximum(launched, 0)]) & (work.kind == Kind.KERNEL)
    low, high = capture.steps.span
    rows = np.flatnonzero(known & (work.end > low) & (work.start < high))
    found, group = np.unique(work.name[rows], return_inverse=True)
    time = np.bincount(group, weights=work.end[rows] - work.start[rows], minlength=len(found))
    floor = np.bincount(group, weights=floors.of_work_ns[rows], minlength=len(found))
    memory = np.bincount(group, weights=floors.by_memory[launched[rows]], minlength=len(found))
    count = np.bincount(group, minlength=len(found))
    order = np.argsort(-(time - floor), kind="stable")[:top]
    return tuple(
        RooflineRow(
            name=names[int(found[n])],
            count=int(count[n]),
            time_ns=round(time[n]),
            floor_ns=round(floor[n]),
            limit="memory" if memory[n] > count[n] / 2 else "compute",
        )
        for n in order.tolist()
    )


def _modules(groups: CallGroups, modules: Modules, floors: Floors, top: int) -> tuple[RooflineRow, ...]:
    """Return one row for each module, from those of its operators that have a known least time. Operators of nested
    modules do not count.
    """
    known = groups.row[(~np.isnan(floors.of_call_ns[groups.row])) & (modules.frame[groups.row] >= 0)]
    totals: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
    for row in known.tolist():
        time, floor = float(groups.time_ns[row]), float(floors.of_call_ns[row])
        total = totals[modules.name(row)]
        for place, amount in enumerate((1.0, time, min(time, floor), floor if floors.by_memory[row] else 0.0)):
            total[place] += amount
    order: Sequence[str] = sorted(totals, key=lambda name: -_above(totals[name][1], totals[name][2]))
    return tuple(
        RooflineRow(
            name=name,
            count=round(totals[name][0]),
            time_ns=round(totals[name][1]),
            floor_ns=round(totals[name][2]),
            limit="memory" if totals[name][3] > totals[name][2] / 2 else "compute",
        )
        for name in order[:top]
    )
