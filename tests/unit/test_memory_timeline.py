"""The allocator's peaks and its thinned timeline."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from trace_events import allocation, operator, step, trace_of

from steptune.tuner.profiling.capture import link
from steptune.tuner.profiling.memory import MAX_POINTS, memory_stats, thinned


def test_peaks_by_device_and_times_from_the_first_step(tmp_path):
    events = [
        operator("aten::empty", -50, -10),
        allocation(-10, 50, 64),
        step(1, 0, 100),
        allocation(20, 70, 128),
        allocation(30, 20, 128),
        allocation(40, 9, 0, device=-1),
    ]
    trace = trace_of(tmp_path, events, deviceProperties=[{"id": 0, "name": "A", "totalGlobalMem": 1000}])
    cpu, gpu = memory_stats(link(trace))
    assert (gpu.device, gpu.peak_allocated_bytes, gpu.peak_reserved_bytes, gpu.total_memory_bytes) == (
        "cuda:0",
        70,
        128,
        1000,
    )
    assert gpu.timeline == ((-10_000, 50, 64), (20_000, 70, 128), (30_000, 20, 128))
    assert (cpu.device, cpu.timeline, cpu.total_memory_bytes) == ("cpu", ((40_000, 9, 0),), None)


def test_a_trace_without_allocator_events_has_no_memory(tmp_path):
    assert memory_stats(link(trace_of(tmp_path, [step(1, 0, 100)]))) == ()


@given(st.integers(0, 5000), st.integers(0, 2**32 - 1))
def test_a_thinned_timeline_keeps_order_ends_and_peaks(count, seed):
    generator = np.random.default_rng(seed)
    columns = np.stack([np.arange(count), *generator.integers(0, 1000, (2, count))], axis=1)
    kept = thinned(columns)
    assert len(kept) <= MAX_POINTS
    assert np.all(np.diff(kept) > 0)
    if count:
        assert (kept[0], kept[-1]) == (0, count - 1)
        assert columns[kept, 1:].max(axis=0).tolist() == columns[:, 1:].max(axis=0).tolist()
        assert columns[kept, 1].min() == columns[:, 1].min()
