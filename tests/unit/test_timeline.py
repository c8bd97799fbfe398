"""A thinned-out timeline loses resolution, and nothing else."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from breakdowns import analyse
from hypothesis import given
from hypothesis import strategies as st
from traces import NAMES, needs_traces, trace_file

from steptune.tuner.costs.categories import CATEGORIES
from steptune.tuner.profiling.capture import link
from steptune.tuner.profiling.cpu_time import cpu_time
from steptune.tuner.profiling.device_time import device_time
from steptune.tuner.profiling.reader import read_trace
from steptune.tuner.profiling.segments import Segments
from steptune.tuner.profiling.timeline import MAX_BUCKETS, thinned, timeline

NAMED = [info.category.value for info in CATEGORIES]
PARTS = st.lists(st.tuples(st.integers(1, 10_000), st.integers(0, len(CATEGORIES) - 1)), min_size=1, max_size=60)


def tiled(parts, low=0):
    """Segments of these lengths and categories, one after the other."""
    edges = low + np.cumsum([0, *(length for length, _ in parts)])
    return Segments(
        start=edges[:-1],
        end=edges[1:],
        category=np.array([category for _, category in parts]),
        phases=(edges[:0], edges[:0], edges[:0]),
        overlapped={},
        blocking={},
        num_recorded=np.zeros(len(CATEGORIES), dtype=np.int64),
    )


def drawn(parts, max_buckets, low=0):
    segments = tiled(parts, low)
    boundaries = np.array([segments.start[0], segments.end[-1]])
    return thinned(segments, boundaries, rank=0, device="cuda:0", max_buckets=max_buckets)


def totals(line):
    return sum((Counter(times) for times in line.time_ns), Counter())


@given(parts=PARTS, max_buckets=st.integers(1, 80), low=st.integers(0, 10**15))
def test_sums_stay_exact_and_buckets_tile_the_steps(parts, max_buckets, low):
    line = drawn(parts, max_buckets, low)
    expected = Counter()
    for length, category in parts:
        expected[NAMED[category]] += length
    assert totals(line) == expected
    assert 1 <= len(line.time_ns) <= max_buckets
    for (start, end), times in zip(pairwise([0, *line.end_ns]), line.time_ns, strict=True):
        assert end > start
        assert sum(times.values()) == end - start
        assert list(times.values()) == sorted(times.values(), reverse=True)
    assert line.end_ns[-1] == sum(length for length, _ in parts)


@given(parts=PARTS)
def test_what_has_room_is_as_it_was(parts):
    line = drawn(parts, max_buckets=len(parts))
    assert all(len(times) == 1 for times in line.time_ns)
    joined = [category for n, (_, category) in enumerate(parts) if n == 0 or parts[n - 1][1] != category]
    assert [next(iter(times)) for times in line.time_ns] == [NAMED[category] for category in joined]


def test_a_long_stretch_takes_one_bucket_however_many_short_ones_are_beside_it():
    busy = [(1, 0), (1, 1)] * 500
    line = drawn([(1_000_000, 5), *busy], max_buckets=100)
    assert line.time_ns[0] == {NAMED[5]: line.end_ns[0]}
    assert line.end_ns[0] >= 990_000
    assert len(line.time_ns) == 2


def test_dominant_category_comes_first():
    line = drawn([(10, 3), (30, 1), (5, 3)], max_buckets=1)
    assert line.time_ns == ({NAMED[1]: 30, NAMED[3]: 15},)


@needs_traces
@pytest.mark.parametrize("name", NAMES)
def test_of_a_real_trace_it_sums_to_the_breakdown(name):
    trace = read_trace(trace_file(name))
    capture = link(trace)
    breakdowns = {b.device: b for b in analyse(trace)}
    for device, breakdown in breakdowns.items():
        segments = cpu_time(capture) if device == "cpu" else device_time(capture, int(device[5:]))[0]
        line = timeline(capture, segments, device)
        assert len(line.time_ns) <= MAX_BUCKETS
        assert totals(line) == Counter({n: value for n, value in breakdown.categories.items() if value})
        assert len(line.step_boundaries_ns) == breakdown.num_steps + 1
        assert line.step_boundaries_ns[-1] == line.end_ns[-1] == breakdown.step_time_ns
