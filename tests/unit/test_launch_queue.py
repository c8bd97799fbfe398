"""Depth of the queue between the host and each stream."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_events import kernel, launched, runtime, step, trace_of
from traces import NAMES, needs_traces, trace_file

from steptune.tuner.profiling.capture import link
from steptune.tuner.profiling.launch_queue import max_depth, queue_stats
from steptune.tuner.profiling.reader import read_trace


def test_depth_delay_and_empty_launches_of_a_stream(tmp_path):
    """Three launches at 0, 10 and 20 us begin at 5, 50 and 90 us, in a step of 100 us."""
    events = [
        step(1, 0, 100),
        *launched("a", 0, 5, 50, 1),
        *launched("b", 10, 50, 90, 2),
        *launched("c", 20, 90, 100, 3),
    ]
    (stats,) = queue_stats(link(trace_of(tmp_path, events)), 0)
    assert (stats.stream, stats.num_launches) == (7, 3)
    # Waiting times of 5, 40 and 70 us share 100 us.
    assert stats.mean_depth == pytest.approx(1.15)
    assert stats.max_depth == 2
    assert stats.empty_share == pytest.approx(1 / 3)
    assert stats.median_delay_ns == 40_000
    assert stats.timeline == ((0, 1), (5_000, 0), (10_000, 1), (20_000, 2), (50_000, 1), (90_000, 0))


def test_a_launch_into_an_idle_stream_finds_it_empty(tmp_path):
    events = [step(1, 0, 100), *launched("a", 0, 5, 10, 1), *launched("b", 10, 15, 20, 2)]
    (stats,) = queue_stats(link(trace_of(tmp_path, events)), 0)
    assert stats.empty_share == 1.0
    assert stats.max_depth == 1


def test_one_call_of_a_graph_fills_the_queue(tmp_path):
    nodes = [kernel(f"node{n}", 10 + 10 * n, 20 + 10 * n, 5) for n in range(8)]
    events = [step(1, 0, 100), runtime("cudaGraphLaunch", 0, 3, 5), *nodes]
    (stats,) = queue_stats(link(trace_of(tmp_path, events)), 0)
    assert stats.max_depth == 8


def test_streams_are_apart_and_those_without_launches_are_left_out(tmp_path):
    events = [
        step(1, 0, 100),
        *launched("a", 0, 10, 20, 1),
        runtime("cudaLaunchKernel", 4, 5, 2),
        kernel("b", 6, 8, 2, stream=20),
        kernel("unlinked", 50, 60, stream=33),
    ]
    stats = queue_stats(link(trace_of(tmp_path, events)), 0)
    assert {s.stream: s.median_delay_ns for s in stats} == {7: 10_000, 20: 2_000}


def test_an_operation_before_its_own_launch_did_not_wait(tmp_path):
    events = [step(1, 0, 100), *launched("a", 12, 10, 20, 1)]
    (stats,) = queue_stats(link(trace_of(tmp_path, events)), 0)
    assert (stats.max_depth, stats.median_delay_ns, stats.mean_depth) == (0, 0, 0.0)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), min_size=1, max_size=30), st.integers(0, 20))
def test_the_deepest_moment_agrees_with_looking_at_every_moment(operations, low):
    launch = np.array([begin for begin, _ in operations])
    start = launch + np.array([delay for _, delay in operations])
    span = (low, 100)
    slow = max(sum(begin <= t < finish for begin, finish in zip(launch, start, strict=True)) for t in range(*span))
    assert max_depth(launch, start, span) == slow


@needs_traces
@pytest.mark.parametrize("name", NAMES)
def test_real_queues_are_possible(name):
    capture = link(read_trace(trace_file(name)))
    for device in capture.device_numbers:
        for stats in queue_stats(capture, device):
            assert 0 <= stats.mean_depth <= stats.max_depth <= stats.num_launches
            assert 0 <= stats.empty_share <= 1
            assert stats.median_delay_ns >= 0


@needs_traces
def test_the_launch_bound_trace_has_an_empty_queue_and_the_busy_one_a_full_one():
    launch_bound = link(read_trace(trace_file("h200_swin_t_launch_bound")))
    busy = link(read_trace(trace_file("h200_vit_b_ddp2_split0_rank0")))
    assert queue_stats(launch_bound, 0)[0].mean_depth < 2
    # CUDA lets about 1024 launches wait in a stream.
    assert 500 < queue_stats(busy, 0)[0].mean_depth <= 1024
