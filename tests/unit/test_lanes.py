"""Activity of streams and threads, thinned out: time stays exact, and nothing overlaps."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest
from analysed import GEMM, loop_events
from hypothesis import example, given
from hypothesis import strategies as st
from trace_events import OTHER, kernel, operator, step, trace_of
from traces import NAMES, needs_traces, trace_file

from steptune.tuner.costs.categories import CATEGORIES
from steptune.tuner.profiling.analysis import analyse_trace
from steptune.tuner.profiling.lanes import FULL_CELLS, MAX_CELLS, Spans, merged
from steptune.tuner.profiling.reader import read_trace
from steptune.tuner.trace_records import Lane

PARTS = st.lists(
    st.tuples(st.integers(0, 50), st.integers(1, 5000), st.integers(0, len(CATEGORIES) - 1)), min_size=1, max_size=80
)


def spans_of(parts, low=0):
    """Spans of these distances, lengths and categories; each has its own name."""
    moves = np.array([(gap, length) for gap, length, _ in parts], dtype=np.int64)
    end = low + np.cumsum(moves.sum(axis=1))
    return Spans(
        start=end - moves[:, 1],
        end=end,
        category=np.array([category for *_, category in parts], dtype=np.int64),
        name=np.arange(len(parts)),
        count=np.ones(len(parts), dtype=np.int64),
        busy_ns=moves[:, 1],
    )


@given(parts=PARTS, max_cells=st.integers(1, 100), low=st.integers(-(10**12), 10**15))
@example(parts=[(0, 1, 0), (0, 1, 0)], max_cells=1, low=-1)  # around zero
def test_merged_cells_keep_the_time_of_every_category_and_overlap_in_their_stretch_only(parts, max_cells, low):
    spans = spans_of(parts, low)
    found = merged(spans, max_cells)
    assert 1 <= len(found) <= max(max_cells, len(CATEGORIES))
    for category in range(len(CATEGORIES)):
        one, all_of_them = found.category == category, spans.category == category
        assert found.busy_ns[one].sum() == spans.busy_ns[all_of_them].sum()
        assert found.count[one].sum() == all_of_them.sum()
    same = (found.start[1:] == found.start[:-1]) & (found.end[1:] == found.end[:-1])
    assert (same | (found.start[1:] >= found.end[:-1])).all()
    assert (found.category[1:][same] > found.category[:-1][same]).all()
    assert (found.start[0], found.end[-1]) == (spans.start[0], spans.end[-1])


@given(parts=PARTS, max_cells=st.integers(1, 100))
def test_a_merged_stretch_is_never_busier_than_it_is_long(parts, max_cells):
    found = merged(spans_of(parts), max_cells)
    busy = Counter()
    for start, end, time in zip(found.start.tolist(), found.end.tolist(), found.busy_ns.tolist(), strict=True):
        busy[start, end] += time
    assert all(time <= end - start for (start, end), time in busy.items())


@given(parts=PARTS, max_cells=st.integers(1, 100))
def test_a_merged_cell_is_named_after_the_longest_event_of_its_category(parts, max_cells):
    spans = spans_of(parts)
    found = merged(spans, max_cells)
    for start, end, category, name in zip(found.start, found.end, found.category, found.name, strict=True):
        inside = (spans.start >= start) & (spans.end <= end) & (spans.category == category)
        assert spans.busy_ns[name] == spans.busy_ns[inside].max()


def test_a_long_span_among_short_ones_stays_as_it_is():
    parts = [(0, 10, 0)] * 1000 + [(0, 10**6, 3)] + [(0, 10, 0)] * 1000
    found = merged(spans_of(parts), 20)
    [place] = np.flatnonzero(found.busy_ns >= 10**6)
    assert (found.count[place], found.category[place], found.end[place] - found.start[place]) == (1, 3, 10**6)


def test_kernels_between_gaps_are_not_painted_over_them():
    """A microsecond of work in every ten: whatever is merged, a tenth of it is busy."""
    found = merged(spans_of([(9_000, 1_000, 0)] * 10_000), 50)
    assert found.count.max() > 100
    share = found.busy_ns.sum() / (found.end - found.start).sum()
    assert share == pytest.approx(0.1, rel=0.01)


def test_lanes_are_of_devices_streams_and_threads(tmp_path):
    analysis, *_ = analyse_trace(trace_of(tmp_path, loop_events()), "trace.json")
    lanes = {(lane.kind, lane.label): lane for lane in analysis.lanes}
    assert [kind for kind, _ in lanes] == ["device", "stream", "stream", "thread"]
    stream = lanes["stream", "stream 7"]
    assert GEMM in stream.names
    assert sum(stream.busy_ns) == sum(kernel.total_ns for kernel in analysis.kernels)
    [thread] = [lane for lane in analysis.lanes if lane.kind == "thread"]
    assert thread.label == "main thread"
    waits = [
        length
        for length, code in zip(thread.length_ns, thread.category, strict=True)
        if thread.categories[code] == "data_wait"
    ]
    assert waits == [400_000] * 3


def test_the_lane_of_a_device_has_the_times_of_its_breakdown(tmp_path):
    analysis, *_ = analyse_trace(trace_of(tmp_path, loop_events()), "trace.json")
    [lane] = [lane for lane in analysis.lanes if lane.kind == "device"]
    times = Counter()
    for length, code in zip(lane.length_ns, lane.category, strict=True):
        times[lane.categories[code]] += length
    assert times == {name: ns for name, ns in analysis.breakdowns[0].categories.items() if ns}


def test_operations_that_overlap_on_one_stream_are_cut(tmp_path):
    events = [step(0, 0, 100), kernel("a", 0, 50), kernel("b", 40, 60), kernel("c", 45, 48)]
    analysis, *_ = analyse_trace(trace_of(tmp_path, events), "trace.json")
    [lane] = [lane for lane in analysis.lanes if lane.kind == "stream"]
    assert list(zip(lane.start_ns, lane.length_ns, strict=True)) == [(0, 50_000), (50_000, 10_000)]


def test_a_cpu_has_a_lane_with_operators_and_those_of_its_other_threads(tmp_path):
    events = [step(0, 0, 100), operator("aten::mm", 10, 60), operator("aten::add", 5, 30, OTHER)]
    analysis, *_ = analyse_trace(trace_of(tmp_path, events), "trace.json")
    assert [(lane.kind, lane.label) for lane in analysis.lanes] == [("device", "cpu"), ("thread", f"thread {OTHER}")]
    assert "aten::mm" in analysis.lanes[0].names


@pytest.mark.parametrize("change", [{"length_ns": (1, 2)}, {"name": (1,)}, {"category": (-1,)}])
def test_a_lane_that_refers_to_nothing_cannot_be_read(change):
    lane = {"device": "", "kind": "thread", "label": "t", "names": ["a"], "categories": ["host"]}
    lane |= {"start_ns": (0,), "length_ns": (1,), "name": (0,), "category": (0,), "count": (1,), "busy_ns": (1,)}
    assert msgspec.convert(lane, Lane).names == ("a",)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(lane | change, Lane)


@needs_traces
@pytest.mark.parametrize("name", NAMES)
def test_lanes_of_real_traces(name):
    trace = read_trace(trace_file(name))
    analysis, *_ = analyse_trace(trace, name)
    whole, *_ = analyse_trace(trace, name, max_cells=FULL_CELLS)
    for lane, full in zip(analysis.lanes, whole.lanes, strict=True):
        start, length = np.array(lane.start_ns), np.array(lane.length_ns)
        assert 0 < len(start) <= MAX_CELLS
        assert set(full.count) == {1}, "no lane of these traces is merged"
        assert sum(lane.busy_ns) == sum(full.busy_ns) == sum(full.length_ns)
        same = (start[1:] == start[:-1]) & (length[1:] == length[:-1])
        assert (same | (start[1:] >= start[:-1] + length[:-1])).all()
        assert start[0] >= 0
        assert start[-1] + length[-1] <= analysis.breakdowns[0].step_time_ns
    for breakdown in analysis.breakdowns:
        [lane] = [one for one in analysis.lanes if (one.kind, one.device) == ("device", breakdown.device)]
        assert sum(lane.busy_ns) == breakdown.step_time_ns
