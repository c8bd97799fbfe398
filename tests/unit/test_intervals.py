"""Interval arithmetic against sets of integers."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from steptune.tuner.profiling.intervals import Ints, contains, cover, distinct, histogram, pieces, union, union_length

Pairs = list[tuple[int, int]]
pairs = st.lists(st.tuples(st.integers(-30, 60), st.integers(0, 25)).map(lambda p: (p[0], p[0] + p[1])), max_size=8)
windows = st.tuples(st.integers(-10, 20), st.integers(0, 40)).map(lambda p: (p[0], p[0] + p[1]))


def arrays(intervals: Pairs) -> tuple[Ints, Ints]:
    table = np.array(intervals, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def points(intervals: Pairs) -> set[int]:
    return {point for start, end in intervals for point in range(start, end)}


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_distinct_values_are_in_order_and_each_once(values: list[int]) -> None:
    assert distinct(np.array(values, dtype=np.int64)).tolist() == sorted(set(values))


class TestUnion:
    @given(intervals=pairs)
    def test_is_the_number_of_points(self, intervals: Pairs) -> None:
        assert union_length(*arrays(intervals)) == len(points(intervals))

    @given(first=pairs, second=pairs)
    def test_inclusion_and_exclusion(self, first: Pairs, second: Pairs) -> None:
        """The identity by which overlaps are computed: |A and B| = |A| + |B| - |A or B|."""
        both = union_length(*arrays(first)) + union_length(*arrays(second)) - union_length(*arrays(first + second))
        assert both == len(points(first) & points(second))

    def test_of_nothing_is_nothing(self) -> None:
        assert union_length(*arrays([])) == 0

    @given(intervals=pairs)
    def test_is_disjoint_sorted_and_covers_the_same_points(self, intervals: Pairs) -> None:
        start, end = union(*arrays(intervals))
        assert (end > start).all()
        assert (start[1:] > end[:-1]).all(), "touching intervals are one"
        assert points(list(zip(start.tolist(), end.tolist(), strict=True))) == points(intervals)


class TestContains:
    @given(intervals=pairs, asked=st.lists(st.integers(-40, 100)))
    def test_a_point_is_inside_where_some_interval_holds_it(self, intervals: Pairs, asked: list[int]) -> None:
        found = contains(union(*arrays(intervals)), np.array(asked, dtype=np.int64))
        held = points(intervals)
        assert found.tolist() == [point in held for point in asked]


class TestPieces:
    @given(intervals=pairs, edges=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6))
    def test_are_what_intervals_and_cuts_share(self, intervals: Pairs, edges: Pairs) -> None:
        """Cuts may touch; each piece names where it comes from."""
        cuts, position = [], -30
        for gap, length in edges:
            cuts.append((position + gap, position + gap + length + 1))
            position = cuts[-1][1]
        found = [array.tolist() for array in pieces(*arrays(intervals), arrays(cuts))]
        assert list(zip(*found, strict=True)) == [
            (max(start, low), min(end, high), whole, cut)
            for whole, (start, end) in enumerate(intervals)
            for cut, (low, high) in enumerate(cuts)
            if min(end, high) > max(start, low)
        ]


class TestHistogram:
    @given(
        intervals=pairs,
        codes=st.lists(st.integers(0, 2), min_size=8, max_size=8),
        edges=st.sets(st.integers(-30, 90), min_size=2),
    )
    def test_adds_up_lengths_by_code_between_boundaries(
        self, intervals: Pairs, codes: list[int], edges: set[int]
    ) -> None:
        boundaries = sorted(edges)
        code = np.array(codes[: len(intervals)], dtype=np.int64)
        found = histogram(*arrays(intervals), code, 3, np.array(boundaries))
        expected = np.zeros((len(boundaries) - 1, 3), dtype=np.int64)
        for row, window in enumerate(pairwise(boundaries)):
            for interval, number in zip(intervals, codes, strict=False):
                expected[row, number] += len(points([interval]) & points([window]))
        assert np.array_equal(found, expected)


class TestCover:
    @given(window=windows, sets=st.lists(pairs, max_size=4))
    def test_every_point_belongs_to_the_first_set_that_holds_it(
        self, window: tuple[int, int], sets: list[Pairs]
    ) -> None:
        starts, ends, owners = cover(window, [arrays(intervals) for intervals in sets])
        found = {}
        for start, end, owner in zip(starts.tolist(), ends.tolist(), owners.tolist(), strict=True):
            found.update(dict.fromkeys(range(start, end), owner))
        held = [points(intervals) for intervals in sets]
        assert found == {
            point: next((number for number, members in enumerate(held) if point in members), -1)
            for point in range(*window)
        }

    @given(window=windows, sets=st.lists(pairs, max_size=4))
    def test_segments_tile_the_window(self, window: tuple[int, int], sets: list[Pairs]) -> None:
        starts, ends, owners = cover(window, [arrays(intervals) for intervals in sets])
        if window[0] == window[1]:
            assert len(starts) == 0
            return
        assert (starts[0], ends[-1]) == window
        assert (starts[1:] == ends[:-1]).all()
        assert (ends > starts).all()
        assert (owners[1:] != owners[:-1]).all(), "neighbours of one owner are one segment"

    @given(window=windows, sets=st.lists(pairs, max_size=3), order=st.randoms(use_true_random=False))
    def test_the_order_within_a_set_does_not_matter(self, window: tuple[int, int], sets: list[Pairs], order) -> None:
        expected = [array.tolist() for array in cover(window, [arrays(intervals) for intervals in sets])]
        for intervals in sets:
            order.shuffle(intervals)
        assert [array.tolist() for array in cover(window, [arrays(intervals) for intervals in sets])] == expected
