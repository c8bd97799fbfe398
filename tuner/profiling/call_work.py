"""Work of a trace's operator calls, without double counting: the work of a `linear` counts only for the `addmm` that it
calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptune.tuner.profiling.argument_shapes import Arguments, parse_arguments
from steptune.tuner.profiling.capture import Capture
from steptune.tuner.profiling.intervals import Ints
from steptune.tuner.profiling.operator_calls import OperatorCalls, device_time_of_operators
from steptune.tuner.profiling.operator_work import GRADIENT, WorkModel
from steptune.tuner.profiling.trace import Kind
from steptune.tuner.profiling.work import Work

Mask = npt.NDArray[np.bool_]
NO_ARGUMENTS = Arguments((), "")


@dataclass(frozen=True, kw_only=True)
class CallGroups:
    """Calls in the steps, grouped by name and shapes, with their work.

    Attributes:
        row: int64 rows of `trace.host` that are in the steps.
        group: int64 group of each of these rows.
        names, arguments: Name and arguments of the operator, by group.
        time_ns: int64 by row of `trace.host`: time of the kernels and copies that an operator launched itself; on a
            trace without device work the operator's own time.
        works: Work of one call, by group, where shapes were recorded.
        counted: By row of `trace.host`: True for calls that do the work of their group themselves.
    """

    row: Ints
    group: Ints
    names: Sequence[str]
    arguments: Sequence[Arguments]
    time_ns: Ints
    works: dict[int, Work]
    counted: Mask

    def __len__(self) -> int:
        return len(self.names)

    def sums(self, values: Ints) -> Ints:
        """Sum values, given by row of `trace.host`, for each group."""
        total = np.zeros(len(self), dtype=np.int64)
        np.add.at(total, self.group, values[self.row])
        return total

    def num_counted(self) -> Ints:
        """Return, for each group, the number of calls that do the work themselves."""
        return np.bincount(self.group[self.counted[self.row]], minlength=len(self))


def group_calls(capture: Capture, calls: OperatorCalls) -> CallGroups:
    """Group the operator calls of a trace and count their work."""
    trace, (low, high) = capture.trace, capture.steps.span
    host = trace.host
    time_ns = device_time_of_operators(capture, calls) if capture.device_numbers else calls.self_ns
    inside = (host.start >= low) & (host.start < high)
    rows = np.flatnonzero((host.kind == Kind.OPERATOR) & (inside | (time_ns > 0)))
    width = len(trace.shapes) + 1
    keys, group = np.unique(host.name[rows].astype(np.int64) * width + host.shape[rows] + 1, return_inverse=True)
    shapes = (keys % width - 1).tolist()
    parsed = {number: parse_arguments(trace.shapes[number]) for number in sorted(set(shapes)) if number >= 0}
    names = [trace.names[name] for name in (keys // width).tolist()]
    arguments = [parsed.get(shape, NO_ARGUMENTS) for shape in shapes]
    works = _works(capture, names, arguments, np.bincount(group, minlength=len(names)))

    def of(groups: Iterable[int]) -> Mask:
        """Return a mask over `trace.host` of the calls of some groups."""
        wanted = np.zeros(len(names), dtype=bool)
        wanted[list(groups)] = True
        mask: Mask = np.zeros(len(host), dtype=bool)
        mask[rows] = wanted[group]
        return mask

    computes = of(number for number, work in works.items() if work.flops is not None)
    moves = of(number for number, work in works.items() if work.num_bytes is not None)
    # `addmm` around the `copy_` of its bias computes itself.
    counted = (computes & ~calls.around(computes)) | (moves & ~computes & ~calls.around(computes | moves))
    return CallGroups(
        row=rows,
        group=group,
        names=names,
        arguments=arguments,
        time_ns=time_ns,
        works=works,
        counted=counted & (time_ns > 0),
    )


def _works(capture: Capture, names: Sequence[str], arguments: Sequence[Arguments], count: Ints) -> dict[int, Work]:
    known = [number for number, given in enumerate(arguments) if given is not NO_ARGUMENTS]
    # Ranks may keep a part of the parameters only.
    alone = capture.trace.num_ranks <= 1
    parameters = {arguments[n]: int(count[n]) for n in known if alone and names[n] == GRADIENT}
    model = WorkModel(((names[n], arguments[n]) for n in known), parameters)
    num_steps = len(capture.steps)
    return {n: model.work(names[n], arguments[n], int(count[n]) / num_steps) for n in known}
