"""Interval arithmetic against sets of integers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tuner.profiling.intervals import Ints, cover, union_length

Pairs = list[tuple[int, int]]
pairs = st.lists(st.tuples(st.integers(-30, 60), st.integers(0, 25)).map(lambda p: (p[0], p[0] + p[1])), max_size=8)
windows = st.tuples(st.integers(-10, 20), st.integers(0, 40)).map(lambda p: (p[0], p[0] + p[1]))


def arrays(intervals: Pairs) -> tuple[Ints, Ints]:
    table = np.array(intervals, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def points(intervals: Pairs) -> set[int]:
    return {point for start, end in intervals for point in range(start, end)}


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
