"""The contract of every breakdown: exclusive categories that are the step, to the nanosecond.

Against a slow definition of the same (`slow_breakdown`), on generated traces and on real ones; and on
the real ones against what independent analysers say.
"""

import json
import tempfile
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiled import situation
from slow_breakdown import cpu_breakdown, device_breakdown, read_spans
from trace_events import MAIN, OTHER, Event, copy, event, kernel, note, operator, runtime, step, trace_of
from traces import NAMES, expected_file, needs_traces, trace_file

from tuner.profiling.breakdown import analyse
from tuner.profiling.categories import COMPUTE, INFO, Category
from tuner.profiling.diagnosis import diagnose
from tuner.profiling.steps import find_steps
from tuner.profiling.trace import read_trace
from tuner.records import Breakdown

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

FLOAT_NS = 50
"""What adding thousands of gaps in floating-point microseconds may lose."""

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
        else:
            events.append(copy(draw(st.sampled_from(COPIES)), start, end, number))
        if draw(st.integers(0, 4)):
            call = max(0, start - draw(st.integers(0, 40)))
            thread = draw(st.sampled_from((MAIN, OTHER)))
            events.append(runtime("cudaLaunchKernel", call, call + 1, number, thread))
    for start in draw(st.lists(times, max_size=4)):
        events.append(note(draw(st.sampled_from(HOST_NOTES)), start, start + draw(lengths)))
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
        events.append(operator(draw(st.sampled_from(OPERATORS)), start, end))
        events += draw(nested(start + 1, end, depth + 1))
    return events


@st.composite
def cpu_traces(draw) -> list[Event]:
    edges = draw(st.lists(st.integers(0, 120), min_size=2, max_size=4, unique=True).map(sorted))
    events = [step(number, a, b) for number, (a, b) in enumerate(pairwise(edges))]
    for start, end in pairwise(edges):
        events += draw(nested(start + 1, end))
    for start in draw(st.lists(times, max_size=2)):
        events.append(note("gloo:all_reduce", start, start + draw(lengths), OTHER))
    for start in draw(st.lists(times, max_size=2)):
        events.append(operator("aten::mm", start, start + draw(lengths), OTHER))
    return events


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


def nonzero(breakdown: Breakdown) -> dict[str, int]:
    return {name: value for name, value in breakdown.categories.items() if value}


@cache
def analysed(name: str) -> Breakdown:
    """The breakdown of a real trace; each has one device."""
    (breakdown,) = analyse(read_trace(trace_file(name)))
    return breakdown


def slowly(path: Path, breakdown: Breakdown) -> dict[str, int]:
    spans = read_spans(path)
    device = breakdown.device
    totals = cpu_breakdown(spans) if device == "cpu" else device_breakdown(spans, int(device.removeprefix("cuda:")))
    return {name.value: value for name, value in totals.items() if value}


class TestGenerated:
    @given(events=any_trace)
    def test_categories_partition_the_profiled_stretch(self, folder: Path, events: list[Event]) -> None:
        trace = trace_of(folder, events)
        low, high = find_steps(trace).span
        for breakdown in analyse(trace):
            check_partition(breakdown)
            assert breakdown.step_time_ns == high - low

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
        events = [*events, kernel(KERNELS[0], 40, 70, 777)]
        events.append(runtime("cudaLaunchKernel", 40, 41, 777))
        start = data.draw(st.integers(41, 69))
        hidden = copy(COPIES[0], start, data.draw(st.integers(start, 70)))
        before = analyse(trace_of(folder, events))[0].categories
        assert analyse(trace_of(folder, [*events, hidden]))[0].categories == before

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
            kernel("sgemm", 200, 210, 3),
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
        assert breakdown.quality.problems == ("50% of the device work has no recorded launch",)

    def test_a_few_unlinked_operations_are_no_problem(self, tmp_path: Path) -> None:
        assert self.bad_trace(tmp_path, linked=40, unlinked=1).quality.problems == ()

    def test_launches_without_device_work_are_said(self, tmp_path: Path) -> None:
        """A capture whose device buffer overflowed looks idle; it is a bad capture, not an idle device."""
        events = [step(1, 0, 1000), kernel("sgemm", 5, 6, 0)]
        events += [runtime("cudaLaunchKernel", 2 + 9 * number, 3 + 9 * number, number) for number in range(50)]
        (breakdown,) = analyse(trace_of(tmp_path, events))
        assert breakdown.quality.missing_share == pytest.approx(0.98)
        assert breakdown.quality.problems == ("98% of the launches have no recorded device work",)

    def test_a_profiler_that_changed_the_step_is_said(self, tmp_path: Path) -> None:
        events = [step(1, 0, 100), operator("aten::mm", 10, 90)]
        slowed, fair = (analyse(trace_of(tmp_path, events), ns)[0].quality for ns in (25_000, 90_000))
        assert slowed.problems == ("the profiler made the step 4.00 times as long",)
        assert slowed.overhead_ratio == 4.0
        assert fair.problems == ()


@needs_traces
@pytest.mark.parametrize("name", NAMES)
class TestReal:
    def test_categories_partition_and_the_slow_definition_agrees(self, name: str) -> None:
        breakdown = analysed(name)
        check_partition(breakdown)
        low, high = find_steps(read_trace(trace_file(name))).span
        assert breakdown.step_time_ns == high - low
        assert nonzero(breakdown) == slowly(trace_file(name), breakdown)

    def test_an_independent_breakdown_agrees_but_for_the_window(self, name: str) -> None:
        """It ends its window with the last step's CPU part, ours waits for the device: no class of time
        may differ by more than the windows do, and where they are one, nothing differs (but for its floats).
        """
        expected = json.loads(expected_file(name).read_text())["reference_exact"]
        breakdown = analysed(name)
        assert breakdown.num_steps == expected["n_steps"]
        times, theirs = breakdown.categories, expected["exclusive_us"]
        slack = abs(breakdown.step_time_ns - round(expected["window_us"] * 1000)) + FLOAT_NS
        pairs = {
            "compute": (sum(times[c] for c in (*COMPUTE, Category.OPTIMIZER)), theirs["compute"]),
            "communication": (times[Category.COMMUNICATION], theirs["comm_exposed"]),
            "copies": (
                sum(times[c] for c in (Category.COPY_H2D, Category.COPY_D2H, Category.COPY_D2D)),
                theirs["mem_exposed(copy+memset)"],
            ),
            "waiting for data": (times[Category.DATA_WAIT], theirs["idle_host_dataloader"]),
            "after the launch": (
                times[Category.LAUNCH_LATENCY] + times[Category.QUEUED],
                theirs["idle_after_launch(launch latency+queue)"],
            ),
        }
        for what, (ours, reference_us) in pairs.items():
            assert abs(ours - round(reference_us * 1000)) <= slack, what

    def test_a_bad_capture_gives_no_verdict(self, name: str) -> None:
        """Where launches and device work cannot be matched, the findings say only that."""
        breakdown = analysed(name)
        findings = diagnose(situation(breakdown, device_kind="cuda"))
        bad = name in ("h200_resnet50_cuda_graph", "h200_vit_b_ddp2_split0_rank0", "h200_vit_b_ddp2_split0_rank1")
        assert ({f.rule for f in findings} == {"bad_capture"}) == bad
        assert bool(breakdown.quality.problems) == bad


@needs_traces
class TestKnownTraces:
    """What these captures are known to show."""

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
        assert diagnose(situation(breakdown, device_kind="cuda"))[0].rule == rule

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

    def test_hidden_communication_is_reported_beside_the_sum(self) -> None:
        expected = json.loads(expected_file("hta_ddp_a100_rank0of2_nccl_args").read_text())["reference_exact"]
        (breakdown,) = analyse(read_trace(trace_file("hta_ddp_a100_rank0of2_nccl_args")))
        hidden = expected["totals_us"]["comm_overlapped_by_compute"]
        assert breakdown.overlapped["communication"] == round(hidden * 1000)
        assert breakdown.rank == 0
