"""Module (`nn.Module`) of each operator, if a trace has call stacks, and the time of each module.

With `with_stack` the profiler records every call of a module as a frame ("nn.Module: Linear_3"). An operator of the
forward pass belongs to the innermost frame around it. One of the backward pass has no frame: autograd gives it the
sequence number of the forward operator whose gradient it computes, and so the same module. An operator that runs again
for a gradient (activation checkpointing) has frames inside the gradient's operator, outside the frames of the model:
because frames name classes and number their objects ("Linear_3"), the enclosing modules are those of the first call.
Names of attributes are not recorded.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from steptune.tuner.profiling.call_work import CallGroups
from steptune.tuner.profiling.capture import Capture
from steptune.tuner.profiling.intervals import Ints
from steptune.tuner.profiling.nesting import nest
from steptune.tuner.profiling.operator_calls import (
    NO_ROW,
    OperatorCalls,
    owners,
    rows_by,
)
from steptune.tuner.profiling.trace import Kind, Trace
from steptune.tuner.profiling.work import Work
from steptune.tuner.trace_records import ModuleStats

FRAME = r"^nn\.Module: "
Path = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Modules:
    """Module of each operator.

    Attributes:
        frame: int64 by row of `trace.host`: row of the frame of an operator's module, or -1.
        forward_of: int64 by row of `trace.host`: the forward operator whose gradient an operator computes; the operator
            itself, if it is recomputed for a gradient; or -1.
        paths: By row of a frame: the enclosing modules, the outermost first, and the module itself.
        count: Calls of each module in the steps.
    """

    frame: Ints
    forward_of: Ints
    paths: dict[int, Path]
    count: dict[Path, int]

    def seen_from(self, match: Ints, times: int) -> Modules:
        """Return the modules for another trace of the same operators.

        Args:
            match: For each row of the other trace's operators, the row in this trace, or -1.
            times: Number of the other trace's steps, as a multiple of this trace's.
        """
        known = match >= 0
        return Modules(
            frame=np.where(known, self.frame[match], NO_ROW),
            forward_of=np.where(known, self.forward_of[match], NO_ROW),
            paths=self.paths,
            count={path: times * count for path, count in self.count.items()},
        )

    def name(self, operator: int) -> str:
        """Return the module of an operator (a row of `trace.host`), and whether it runs backward; empty if unknown."""
        row = int(self.frame[operator]) if operator >= 0 else NO_ROW
        if row < 0:
            return ""
        return ".".join(self.paths[row]) + (" (backward)" if self.forward_of[operator] >= 0 else "")


def find_modules(trace: Trace, calls: OperatorCalls) -> Modules:
    """Assign operators to modules. Without call stacks no operator has a module."""
    low, high = calls.span
    host = trace.host
    frames = trace.host_rows(FRAME, Kind.PYTHON)
    frames = frames[host.end[frames] > host.start[frames]]
    frame = np.full(len(host), NO_ROW, dtype=np.int64)
    operators = np.flatnonzero(host.kind == Kind.OPERATOR)
    on_thread = rows_by(operators, host.thread[operators])
    paths: dict[int, Path] = {}
    for thread, rows in rows_by(frames, host.thread[frames]).items():
        forest = nest(host.start[rows], host.end[rows])
        for number, row in enumerate(rows.tolist()):
            outer = int(forest.parent[number])
            name = trace.names[host.name[row]].partition(": ")[2]
            paths[row] = (*(paths[int(rows[outer])] if outer >= 0 else ()), name)
        start, end, owner = forest.segments()
        inside = on_thread.get(thread, np.empty(0, dtype=np.int64))
        frame[inside] = owners(host.start[inside], start, end, rows[owner])
    forward_of = _forward_operators(trace)
    around = _nearest(forward_of >= 0, calls.parent, operators)
    backward = operators[around[operators] >= 0]
    again = backward[(around[backward] != backward) & (frame[backward] >= 0)]
    again = again[host.start[frame[again]] >= host.start[around[again]]]
    forward_of[backward] = forward_of[around[backward]]
    forward_of[again] = again
    frame[backward] = frame[forward_of[backward]]
    paths = _below_models(paths, frame[again])
    count: defaultdict[Path, int] = defaultdict(int)
    for row, path in paths.items():
        count[path] += low <= int(host.start[row]) < high
    return Modules(frame=frame, forward_of=forward_of, paths=paths, count=dict(count))


def _forward_operators(trace: Trace) -> Ints:
    """Return, for each backward operator (by row), the last forward operator with the same sequence number; if there is
    none, -1.
    """
    host = trace.host
    numbered = (host.kind == Kind.OPERATOR) & (host.sequence >= 0)
    forward = np.flatnonzero(numbered & (host.forward_thread == 0))
    backward = np.flatnonzero(numbered & (host.forward_thread > 0))
    found = np.full(len(host), NO_ROW, dtype=np.int64)
    if len(forward) and len(backward):
        forward = forward[np.argsort(host.sequence[forward], kind="stable")]
        keys = host.sequence[forward]
        position = np.searchsorted(keys, host.sequence[backward], side="right") - 1
        known = (position >= 0) & (keys[np.maximum(position, 0)] == host.sequence[backward])
        found[backward[known]] = forward[position[known]]
    return found


def _nearest(is_meant: npt.NDArray[np.bool_], parent: Ints, operators: Ints) -> Ints:
    """Return, for each operator (by row), the nearest operator that `is_meant` selects: the operator itself or one that
    encloses it; -1 if there is none.
    """
    found = np.full(len(parent), NO_ROW, dtype=np.int64)
    searching, around = operators, operators
    while len(searching):
        known = is_meant[around]
        found[searching[known]] = around[known]
        searching, around = searching[~known], parent[around[~known]]
        searching, around = searching[around >= 0], around[around >= 0]
    return found


def _below_models(paths: dict[int, Path], again: Ints) -> dict[int, Path]:
    """Return the module path of each frame, by row. Recomputed modules are placed under the parents of their first
    call.
    """
    roots = {paths[row][0] for row in set(again.tolist())}
    first: dict[str, Path] = {}
    for path in paths.values():
        if len(path) > 1 and path[-1] in roots:
            first.setdefault(path[-1], path[:-1])
    return {row: (*first.get(path[0], ()), *path) for row, path in paths.items()}


def module_stats(
    capture: Capture, calls: OperatorCalls, groups: CallGroups, modules: Modules, top: int = 20
) -> tuple[ModuleStats, ...]:
    """Return the modules with the most device time (on a CPU: operator time), nested modules included."""
    if not modules.paths:
        return ()
    time_ns = groups.time_ns
    rows = np.flatnonzero((modules.frame >= 0) & (time_ns > 0))
    own: defaultdict[Path, list[int]] = defaultdict(lambda: [0, 0])
    whole: defaultdict[Path, list[int]] = defaultdict(lambda: [0, 0])
    backward: npt.NDArray[np.bool_] = modules.forward_of[rows] >= 0
    for row, spent, late in zip(modules.frame[rows].tolist(), time_ns[rows].tolist(), backward.tolist(), strict=True):
        own[modules.paths[row]][late] += spent
    for path, times in own.items():
        for length in range(1, len(path) + 1):
            for late in (0, 1):
                whole[path[:length]][late] += times[late]
    contents = module_contents(capture, calls, groups, modules)
    order = sorted(whole, key=lambda path: (-sum(whole[path]), len(path)))[:top]
    return tuple(
        ModuleStats(
            name=".".join(path),
            count=modules.count.get(path, 0),
            forward_ns=whole[path][0],
            backward_ns=whole[path][1],
            own_ns=sum(own.get(path, (0, 0))),
            **contents.get(path, {}),
        )
        for path in order
    )


def module_contents(
    capture: Capture, calls: OperatorCalls, groups: CallGroups, modules: Modules
) -> dict[Path, dict[str, Any]]:
    """Return launches, kernels, bytes and dtypes of each module's own operators, by field name of `ModuleStats`."""
    host, work, (low, high) = capture.trace.host, capture.trace.work, capture.steps.span
    group_of = np.full(len(host), -1, dtype=np.int64)
    group_of[groups.row] = groups.group
    times: defaultdict[Path, Counter[str]] = defaultdict(Counter)
    launches: Counter[Path] = Counter()
    moved: defaultdict[Path, list[float]] = defaultdict(list)
    dtypes: defaultdict[Path, set[str]] = defaultdict(set)
    ran = np.flatnonzero((modules.frame >= 0) & (groups.time_ns > 0))
    for row in ran.tolist():
        path = modules.paths[int(modules.frame[row])]
        one = groups.works.get(int(group_of[row]), Work())
        moved[path].append(float("nan") if one.num_bytes is None else one.num_bytes)
        dtypes[path] |= {one.dtype} - {""}
        if not capture.device_numbers:
            launches[path] += 1
            times[path][capture.trace.names[host.name[row]]] += int(groups.time_ns[row])
    operator = calls.launched_by
    chosen = (operator >= 0) & (work.kind != Kind.SYNC) & (work.end > low) & (work.start < high)
    for row in np.flatnonzero(chosen & (modules.frame[np.maximum(operator, 0)] >= 0)).tolist():
        path = modules.paths[int(modules.frame[operator[row]])]
        launches[path] += 1
        times[path][capture.trace.names[work.name[row]]] += int(work.end[row] - work.start[row])
    return {
        path: {
            "num_launches": launches[path],
            "kernels": tuple(name for name, _ in found.most_common()),
            "num_bytes": None if np.isnan(total := sum(moved[path])) else total,
            "dtypes": tuple(sorted(dtypes[path])),
        }
        for path, found in times.items()
    }
