"""The contract of every breakdown: exclusive categories that are the step, to the nanosecond.

Against a slow definition of the same (`slow_breakdown`), on generated traces and on real ones; and on
the real ones against what independent analysers say.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from breakdowns import analyse
from hypothesis import example, given, settings
from hypothesis import strategies as st
from profiled import situation
from slow_breakdown import cpu_breakdown, device_breakdown, read_spans
from trace_events import (
    MAIN,
    OTHER,
    Event,
    copy,
    event,
    kernel,
    launched,
    note,
    operator,
    recomputed,
    runtime,
    step,
    trace_of,
    write_trace,
)
from traces import NAMES, expected_file, needs_traces, trace_file

from steptune.tuner.costs.categories import COMPUTE, COMPUTING, HOST_CATEGORIES, INFO, PRIORITY, Category
from steptune.tuner.profiling.breakdown import WAITS_FOR_OTHERS, breakdown_of
from steptune.tuner.profiling.capture import Capture, link
from steptune.tuner.profiling.device_time import device_time
from steptune.tuner.profiling.diagnosis import diagnose
from steptune.tuner.profiling.evidence import Evidence
from steptune.tuner.profiling.intervals import Ints, union_length
from steptune.tuner.profiling.reader import read_trace
from steptune.tuner.profiling.trace import Kind
from steptune.tuner.records import Breakdown

KERNELS = (
    "ampere_sgemm_128x64_tn",
    "flash_fwd_kernel",
    "vectorized_layer_norm_kernel",
    "vectorized_elementwise_kernel",
    "reduce_kernel",
    "indexFuncLargeIndex",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
)
COPIES = ("Memcpy HtoD (Pageable -> Device)", "Memcpy DtoH (Device -> Pageable)", "Memset (Device)")
HOST_NOTES = (
    "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
    "Optimizer.step#AdamW.step",
    "steptune.epoch_restart",
    "forward",
    "autograd::engine::evaluate_function: MmBackward0",
)
OPERATORS = (
    "aten::mm",
    "aten::add",
    "aten::native_layer_norm",
    "aten::index",
    "autograd::engine::evaluate_function: AddmmBackward0",
    "Optimizer.step#AdamW.step",
    "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
    "c10d::allreduce_",
)
CALLS = ("cudaDeviceSynchronize", "cudaMalloc", "cudaMemcpyAsync", "cudaStreamIsCapturing")

MEASURED_WITH_HTA = [name for name in NAMES if "hta_no_ns_rounding" in expected_file(name).read_text()]

MEASURED_WITHOUT_PROFILER = [name for name in NAMES if "unprofiled_step_ms" in expected_file(name).read_text()]
FLOAT_NS = 50
"""Nanoseconds that adding thousands of gaps in floating-point microseconds may lose."""

WITH_CLOSURE = [
    operator("Optimizer.step#AdamW.step", 1, 7),
    operator("aten::mm", 2, 3),
    operator("autograd::engine::evaluate_function: AddmmBackward0", 4, 5),
    operator("aten::add", 5, 6),
]
"""A step of an optimizer whose closure runs the passes: its update begins when the backward pass ends."""
BLOCK_US = 120
times = st.integers(0, 120)
lengths = st.integers(0, 30)


@st.composite
def device_traces(draw) -> list[Event]:
    """Steps, kernels and copies on two streams (some without a launch), and what the host did meanwhile."""
    edges = draw(st.lists(st.integers(10, 110), min_size=2, max_size=4, unique=True).map(sorted))
    events = [step(number, a, b) for number, (a, b) in enumerate(pairwise(edges))]
    starts = draw(st.lists(times, min_size=1, max_size=10, unique=True))
    for number, start in enumerate(starts):
        end = start + draw(lengths)
        if draw(st.booleans()):
            events.append(kernel(draw(st.sampled_from(KERNELS)), start, end, number, stream=draw(st.integers(7, 8))))
            collective = draw(st.sampled_from(("", "", "", "allreduce", "send")))
            events[-1]["args"].update({"Collective name": collective} if collective else {})
        else:
            events.append(copy(draw(st.sampled_from(COPIES)), start, end, number))
        if draw(st.integers(0, 4)):
            call = max(0, start - draw(st.integers(0, 40)))
            thread = draw(st.sampled_from((MAIN, OTHER)))
            events.append(runtime("cudaLaunchKernel", call, call + 1, number, thread))
    for start in draw(st.lists(times, max_size=4)):
        events.append(note(draw(st.sampled_from(HOST_NOTES)), start, start + draw(lengths)))
    for start in draw(st.lists(times, max_size=2)):
        thread = draw(st.sampled_from((MAIN, OTHER)))
        events.append(recomputed("aten::mm", start, start + draw(lengths), thread))
    for number, start in enumerate(draw(st.lists(times, max_size=4))):
        events.append(runtime(draw(st.sampled_from(CALLS)), start, start + draw(lengths), 1000 + number))
    return events


@st.composite
def nested(draw, low: int, high: int, depth: int = 0) -> list[Event]:
    """Operators that nest as calls do, inside [low, high)."""
    if depth == 3 or high - low < 2:
        return []
    edges = draw(st.lists(st.integers(low, high), max_size=4, unique=True).map(sorted))
    events = []
    for start, end in zip(edges[::2], edges[1::2], strict=False):
        # A child never has the bounds of its parent: which of two equal spans is the inner one, no trace says.
        make = draw(st.sampled_from((operator, operator, recomputed)))
        events.append(make(draw(st.sampled_from(OPERATORS)), start, end))
        events += draw(nested(start + 1, end, depth + 1))
    return events


@st.composite
def cpu_traces(draw) -> list[Event]:
    edges = draw(st.lists(st.integers(0, 120), min_size=2, max_size=4, unique=True).map(sorted))
    events = [step(number, a, b) for number, (a, b) in enumerate(pairwise(edges))]
    for start, end in pairwise(edges):
        events += draw(nested(start + 1, end))
    for start in draw(st.lists(times, max_size=2)):
        events.append(
            note(draw(st.sampled_from(("gloo:all_reduce", "gloo:send"))), start, start + draw(lengths), OTHER)
        )
    for start in draw(st.lists(times, max_size=2)):
        events.append(operator("aten::mm", start, start + draw(lengths), OTHER))
    return events


@st.composite
def step_blocks(draw) -> list[Event]:
    """One step in which everything begins and ends, launched by the thread that runs the steps."""
    events = [step(0, 0, BLOCK_US)]
    for number, start in enumerate(draw(st.lists(st.integers(1, BLOCK_US - 31), max_size=6, unique=True))):
        events.append(runtime("cudaLaunchKernel", draw(st.integers(0, start - 1)), start, number))
        name = draw(st.sampled_from(KERNELS))
        events.append(kernel(name, start, start + draw(lengths), number, stream=draw(st.integers(7, 8))))
    for start in draw(st.lists(st.integers(0, BLOCK_US - 31), max_size=4)):
        events.append(note(draw(st.sampled_from(HOST_NOTES)), start, start + draw(lengths)))
    return events


def shifted(events: list[Event], number: int) -> list[Event]:
    """Events, moved to the step of this number."""
    moved = []
    for one in events:
        args = dict(one["args"])
        if "correlation" in args:
            args["correlation"] += 100 * number
        moved.append({**one, "ts": one["ts"] + BLOCK_US * number, "args": args})
    return moved


def by_step(folder: Path, events: list[Event], edges: Ints) -> list[dict[str, int]]:
    """Categories of each step between given edges, latency and what is beyond it together."""
    capture = link(trace_of(folder, [*events, kernel("sgemm", 0, 0, -1)]))
    capture = replace(capture, steps=replace(capture.steps, boundaries=edges))
    breakdown = breakdown_of(capture, "cuda:0", device_time(capture, 0)[0])
    steps = [dict(one) for one in breakdown.steps]
    for one in steps:
        after = (Category.LAUNCH_LATENCY, Category.DISPATCH, Category.QUEUED)
        one["after the launch"] = sum(one.pop(category, 0) for category in after)
    return steps


any_trace = st.one_of(device_traces(), cpu_traces())


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def check_partition(breakdown: Breakdown) -> None:
    assert sum(breakdown.categories.values()) == breakdown.step_time_ns
    assert all(type(value) is int and value >= 0 for value in breakdown.categories.values())
    assert set(breakdown.categories) == set(INFO), "every category is there, and no other"
    assert all(0 <= value <= breakdown.step_time_ns for value in breakdown.overlapped.values())
    computed = sum(breakdown.categories[category] for category in COMPUTING)
    assert sum(breakdown.phases.values()) == computed, "the phases partition what computes"
    assert len(breakdown.steps) == breakdown.num_steps
    together = Counter[str]()
    for one in breakdown.steps:
        together.update(one)
    assert dict(together) == nonzero(breakdown), "the steps are the whole"


def nonzero(breakdown: Breakdown) -> dict[str, int]:
    return {name: value for name, value in breakdown.categories.items() if value}


@cache
def analysed(name: str) -> Breakdown:
    """The breakdown of a real trace; each has one device."""
    (breakdown,) = analyse(read_trace(trace_file(name)))
    return breakdown


def in_cpu_window(capture: Capture) -> dict[str, int]:
    """Categories from the first step's mark to the last one's end, whatever the device did then."""
    trace = capture.trace
    marks = trace.host_rows(r"^ProfilerStep#\d+$", Kind.OPERATOR, Kind.ANNOTATION)
    window = np.array([trace.host.start[marks].min(), trace.host.end[marks].max()])
    same = replace(capture, steps=replace(capture.steps, boundaries=window))
    (device,) = capture.device_numbers
    return breakdown_of(same, f"cuda:{device}", device_time(same, device)[0]).categories


def hta_temporal(capture: Capture) -> tuple[int, int, int]:
    """Window, idle and compute time as HTA defines them, from our columns."""
    trace, work = capture.trace, capture.trace.work
    marks = trace.host_rows(r"^ProfilerStep#\d+$", Kind.OPERATOR, Kind.ANNOTATION)
    last = trace.host.start[marks].max() if len(marks) > 1 else np.iinfo(np.int64).max
    rows = trace.work_rows()
    rows = rows[np.where(capture.launches.row[rows] >= 0, capture.launches.start[rows], work.start[rows]) < last]
    communication = [PRIORITY[Category.COMMUNICATION], PRIORITY[Category.PIPELINE_BUBBLE]]
    compute = rows[(work.kind[rows] == Kind.KERNEL) & ~np.isin(capture.category[rows], communication)]
    window = int(work.end[rows].max() - work.start[rows].min())
    busy = union_length(work.start[rows], work.end[rows])
    return window, window - busy, union_length(work.start[compute], work.end[compute])


def slowly(path: Path, breakdown: Breakdown) -> dict[str, int]:
    spans = read_spans(path)
    device = breakdown.device
    totals: Any = (
        cpu_breakdown(spans) if device == "cpu" else device_breakdown(spans, int(device.removeprefix("cuda:")))
    )
    return {name.value: value for name, value in totals.items() if value}


class TestGenerated:
    @given(events=any_trace)
    def test_categories_partition_the_profiled_stretch(self, folder: Path, events: list[Event]) -> None:
        trace = trace_of(folder, events)
        low, high = link(trace).steps.span
        for breakdown in analyse(trace):
            check_partition(breakdown)
            assert breakdown.step_time_ns == high - low

    @example(events=[step(0, 0, 8), *WITH_CLOSURE])
    @example(events=[step(0, 0, 8), *WITH_CLOSURE, kernel(KERNELS[3], 7, 8, 1), runtime("cudaLaunchKernel", 2, 3, 1)])
    @given(events=any_trace)
    def test_the_slow_definition_agrees(self, folder: Path, events: list[Event]) -> None:
        trace = trace_of(folder, events)
        for breakdown in analyse(trace):
            assert nonzero(breakdown) == slowly(folder / "trace.json", breakdown)

    @given(events=any_trace, random=st.randoms(use_true_random=False))
    def test_the_order_of_events_in_the_file_does_not_matter(self, folder: Path, events: list[Event], random) -> None:
        """A trace's writer gives no order; ties of equal spans apart, which the generator leaves out."""
        expected = [b.categories for b in analyse(trace_of(folder, events))]
        random.shuffle(events)
        assert [b.categories for b in analyse(trace_of(folder, events))] == expected

    @given(events=any_trace, shift=st.integers(0, 10**15))
    def test_the_origin_of_time_does_not_matter(self, folder: Path, events: list[Event], shift: int) -> None:
        """Modern traces count from the epoch: no precision may be lost to the size of a time stamp."""
        expected = [b.categories for b in analyse(trace_of(folder, events))]
        moved = [{**e, "ts": e["ts"] + shift} for e in events]
        assert [b.categories for b in analyse(trace_of(folder, moved))] == expected

    @given(events=device_traces(), data=st.data())
    def test_work_hidden_behind_work_of_higher_priority_changes_nothing(
        self, folder: Path, events: list[Event], data: st.DataObject
    ) -> None:
        """A copy that runs entirely under a product costs the step nothing; it is reported as overlapped."""
        start = data.draw(st.integers(41, 69))
        end = data.draw(st.integers(start, 70))
        events = [*events, kernel(KERNELS[0], 40, 70, 777), runtime("cudaLaunchKernel", 40, 41, 777)]
        events.append(runtime("cudaMemcpyAsync", 40, 41, 778))
        product = kernel(KERNELS[0], start, end, 778, stream=9)
        before = analyse(trace_of(folder, [*events, product]))[0].categories
        assert analyse(trace_of(folder, [*events, copy(COPIES[0], start, end, 778)]))[0].categories == before

    @given(blocks=st.lists(step_blocks(), min_size=2, max_size=4))
    def test_splitting_between_steps_with_nothing_in_flight_and_adding_changes_nothing(
        self, folder: Path, blocks: list[list[Event]]
    ) -> None:
        """But for the latency of a launch, which every part takes from its own launches: it and what is beyond
        it are compared together.
        """
        moved = [shifted(events, number) for number, events in enumerate(blocks)]
        edges = np.arange(len(blocks) + 1) * BLOCK_US * 1000
        whole = by_step(folder, [one for events in moved for one in events], edges)
        parts = [by_step(folder, events, edges[:2])[0] for events in blocks]
        assert whole == parts

    @settings(max_examples=40)
    @given(events=any_trace, unprofiled=st.integers(1, 200_000))
    def test_the_rescaled_categories_are_the_unprofiled_step(
        self, folder: Path, events: list[Event], unprofiled: int
    ) -> None:
        for breakdown in analyse(trace_of(folder, events), unprofiled):
            assert sum(breakdown.rescaled.values()) == unprofiled
            assert min(breakdown.rescaled.values()) >= 0
            check_partition(breakdown)

    @given(events=st.lists(st.tuples(st.sampled_from(OPERATORS), times, lengths), min_size=1, max_size=8))
    def test_operators_that_overlap_without_nesting_still_partition(self, folder: Path, events) -> None:
        """Clocks of real traces are not perfect; the sum is, even so."""
        crossing = [step(1, 0, 100), *(operator(name, start, start + length) for name, start, length in events)]
        (breakdown,) = analyse(trace_of(folder, crossing))
        check_partition(breakdown)
        assert breakdown.step_time_ns == 100_000


class TestDevices:
    def test_each_device_of_a_trace_has_its_own_breakdown(self, tmp_path: Path) -> None:
        events = [
            step(1, 0, 100),
            runtime("cudaLaunchKernel", 5, 6, 1),
            kernel("sgemm", 10, 40, 1, device=0),
            runtime("cudaLaunchKernel", 7, 8, 2),
            kernel("sgemm", 10, 90, 2, device=1),
        ]
        breakdowns = analyse(trace_of(tmp_path, events))
        assert {b.device: b.categories[Category.MATMUL] for b in breakdowns} == {"cuda:0": 30_000, "cuda:1": 80_000}

    def test_synchronisation_events_of_the_device_are_not_work(self, tmp_path: Path) -> None:
        """`cuda_sync` rows lie on the device's streams and last as long as the host waits: not busy."""
        events = [
            step(1, 0, 100),
            runtime("cudaLaunchKernel", 5, 6, 1),
            kernel("sgemm", 10, 20, 1),
            event("cuda_sync", "Context Sync", 20, 90, device=0, stream=7),
            runtime("cudaDeviceSynchronize", 20, 90, 2),
        ]
        (breakdown,) = analyse(trace_of(tmp_path, events))
        assert breakdown.categories[Category.MATMUL] == 10_000
        assert breakdown.categories[Category.SYNCHRONISATION] == 70_000

    def test_overlapped_communication_is_counted_inside_the_stretch_only(self, tmp_path: Path) -> None:
        """Work of an earlier step that still runs when the first profiled one begins."""
        events = [
            event("cpu_op", "aten::mm", 0, 1),
            kernel("sgemm", 0, 200, 1),
            kernel("ncclDevKernel_AllReduce", 0, 200, 2, stream=9),
            step(1, 150, 180),
            runtime("cudaLaunchKernel", 160, 161, 3),
            kernel("sgemm", 190, 210, 3),
        ]
        (breakdown,) = analyse(trace_of(tmp_path, events))
        assert breakdown.step_time_ns == 60_000
        assert breakdown.overlapped["communication"] == 50_000

    def test_host_time_under_a_collective_is_communication_only_where_both_are(self, tmp_path: Path) -> None:
        """The wait for data while gradients travel is no reason to call other host time communication."""
        events = [
            step(1, 0, 100),
            note(HOST_NOTES[0], 0, 40),
            note("gloo:all_reduce", 0, 50, OTHER),
        ]
        (breakdown,) = analyse(trace_of(tmp_path, events))
        assert nonzero(breakdown) == {"data_wait": 40_000, "communication": 10_000, "host": 50_000}


class TestBlocking:
    """Exposed communication costs the step only where compute was launched and had to wait for it."""

    def blocking(self, tmp_path: Path, launched_at: int, *others: Event) -> Breakdown:
        events = [
            step(1, 0, 100),
            *others,
            runtime("cudaLaunchKernel", 1, 2, 1),
            kernel("ncclDevKernel_AllReduce", 10, 60, 1, stream=9),
            runtime("cudaLaunchKernel", launched_at, launched_at + 1, 2),
            kernel("sgemm", 60, 100, 2),
        ]
        return analyse(trace_of(tmp_path, events))[0]

    def test_what_was_launched_before_had_to_wait(self, tmp_path: Path) -> None:
        breakdown = self.blocking(tmp_path, launched_at=5)
        assert breakdown.blocking == {"communication": 50_000}
        assert breakdown.removable_ns(Category.COMMUNICATION) == 50_000

    def test_a_host_that_waits_for_the_collective_is_held_up(self, tmp_path: Path) -> None:
        """The collective is not to blame for the wait before it began, nor for other work of the host."""
        copied = runtime("cudaMemcpyAsync", 5, 40)
        assert self.blocking(tmp_path, 50, copied).blocking == {"communication": 30_000 + 10_000}

    def test_a_rank_that_runs_ahead_gains_nothing_while_its_host_is_at_work(self, tmp_path: Path) -> None:
        """It waits for its peers all day, but its own host needs as long for every step."""
        events = []
        for number in range(4):
            begin = 100 * number
            events += [
                step(number, begin, begin + 100),
                operator("aten::add", begin, begin + 95),
                *launched("ncclDevKernel_AllReduce", begin + 5, begin + 10, begin + 98, 2 * number + 1),
                *launched("sgemm", begin + 6, begin + 98, begin + 102, 2 * number + 2),
            ]
        (breakdown,) = analyse(trace_of(tmp_path, events))
        assert breakdown.share(Category.COMMUNICATION) > 0.8
        assert breakdown.removable_share(Category.COMMUNICATION) < 0.05

    def test_what_the_host_launched_late_would_have_come_late_anyway(self, tmp_path: Path) -> None:
        breakdown = self.blocking(tmp_path, launched_at=50)
        assert breakdown.categories[Category.COMMUNICATION] == 50_000
        assert breakdown.blocking == {"communication": 10_000}
        assert breakdown.removable_ns(Category.COMMUNICATION, Category.MATMUL) == 50_000


class TestThreads:
    def test_a_thread_of_which_nothing_is_recorded_waited_for_the_one_that_runs_the_steps(self, tmp_path: Path) -> None:
        """A prefetching thread launches the copy when the loader's batch is there."""
        events = [
            step(1, 0, 100),
            note(HOST_NOTES[0], 0, 70),
            runtime("cudaMemcpyAsync", 75, 76, 1, OTHER),
            copy(COPIES[0], 80, 100, 1),
        ]
        (breakdown,) = analyse(trace_of(tmp_path, events))
        assert breakdown.categories[Category.DATA_WAIT] == 70_000
        busy = [*events, operator("aten::copy_", 10, 75, OTHER)]
        (breakdown,) = analyse(trace_of(tmp_path, busy))
        assert breakdown.categories[Category.DATA_WAIT] == 10_000, "then that thread was late by itself"


class TestQuality:
    def bad_trace(self, tmp_path: Path, linked: int, unlinked: int) -> Breakdown:
        events = [step(1, 0, 1000)]
        for number in range(linked + unlinked):
            if number < linked:
                events.append(runtime("cudaLaunchKernel", 2 + 9 * number, 3 + 9 * number, number))
            events.append(kernel("sgemm", 5 + 9 * number, 6 + 9 * number, number))
        return analyse(trace_of(tmp_path, events))[0]

    def test_device_work_without_launches_is_unknown_idle_time_and_said(self, tmp_path: Path) -> None:
        breakdown = self.bad_trace(tmp_path, linked=10, unlinked=10)
        assert breakdown.categories[Category.UNKNOWN] > 0
        (problem,) = breakdown.quality.problems
        assert problem.startswith(
            "50% of the device work has no recorded launch, which leaves the cause of 8% of the step"
        )

    def test_a_few_unlinked_operations_are_no_problem(self, tmp_path: Path) -> None:
        assert self.bad_trace(tmp_path, linked=40, unlinked=1).quality.problems == ()

    def test_launches_without_device_work_are_said(self, tmp_path: Path) -> None:
        """A capture whose device buffer overflowed looks idle; it is a bad capture, not an idle device."""
        events = [step(1, 0, 1000), kernel("sgemm", 5, 6, 0)]
        events += [runtime("cudaLaunchKernel", 2 + 9 * number, 3 + 9 * number, number) for number in range(50)]
        (breakdown,) = analyse(trace_of(tmp_path, events))
        assert breakdown.quality.missing_share == pytest.approx(0.98)
        assert breakdown.quality.problems == ("98% of the launches have no recorded device work",)

    @pytest.mark.parametrize("calls_too", [False, True], ids=["work lost", "work and calls lost"])
    def test_lost_replays_of_a_graph_are_said(self, tmp_path: Path, calls_too: bool) -> None:
        """A replay is one call of many operations: 18 of 20 lost are much, beside a thousand other launches."""
        events = self.replays(20, others=50, lost=range(1, 19), calls_too=calls_too)
        (breakdown,) = analyse(trace_of(tmp_path, events))
        (problem,) = breakdown.quality.problems
        assert breakdown.quality.problem_names == ("missing",)
        if not calls_too:
            assert problem == "18 of 20 replays of CUDA graphs lack a part of their device work in the trace"

    def test_a_replay_that_lost_half_of_its_kernels_is_said(self, tmp_path: Path) -> None:
        events = self.replays(4, others=0)
        events = [
            e for e in events if not (e["name"] == "graphed" and e["args"]["correlation"] == 1001 and e["ts"] % 2)
        ]
        (breakdown,) = analyse(trace_of(tmp_path, events))
        assert breakdown.quality.problems == (
            "1 of 4 replays of CUDA graphs lack a part of their device work in the trace",
        )

    def test_whole_replays_and_graphs_of_different_sizes_are_no_problem(self, tmp_path: Path) -> None:
        """Trees of graphs of mode reduce-overhead have them."""
        events = self.replays(4, others=3) + [
            e
            for number in range(4)
            for e in (
                runtime("cudaGraphLaunch", number * 1000 + 900, number * 1000 + 901, 2000 + number),
                kernel("graphed", number * 1000 + 950, number * 1000 + 951, 2000 + number),
            )
        ]
        (breakdown,) = analyse(trace_of(tmp_path, events))
        assert breakdown.quality.problems == ()

    def replays(self, num_steps: int, *, others: int, lost: range = range(0), calls_too: bool = False) -> list[Event]:
        """Steps of 1 ms: other launches, then a replayed graph of 100 operations."""
        events = []
        for number in range(num_steps):
            at = number * 1000
            events.append(step(number, at, at + 1000))
            if not (calls_too and number in lost):
                for other in range(others):
                    call = at + 2 + 2 * other
                    events += launched("sgemm", call, call + 1, call + 2, number * 100 + other + 5000)
                events.append(runtime("cudaGraphLaunch", at + 300, at + 310, 1000 + number))
            if number not in lost:
                starts = range(at + 320, at + 420)
                events += [kernel("graphed", start, start + 1, 1000 + number) for start in starts]
        return events

    def test_a_profiler_that_changed_the_step_is_said(self, tmp_path: Path) -> None:
        events = [step(1, 0, 100), operator("aten::mm", 10, 90)]
        slowed, fair = (analyse(trace_of(tmp_path, events), ns)[0].quality for ns in (25_000, 90_000))
        (impossible,) = analyse(trace_of(tmp_path, events), 300_000)[0].quality.problems
        assert impossible == "the step time that was given as unprofiled is 3 times the profiled step time: it was " + (
            "measured on other steps"
        )
        assert slowed.problems == ("the profiler made the step 4.00 times as long",)
        assert slowed.overhead_ratio == 4.0
        assert fair.problems == ()
        assert slowed.problem_names == ("overhead",)

    @pytest.mark.parametrize(
        ("first_us", "names", "said"), [(1000, (), 0), (1600, (), 1), (2500, ("warm_up",), 0)], ids=str
    )
    def test_warming_up_that_was_profiled_is_said_and_spoils_the_verdict_where_it_is_much(
        self, tmp_path: Path, first_us: int, names: tuple[str, ...], said: int
    ) -> None:
        """Three steps of 1 ms: a first one of 1.6 ms is 17 % of the time too much, one of 2.5 ms is 33 %."""
        edges = [0, first_us, first_us + 1000, first_us + 2000]
        events = [step(number, *edges[number : number + 2]) for number in range(3)]
        quality = analyse(trace_of(tmp_path, [*events, operator("aten::mm", 10, edges[3] - 10)]))[0].quality
        assert quality.problem_names == names
        assert len([note for note in quality.notes if "warm up longer" in note]) == said

    def test_every_problem_has_its_name(self, tmp_path: Path) -> None:
        """The advice depends on it."""
        unlinked = self.bad_trace(tmp_path, linked=10, unlinked=10)
        assert unlinked.quality.problem_names == ("unlinked",)
        path = write_trace(tmp_path / "cut.json", [step(1, 0, 100), operator("aten::mm", 10, 90)])
        path.write_bytes(path.read_bytes()[:-40])
        assert analyse(read_trace(path))[0].quality.problem_names == ("cut_file",)
        events = [step(1, 0, 100), operator("aten::mm", 10, 90)]
        assert analyse(trace_of(tmp_path, events), 300_000)[0].quality.problem_names == ("wrong_step_time",)
        busy = [step(1, 0, 100), *launched("sgemm", 5, 10, 90, 1)]
        (impossible,) = analyse(trace_of(tmp_path, busy), 20_000)
        assert impossible.quality.problem_names == ("wrong_step_time",), "kernels do not slow down by being recorded"


@needs_traces
@pytest.mark.parametrize("name", NAMES)
class TestReal:
    def test_categories_partition_and_the_slow_definition_agrees(self, name: str) -> None:
        breakdown = analysed(name)
        check_partition(breakdown)
        low, high = link(read_trace(trace_file(name))).steps.span
        assert breakdown.step_time_ns == high - low
        assert nonzero(breakdown) == slowly(trace_file(name), breakdown)

    def test_an_independent_breakdown_of_the_same_window_agrees(self, name: str) -> None:
        """To what its floats lose. It knows neither `zero_grad` as part of the optimizer nor blocking operators
        (`aten::item`) as synchronisation: what the host is blamed for differs in that, and in its sum by nothing.
        """
        expected = json.loads(expected_file(name).read_text())["reference_exact"]
        theirs = expected["exclusive_us"]
        capture = link(read_trace(trace_file(name)))
        assert len(capture.steps) == expected["n_steps"]
        times = in_cpu_window(capture)
        host = (Category.SYNCHRONISATION, Category.ALLOCATION, Category.OPTIMIZER_HOST, Category.HOST)
        pairs = {
            "window": (tuple(INFO), expected["window_us"]),
            "compute": (COMPUTING, theirs["compute"]),
            "communication": ((Category.COMMUNICATION, Category.PIPELINE_BUBBLE), theirs["comm_exposed"]),
            "copies": (
                (Category.COPY_H2D, Category.COPY_D2H, Category.COPY_D2D),
                theirs["mem_exposed(copy+memset)"],
            ),
            "waiting for data": ((Category.DATA_WAIT,), theirs["idle_host_dataloader"]),
            "after the launch": (
                (Category.LAUNCH_LATENCY, Category.DISPATCH, Category.QUEUED),
                theirs["idle_after_launch(launch latency+queue)"],
            ),
            "unknown": ((Category.UNKNOWN,), theirs["idle_unknown(no launch record)"]),
            "host": (host, sum(theirs[f"idle_host_{what}"] for what in ("sync", "optimizer", "other"))),
        }
        differences = {
            what: sum(times[c] for c in categories) - round(reference_us * 1000)
            for what, (categories, reference_us) in pairs.items()
        }
        assert {what: ns for what, ns in differences.items() if abs(ns) > FLOAT_NS} == {}
        assert times[Category.SYNCHRONISATION] >= round(theirs["idle_host_sync"] * 1000) - FLOAT_NS
        assert times[Category.OPTIMIZER_HOST] >= round(theirs["idle_host_optimizer"] * 1000) - FLOAT_NS

    def test_no_real_capture_is_refused_for_launches_of_earlier_steps(self, name: str) -> None:
        """Four of them begin with device work that was launched before the profiler listened: not the steps'."""
        breakdown = analysed(name)
        assert breakdown.quality.problems == ()
        assert {f.rule for f in diagnose(Evidence(situation=situation(breakdown, device_kind="cuda")))} != {
            "bad_capture"
        }


@needs_traces
@pytest.mark.parametrize("name", MEASURED_WITH_HTA)
class TestAgainstHta:
    def test_without_rounding_it_agrees_on_its_own_window(self, name: str) -> None:
        """The window reaches from the first to the last device operation, without what the last step launched.

        It counts `cuda_sync` rows as busy, as far as no other operation runs (5 us of the trace that has some).
        """
        expected = json.loads(expected_file(name).read_text())
        (theirs,) = expected["hta_no_ns_rounding"]["results"]["temporal"]
        window_ns, idle_ns, compute_ns = hta_temporal(link(read_trace(trace_file(name))))
        synchronising_ns = 5000 if name == "hta_cuda_event_sync_a100" else 0
        assert window_ns == pytest.approx(theirs["kernel_time(us)"] * 1000, abs=FLOAT_NS)
        assert compute_ns == pytest.approx(theirs["compute_time(us)"] * 1000, abs=FLOAT_NS)
        assert idle_ns - synchronising_ns == pytest.approx(theirs["idle_time(us)"] * 1000, abs=FLOAT_NS)


@needs_traces
class TestKnownTraces:
    """Facts that these captures are known to show."""

    @pytest.mark.parametrize(
        ("name", "rule"),
        [
            ("h200_resnet18_input_bound_w0", "input_bound"),
            ("kineto_resnet50_v100_workers0", "input_bound"),
            ("h200_swin_t_launch_bound", "launch_bound"),
            ("hta_ddp_a100_rank0of2_nccl_args", "launch_bound"),
        ],
    )
    def test_the_first_finding_is_the_known_bottleneck(self, name: str, rule: str) -> None:
        breakdown = analysed(name)
        assert diagnose(Evidence(situation=situation(breakdown, device_kind="cuda")))[0].rule == rule

    def test_a_launch_bound_step_is_rescaled_to_its_unprofiled_time(self) -> None:
        """The profiler took 35 ms for a step of 20.2 ms; its kernels took what they take without it."""
        unprofiled = round(
            json.loads(expected_file("h200_swin_t_launch_bound").read_text())["unprofiled_step_ms"] * 1e6
        )
        (breakdown,) = analyse(read_trace(trace_file("h200_swin_t_launch_bound")), unprofiled)
        assert sum(breakdown.rescaled.values()) == unprofiled
        for category in COMPUTE:
            assert breakdown.rescaled[category] == pytest.approx(breakdown.categories[category] / 3, abs=1)
        assert breakdown.quality.overhead_ratio == pytest.approx(1.747, abs=0.001)
        assert breakdown.quality.problems == ()

    @pytest.mark.parametrize("name", MEASURED_WITHOUT_PROFILER)
    def test_every_own_capture_is_rescaled_to_its_unprofiled_step(self, name: str) -> None:
        """The device's work keeps its length as long as waits can give what the profiler added."""
        unprofiled = round(json.loads(expected_file(name).read_text())["unprofiled_step_ms"] * 1e6)
        (breakdown,) = analyse(read_trace(trace_file(name)), unprofiled)
        assert sum(breakdown.rescaled.values()) == unprofiled
        assert min(breakdown.rescaled.values()) >= 0
        profiled = {c: breakdown.categories[c] / breakdown.num_steps for c in COMPUTING}
        givers = {*HOST_CATEGORIES, Category.DATA_WAIT, *WAITS_FOR_OTHERS}
        can_give = sum(breakdown.categories[c] for c in givers) / breakdown.num_steps
        if 0 <= breakdown.step_time_ns / breakdown.num_steps - unprofiled <= can_give:
            assert {c: breakdown.rescaled[c] for c in COMPUTING} == pytest.approx(profiled, abs=1)

    def test_hidden_communication_is_reported_beside_the_sum(self) -> None:
        expected = json.loads(expected_file("hta_ddp_a100_rank0of2_nccl_args").read_text())["reference_exact"]
        (breakdown,) = analyse(read_trace(trace_file("hta_ddp_a100_rank0of2_nccl_args")))
        hidden = expected["totals_us"]["comm_overlapped_by_compute"]
        assert breakdown.overlapped["communication"] == round(hidden * 1000)
        assert breakdown.rank == 0
