"""The operators with the most time, by name and shapes, with what they achieve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptune.tuner.profiling.argument_shapes import Arguments, parse_arguments
from steptune.tuner.profiling.capture import Capture
from steptune.tuner.profiling.intervals import Ints
from steptune.tuner.profiling.operator_calls import OperatorCalls, device_time_of_operators
from steptune.tuner.profiling.operator_work import Work, WorkModel
from steptune.tuner.profiling.source_lines import SourceLines
from steptune.tuner.profiling.trace import Kind
from steptune.tuner.trace_records import OperatorStats

NO_ARGUMENTS = Arguments((), "")


@dataclass(frozen=True, kw_only=True)
class _Groups:
    """Calls by (name, shapes).

    Attributes:
        row: int64 rows of `trace.host` that count.
        group: int64 group of each.
        name, shape: int64 by group: indices into `trace.names` and `trace.shapes` (-1: none).
    """

    row: Ints
    group: Ints
    name: Ints
    shape: Ints


def operator_stats(
    capture: Capture, calls: OperatorCalls, source: SourceLines, top: int = 20
) -> tuple[OperatorStats, ...]:
    """Operators that run in the steps: those with the most device time and those with the most host time.

    Device time is that of the kernels and copies in the steps whose innermost operator it is; on a trace
    without device work it is the operator's own time. An operator that leaves its work to another one
    inside (`linear` to `addmm`) has no FLOP of its own.

    Args:
        top: How many of each of the two; the most device time comes first.
    """
    on_cpu = not capture.device_numbers
    device_ns = calls.self_ns if on_cpu else device_time_of_operators(capture, calls)
    groups = _grouped(capture, calls, device_ns)
    if len(groups.row) == 0:
        return ()
    size = len(groups.name)
    device = _sums(groups, device_ns[groups.row])
    own = _sums(groups, calls.self_ns[groups.row])
    by_device = np.argsort(-device, kind="stable")[:top]
    by_host = np.argsort(-own, kind="stable")[:top]
    chosen = np.union1d(by_device[device[by_device] > 0], by_host)
    order = chosen[np.lexsort((-own[chosen], -device[chosen]))]
    arguments = _arguments(capture, groups)
    works, counted = _works(capture, calls, groups, arguments, device_ns)
    count = np.bincount(groups.group, minlength=size)
    first = np.full(size, len(capture.trace.host), dtype=np.int64)
    np.minimum.at(first, groups.group, groups.row)
    return tuple(
        _record(
            name=capture.trace.names[groups.name[number]],
            shapes=arguments.get(int(groups.shape[number]), NO_ARGUMENTS).text,
            count=int(count[number]),
            device_ns=int(device[number]),
            host_ns=int(own[number]),
            work=works.get(number, Work()),
            num_counted=int(counted[number]),
            source=source.of(int(first[number])),
            module=source.modules.name(int(first[number])),
        )
        for number in order.tolist()
    )


def _grouped(capture: Capture, calls: OperatorCalls, device_ns: Ints) -> _Groups:
    host, (low, high) = capture.trace.host, capture.steps.span
    inside = (host.start >= low) & (host.start < high)
    rows = np.flatnonzero((host.kind == Kind.OPERATOR) & (inside | (device_ns > 0)))
    width = len(capture.trace.shapes) + 1
    key = host.name[rows].astype(np.int64) * width + host.shape[rows] + 1
    keys, group = np.unique(key, return_inverse=True)
    return _Groups(row=rows, group=group, name=keys // width, shape=keys % width - 1)


def _sums(groups: _Groups, values: Ints) -> Ints:
    total = np.zeros(len(groups.name), dtype=np.int64)
    np.add.at(total, groups.group, values)
    return total


def _arguments(capture: Capture, groups: _Groups) -> dict[int, Arguments]:
    shapes = capture.trace.shapes
    return {number: parse_arguments(shapes[number]) for number in np.unique(groups.shape).tolist() if number >= 0}


def _works(
    capture: Capture, calls: OperatorCalls, groups: _Groups, arguments: Mapping[int, Arguments], device_ns: Ints
) -> tuple[dict[int, Work], Ints]:
    """Work of one call by group, and by group the calls that did their work themselves."""
    names = [capture.trace.names[name] for name in groups.name.tolist()]
    known = [
        (number, name, arguments[shape])
        for number, (name, shape) in enumerate(zip(names, groups.shape.tolist(), strict=True))
        if shape in arguments
    ]
    model = WorkModel((name, arguments) for _, name, arguments in known)
    works = {number: model.work(name, arguments) for number, name, arguments in known}
    computes = _calls_of(capture, groups, [number for number, work in works.items() if work.flops is not None])
    moves = _calls_of(capture, groups, [number for number, work in works.items() if work.num_bytes is not None])
    # `linear` around `addmm` computes nothing itself; `addmm` around the `copy_` of its bias does.
    own = (computes & ~calls.around(computes)) | (moves & ~computes & ~calls.around(computes | moves))
    own &= device_ns > 0
    return works, np.bincount(groups.group[own[groups.row]], minlength=len(groups.name))


def _calls_of(capture: Capture, groups: _Groups, numbers: list[int]) -> npt.NDArray[np.bool_]:
    """Mask over `trace.host` of the calls of some groups."""
    wanted = np.zeros(len(groups.name), dtype=bool)
    wanted[numbers] = True
    mask: npt.NDArray[np.bool_] = np.zeros(len(capture.trace.host), dtype=bool)
    mask[groups.row] = wanted[groups.group]
    return mask


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
