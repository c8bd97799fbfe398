"""Time by call stack, as a tree of the user's functions, modules and operators.

Library frames are left out, so that a stack shows only the user's code and the operators that it called. An operator of
the backward pass is listed below the autograd function that runs it, on a separate thread. A trace without Python
frames shows the nesting of operators only.
"""

from __future__ import annotations

import numpy as np

from steptune.tuner.profiling.intervals import Ints
from steptune.tuner.profiling.nesting import nest
from steptune.tuner.profiling.operator_calls import rows_by
from steptune.tuner.profiling.source_lines import is_user_frame
from steptune.tuner.profiling.trace import Kind, Trace
from steptune.tuner.trace_records import StackNode

MAX_NODES = 400
LEAST_SHARE = 0.002
"""Minimum share of the total time for a node to be kept: a smaller node would be no wider than a line in the graph."""
MODULE = "nn.Module: "


def stack_tree(trace: Trace, time_ns: Ints) -> tuple[StackNode, ...]:
    """Return the nodes with the most time, each after its parent.

    Args:
        time_ns: int64, by row of `trace.host`: time of an operator without the operators inside it.
    """
    node, name, parent = _nodes(trace)
    total = np.zeros(len(name), dtype=np.int64)
    rows = np.flatnonzero((node >= 0) & (time_ns > 0))
    np.add.at(total, node[rows], time_ns[rows])
    whole = int(total.sum())
    # Inner nodes have higher numbers.
    for number in np.flatnonzero(parent >= 0)[::-1].tolist():
        total[parent[number]] += total[number]
    kept = np.flatnonzero(total >= max(1, LEAST_SHARE * whole))
    kept = np.sort(kept[np.argsort(-total[kept], kind="stable")[:MAX_NODES]])
    place = np.full(len(name) + 1, -1, dtype=np.int64)
    place[kept] = np.arange(len(kept))
    return tuple(
        StackNode(
            name=trace.names[name[number]].removeprefix(MODULE),
            parent=int(place[parent[number]]),
            time_ns=int(total[number]),
        )
        for number in kept.tolist()
    )


def _nodes(trace: Trace) -> tuple[Ints, Ints, Ints]:
    """Return three arrays: the node of each row of `trace.host` (-1 outside any stack), the name of each node, and the
    parent of each node.
    """
    around, levels = _around(trace)
    node = np.full(len(trace.host), -1, dtype=np.int64)
    names, parents, count = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)], 0
    width = len(trace.names)
    for rows in levels:
        outer = np.where(around[rows] >= 0, node[around[rows]], -1)
        keys, number = np.unique((outer + 1) * width + trace.host.name[rows].astype(np.int64), return_inverse=True)
        node[rows] = count + number
        names.append(keys % width)
        parents.append(keys // width - 1)
        count += len(keys)
    return node, np.concatenate(names), np.concatenate(parents)


def _around(trace: Trace) -> tuple[Ints, list[Ints]]:
    """Return, for each row of `trace.host`, its parent row in the call stack (-1 if none); also return the rows of all
    threads, grouped by depth.
    """
    host = trace.host
    shown = np.array([is_user_frame(name) or name.startswith(MODULE) for name in trace.names], dtype=bool)
    python = (host.kind == Kind.PYTHON) & shown[host.name]
    rows = np.flatnonzero(((host.kind == Kind.OPERATOR) | python) & (host.end > host.start))
    around = np.full(len(host), -1, dtype=np.int64)
    levels: list[list[Ints]] = []
    for unsorted in rows_by(rows, host.thread[rows]).values():
        order = np.lexsort((unsorted, -host.end[unsorted], host.start[unsorted]))
        own = unsorted[order]
        forest = nest(host.start[own], host.end[own])
        inside = forest.parent >= 0
        around[own[inside]] = own[forest.parent[inside]]
        for depth, level in enumerate(forest.levels):
            if depth == len(levels):
                levels.append([])
            levels[depth].append(own[level])
    return around, [np.concatenate(level) for level in levels]
