"""Which event runs inside which, against a stack that is walked event by event."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from steptune.tuner.profiling.nesting import Nest, nest

Spans = list[tuple[int, int]]


def in_order(spans: Spans) -> Spans:
    """Spans in the order of a trace: by start, longer first."""
    return sorted(spans, key=lambda span: (span[0], -span[1]))


def nested_within(low: int, high: int, depth: int = 3) -> st.SearchStrategy[Spans]:
    """Events that do not cross: some side by side, each with others inside."""
    if high - low < 1 or depth == 0:
        return st.just([])

    def inside(edges: list[int]) -> st.SearchStrategy[Spans]:
        spans = list(zip(edges[::2], edges[1::2], strict=False))
        return st.tuples(*(nested_within(*span, depth - 1) for span in spans)).map(
            lambda inner: [*spans, *(span for part in inner for span in part)]
        )

    return st.lists(st.integers(low, high), max_size=6, unique=True).map(sorted).flatmap(inside)


nested = nested_within(0, 40)
crossing = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 15)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=8
)


def nest_of(spans: Spans) -> Nest:
    table = np.array(spans, dtype=np.int64).reshape(-1, 2)
    return nest(table[:, 0].copy(), table[:, 1].copy())


def reference(spans: Spans) -> tuple[list[int], list[int], list[int]]:
    """Parents, depths and ends: an event that outlives the one around it is cut there."""
    parents: list[int] = []
    depths: list[int] = []
    ends: list[int] = []
    for start, end in spans:
        parent = len(ends) - 1
        while parent >= 0 and ends[parent] <= start:
            parent = parents[parent]
        parents.append(parent)
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        ends.append(min(end, ends[parent]) if parent >= 0 else end)
    return parents, depths, ends


def check(spans: Spans) -> None:
    spans = in_order(spans)
    found = nest_of(spans)
    parents, depths, ends = reference(spans)
    assert found.parent.tolist() == parents
    assert found.end.tolist() == ends
    assert [rows.tolist() for rows in found.levels] == [
        [row for row, depth in enumerate(depths) if depth == level] for level in range(max(depths, default=-1) + 1)
    ]
    check_segments(spans, found, ends, depths)


def check_segments(spans: Spans, found: Nest, ends: list[int], depths: list[int]) -> None:
    """At every moment the deepest event that is open counts; of equals the one that began last."""
    starts, stops, owners = (array.tolist() for array in found.segments())
    owner_at = {
        moment: owner for start, stop, owner in zip(starts, stops, owners, strict=True) for moment in range(start, stop)
    }
    moments = {moment for (start, _), end in zip(spans, ends, strict=True) for moment in range(start, end)}
    expected = {}
    for moment in moments:
        running = [row for row, (start, _) in enumerate(spans) if start <= moment < ends[row]]
        expected[moment] = max(running, key=lambda row: (depths[row], row))
    assert owner_at == expected
    assert all(start < stop for start, stop in zip(starts, stops, strict=True))
    assert all(stop <= start for stop, start in zip(stops, starts[1:], strict=False))


@given(spans=nested)
def test_nested_events(spans: Spans) -> None:
    check(spans)


@given(spans=crossing)
def test_events_that_cross_are_cut_where_the_outer_one_ends(spans: Spans) -> None:
    check(spans)


@given(spans=nested, copies=st.integers(2, 3))
def test_events_of_the_same_span_contain_each_other_in_order(spans: Spans, copies: int) -> None:
    check(spans * copies)


def test_events_that_touch_are_side_by_side() -> None:
    found = nest_of([(0, 10), (0, 4), (4, 10), (10, 12)])
    assert found.parent.tolist() == [-1, 0, 0, -1]
    assert all(stop == start for (_, stop), (start, _) in pairwise(zip(*found.segments()[:2], strict=True)))


def test_nothing_contains_nothing() -> None:
    found = nest_of([])
    assert (len(found.parent), found.levels) == (0, ())
    assert [len(array) for array in found.segments()] == [0, 0, 0]
