"""Arithmetic on half-open integer intervals.

"Disjoint" means sorted by start, not overlapping and not touching: what `union` returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Intervals = tuple[Ints, Ints]
EMPTY: Ints = np.empty(0, dtype=np.int64)


def union(start: Ints, end: Ints) -> Intervals:
    """Return the disjoint intervals that cover the same points."""
    keep = end > start
    start, end = start[keep], end[keep]
    if len(start) == 0:
        return EMPTY, EMPTY
    if np.any(start[1:] < start[:-1]):
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    first = np.flatnonzero(np.concatenate([[True], start[1:] > reach[:-1]]))
    last = np.concatenate([first[1:] - 1, [len(start) - 1]])
    return start[first], reach[last]


def union_length(start: Ints, end: Ints) -> int:
    """Return the length of the union of intervals."""
    low, high = union(start, end)
    return int((high - low).sum())


def contains(intervals: Intervals, points: Ints) -> npt.NDArray[np.bool_]:
    """Return a mask of the points that lie in disjoint intervals."""
    start, end = intervals
    if len(start) == 0:
        return np.zeros(len(points), dtype=bool)
    position = np.searchsorted(start, points, side="right") - 1
    inside: npt.NDArray[np.bool_] = (position >= 0) & (points < end[np.maximum(position, 0)])
    return inside


def pieces(start: Ints, end: Ints, cuts: Intervals) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the parts of intervals inside `cuts`, which are sorted and do not overlap, but may touch.

    Returns:
        Starts, ends, the number of the interval and the number of the cut that each part comes from;
        parts without length are left out.
    """
    cut_start, cut_end = cuts
    first = np.searchsorted(cut_end, start, side="right")
    last = np.searchsorted(cut_start, end, side="left")
    count = np.maximum(0, last - first)
    whole = np.repeat(np.arange(len(start)), count)
    offset = np.arange(len(whole)) - np.repeat(np.cumsum(count) - count, count)
    cut = first[whole] + offset
    low = np.maximum(start[whole], cut_start[cut])
    high = np.minimum(end[whole], cut_end[cut])
    keep = high > low
    return low[keep], high[keep], whole[keep], cut[keep]


def distinct(values: Ints) -> Ints:
    """Return the distinct values, sorted.

    `np.unique` hashes integers, which takes a hundred times as long if most of a million values differ.
    """
    ordered = np.sort(values)
    return ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])] if len(ordered) else ordered


def median(values: npt.NDArray[Any]) -> float:
    """Return the median of at least one number.

    `np.median` loads masked arrays, which takes 2 MiB and longer than the median of a million numbers.
    """
    ordered = np.sort(values)
    count = len(ordered)
    return (float(ordered[(count - 1) // 2]) + float(ordered[count // 2])) / 2


def cover(window: tuple[int, int], sets: Sequence[Intervals]) -> tuple[Ints, Ints, Ints]:
    """Cut a window into segments, and return for each segment the index of the set of intervals that covers it; if
    several sets do, the first one.

    Args:
        window: Half-open [start, end).
        sets: Starts and ends of the intervals of each set, in order of priority.

    Returns:
        Segment starts, segment ends and owners (an index into `sets`, or -1), adjacent segments of
        one owner merged. The segments tile the window exactly.
    """
    low, high = window
    if high <= low:
        return EMPTY, EMPTY, EMPTY
    unions = [union(np.clip(start, low, high), np.clip(end, low, high)) for start, end in sets]
    edges = distinct(np.concatenate([np.array([low, high]), *(np.concatenate(pair) for pair in unions)]))
    owner = np.full(len(edges) - 1, -1, dtype=np.int64)
    for number in range(len(unions) - 1, -1, -1):
        start, end = unions[number]
        if len(start):
            depth = np.zeros(len(edges), dtype=np.int8)
            depth[np.searchsorted(edges, start)] += 1
            depth[np.searchsorted(edges, end)] -= 1
            owner[np.cumsum(depth[:-1], dtype=np.int8) > 0] = number
    first = np.flatnonzero(np.concatenate([[True], owner[1:] != owner[:-1]]))
    starts = edges[first]
    ends = np.concatenate([starts[1:], edges[-1:]])
    return starts, ends, owner[first]


def histogram(start: Ints, end: Ints, code: Ints, num_codes: int, boundaries: Ints) -> Ints:
    """Return, between each two adjacent boundaries, the total length of the intervals of each code: int64 of shape
    (len(boundaries) - 1, num_codes).
    """
    low, high, whole, row = pieces(start, end, (boundaries[:-1], boundaries[1:]))
    totals = np.zeros((len(boundaries) - 1, num_codes), dtype=np.int64)
    np.add.at(totals, (row, code[whole]), high - low)
    return totals
