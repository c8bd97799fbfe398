"""A trace's segments thinned out for a picture, so that no page ever reads a trace.

Segments are put into buckets as wide as a pixel, each with the exact time of every category in it.
Adjacent buckets that hold one and the same category become one, which loses nothing.
"""

from __future__ import annotations

import numpy as np

from steptune.tuner.costs.categories import CATEGORIES
from steptune.tuner.profiling.capture import Capture
from steptune.tuner.profiling.intervals import Ints, histogram
from steptune.tuner.profiling.segments import Segments
from steptune.tuner.trace_records import Timeline

MAX_BUCKETS = 2000
"""Wider than most screens."""


def timeline(capture: Capture, segments: Segments, device: str, max_buckets: int = MAX_BUCKETS) -> Timeline:
    """The timeline of one device, or of the CPU, whose segments these are."""
    return thinned(
        segments, capture.steps.boundaries, rank=capture.trace.rank or 0, device=device, max_buckets=max_buckets
    )


def thinned(
    segments: Segments, boundaries: Ints, *, rank: int, device: str, max_buckets: int = MAX_BUCKETS
) -> Timeline:
    """Segments that tile the steps, in at most `max_buckets` buckets.

    Args:
        segments: They tile the steps.
        boundaries: int64 of length steps + 1, in nanoseconds.
        rank: Of the trace.
        device: As in its breakdown.
        max_buckets: At least one.
    """
    low, high = int(boundaries[0]), int(boundaries[-1])
    edges = _edges(segments, low, high, max_buckets)
    times = histogram(segments.start, segments.end, segments.category, len(CATEGORIES), edges)
    return Timeline(
        rank=rank,
        device=device,
        step_boundaries_ns=tuple((boundaries - low).tolist()),
        end_ns=tuple((edges[1:] - low).tolist()),
        time_ns=tuple(_named(row) for row in times),
    )


def _edges(segments: Segments, low: int, high: int, max_buckets: int) -> Ints:
    """Edges of the segments where they are few enough, else of equal buckets, those of one category joined."""
    category = segments.category
    changes = np.flatnonzero(category[1:] != category[:-1]) + 1
    if len(changes) < max_buckets:
        return np.concatenate([[low], segments.start[changes], [high]])
    # In integers: bucket n ends at the floor of (n + 1) widths.
    whole, rest = divmod(high - low, max_buckets)
    numbers = np.arange(max_buckets + 1)
    edges = np.unique(low + numbers * whole + numbers * rest // max_buckets)
    used = histogram(segments.start, segments.end, category, len(CATEGORIES), edges) > 0
    only = np.where(used.sum(axis=1) == 1, used.argmax(axis=1), -1)
    joins = (only[1:] == only[:-1]) & (only[1:] >= 0)
    kept: Ints = edges[np.concatenate([[True], ~joins, [True]])]
    return kept


def _named(row: Ints) -> dict[str, int]:
    order = np.argsort(-row, kind="stable")
    return {CATEGORIES[number].category.value: int(row[number]) for number in order.tolist() if row[number] > 0}
