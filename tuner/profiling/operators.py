"""Operators with the most time, by name and shapes, with their achieved FLOP rate and bandwidth."""

from __future__ import annotations

import numpy as np

from steptune.tuner.profiling.call_work import CallGroups
from steptune.tuner.profiling.capture import Capture
from steptune.tuner.profiling.operator_calls import OperatorCalls
from steptune.tuner.profiling.source_lines import SourceLines
from steptune.tuner.profiling.work import Work
from steptune.tuner.trace_records import OperatorStats


def operator_stats(
    capture: Capture, calls: OperatorCalls, groups: CallGroups, source: SourceLines, top: int = 20
) -> tuple[OperatorStats, ...]:
    """Return the operators of the steps: those with the most device time, and those with the most host time.

    Device time counts for the innermost operator that launched the kernel or copy; on a trace
    without device work it is the operator's own time. An operator that delegates its work to another one
    inside (`linear` to `addmm`) has no FLOP of its own.

    Args:
        top: Maximum number of operators for each of the two orders; device time comes first.
    """
    if len(groups) == 0:
        return ()
    device = groups.sums(groups.time_ns)
    own = groups.sums(calls.self_ns)
    by_device = np.argsort(-device, kind="stable")[:top]
    by_host = np.argsort(-own, kind="stable")[:top]
    chosen = np.union1d(by_device[device[by_device] > 0], by_host)
    order = chosen[np.lexsort((-own[chosen], -device[chosen]))]
    counted = groups.num_counted()
    count = np.bincount(groups.group, minlength=len(groups))
    first = np.full(len(groups), len(capture.trace.host), dtype=np.int64)
    np.minimum.at(first, groups.group, groups.row)
    return tuple(
        _record(
            name=groups.names[number],
            shapes=groups.arguments[number].text,
            count=int(count[number]),
            device_ns=int(device[number]),
            host_ns=int(own[number]),
            work=groups.works.get(number, Work()),
            num_counted=int(counted[number]),
            source=source.of(int(first[number])),
            module=source.modules.name(int(first[number])),
        )
        for number in order.tolist()
    )


def _record(
    *,
    name: str,
    shapes: str,
    count: int,
    device_ns: int,
    host_ns: int,
    work: Work,
    num_counted: int,
    source: str,
    module: str,
) -> OperatorStats:
    flops = float(work.flops * num_counted) if work.flops is not None and num_counted else None
    num_bytes = float(work.num_bytes * num_counted) if work.num_bytes is not None and num_counted else None
    return OperatorStats(
        name=name,
        shapes=shapes,
        count=count,
        device_ns=device_ns,
        host_ns=host_ns,
        flops=flops,
        num_bytes=num_bytes,
        flops_per_s=_per_second(flops, device_ns),
        bytes_per_s=_per_second(num_bytes, device_ns),
        source=source,
        module=module,
    )


def _per_second(amount: float | None, time_ns: int) -> float | None:
    return amount * 1e9 / time_ns if amount and time_ns else None
