"""Nesting of operators: the call stacks of one thread, from starts and ends alone."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from steptune.tuner.profiling.intervals import EMPTY, Ints


@dataclass(frozen=True, kw_only=True)
class Nest:
    """Events of one thread as a forest.

    Attributes:
        start, end: int64, sorted by start. An event that outlives the one around it is cut at that one's end.
        parent: Index of the event directly around each, or -1.
        levels: Indices by depth, the outermost first.
    """

    start: Ints
    end: Ints
    parent: Ints
    levels: tuple[Ints, ...]

    def segments(self) -> tuple[Ints, Ints, Ints]:
        """Return the intervals in which some event runs: starts, ends, and the innermost event of each interval."""
        count = len(self.start)
        if count == 0:
            return EMPTY, EMPTY, EMPTY
        depth = np.empty(count, dtype=np.int64)
        for level, rows in enumerate(self.levels):
            depth[rows] = level
        time = np.concatenate([self.end, self.start])
        # At one time, ends come before starts; inner ends before outer ones, outer starts before inner ones.
        rank = np.concatenate([-1 - depth, 1 + depth])
        owner = np.concatenate([self.parent, np.arange(count)])
        order = np.lexsort((rank, time))
        time, owner = time[order], owner[order]
        last = np.flatnonzero(np.concatenate([time[1:] != time[:-1], [True]]))
        time, owner = time[last], owner[last]
        inside = owner[:-1] >= 0
        return time[:-1][inside], time[1:][inside], owner[:-1][inside]


def nest(start: Ints, end: Ints) -> Nest:
    """Build the forest of the events of one thread.

    Args:
        start, end: Sorted by start, longer first on ties; every event longer than zero.
    """
    levels = _levels(start, end)
    parent = np.full(len(start), -1, dtype=np.int64)
    for outer, inner in pairwise(levels):
        parent[inner] = outer[np.searchsorted(outer, inner) - 1]
    inside = parent >= 0
    if np.any(end[inside] > end[parent[inside]]) or np.any(start[inside] >= end[parent[inside]]):
        return _nest_crossing(start, end)
    return Nest(start=start, end=end, parent=parent, levels=levels)


def _levels(start: Ints, end: Ints) -> tuple[Ints, ...]:
    """Return the indices of events, grouped by depth: the number of other events already open when an event begins."""
    if len(start) == 0:
        return ()
    depth = np.arange(len(start)) - np.searchsorted(np.sort(end), start, side="right")
    order = np.argsort(depth, kind="stable")
    bounds = np.searchsorted(depth[order], np.arange(int(depth.max()) + 2))
    return tuple(order[low:high] for low, high in pairwise(bounds))


def _nest_crossing(start: Ints, end: Ints) -> Nest:
    """Nest the events one by one: with imprecise clocks, events can overlap without nesting."""
    parent = np.full(len(start), -1, dtype=np.int64)
    cut = end.copy()
    levels: list[list[int]] = []
    stack: list[int] = []
    for row, (begin, finish) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        while stack and cut[stack[-1]] <= begin:
            stack.pop()
        if stack:
            parent[row] = stack[-1]
            cut[row] = min(finish, int(cut[stack[-1]]))
        if len(levels) == len(stack):
            levels.append([])
        levels[len(stack)].append(row)
        stack.append(row)
    return Nest(start=start, end=cut, parent=parent, levels=tuple(np.array(rows, dtype=np.int64) for rows in levels))
