"""Arithmetic on half-open integer intervals: covering a window by prioritised sets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def union_length(start: Ints, end: Ints) -> int:
    """Length of the union of intervals."""
    if len(start) == 0:
        return 0
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    gaps = np.maximum(0, start[1:] - end[:-1])
    return int(end[-1] - start[0] - gaps.sum())


def cover(window: tuple[int, int], sets: Sequence[tuple[Ints, Ints]]) -> tuple[Ints, Ints, Ints]:
    """Cuts a window into segments and says which set covers each; the first set wins.

    Args:
        window: Half-open [start, end).
        sets: Starts and ends of the intervals of each set, in order of priority.

    Returns:
        Segment starts, segment ends and owners (an index into `sets`, or -1), adjacent segments of
        one owner merged. The segments tile the window exactly.
    """
    low, high = window
    clipped = [(np.clip(start, low, high), np.clip(end, low, high)) for start, end in sets]
    edges = np.unique(np.concatenate([np.array([low, high]), *(np.concatenate(pair) for pair in clipped)]))
    owner = np.full(max(0, len(edges) - 1), -1, dtype=np.int64)
    for number in range(len(sets) - 1, -1, -1):
        start, end = clipped[number]
        keep = end > start
        depth = np.zeros(len(edges), dtype=np.int64)
        np.add.at(depth, np.searchsorted(edges, start[keep]), 1)
        np.add.at(depth, np.searchsorted(edges, end[keep]), -1)
        owner[np.cumsum(depth)[:-1] > 0] = number
    if len(owner) == 0:
        empty = np.empty(0, dtype=np.int64)
        return empty, empty, empty
    first = np.flatnonzero(np.concatenate([[True], owner[1:] != owner[:-1]]))
    starts = edges[first]
    ends = np.concatenate([starts[1:], [edges[-1]]])
    return starts, ends, owner[first]
