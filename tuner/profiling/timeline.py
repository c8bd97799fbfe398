"""Timeline of a device, reduced to the resolution of a screen, so that pages need not read the trace.

Segments are put into buckets as wide as a pixel, each with the exact time of every category in it.
Adjacent buckets with the same single category are joined, which loses nothing.
"""

from __future__ import annotations

import numpy as np

from steptune.tuner.costs.categories import CATEGORIES
from steptune.tuner.profiling.capture import Capture
from steptune.tuner.profiling.intervals import Ints, histogram
from steptune.tuner.profiling.segments import Segments
from steptune.tuner.trace_records import Timeline

MAX_BUCKETS = 2000
"""Maximum number of buckets: more than most screens have pixels across."""


def timeline(capture: Capture, segments: Segments, device: str, max_buckets: int = MAX_BUCKETS) -> Timeline:
    """Return the timeline of the device, or CPU, that the segments belong to."""
    return thinned(
        segments, capture.steps.boundaries, rank=capture.trace.rank or 0, device=device, max_buckets=max_buckets
    )


def thinned(
    segments: Segments, boundaries: Ints, *, rank: int, device: str, max_buckets: int = MAX_BUCKETS
) -> Timeline:
    """Return the timeline of the steps in at most `max_buckets` buckets, from non-overlapping segments that cover the
    steps.

    Args:
        segments: Segments that tile the steps.
        boundaries: int64 of length steps + 1, in nanoseconds.
        rank: Rank of the trace.
        device: Name of the device as in its breakdown.
        max_buckets: Maximum number of buckets, at least one.
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
    """Return the edges of the timeline's buckets: those of the segments, or, if there are too many, those of equally
    wide buckets. Adjacent buckets with the same single category are joined.
    """
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
