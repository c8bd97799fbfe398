"""Statistics of gaps, and what stands on both sides of the longest."""

import random

import numpy as np
import pytest
from trace_events import MAIN, OTHER, event, kernel, launched, note, operator, runtime, step, trace_of
from traces import NAMES, needs_traces, trace_file

from steptune.tuner.costs.categories import CATEGORIES
from steptune.tuner.profiling.capture import Capture, link
from steptune.tuner.profiling.device_time import device_time
from steptune.tuner.profiling.kernel_gaps import BUCKETS, gap_stats
from steptune.tuner.profiling.operator_calls import OperatorCalls, operator_calls
from steptune.tuner.profiling.reader import read_trace
from steptune.tuner.profiling.source_lines import SourceLines, is_user_frame, user_line
from steptune.tuner.profiling.trace import Kind, Trace
from steptune.tuner.trace_records import GapStats


def stats_of(trace: Trace, device: int = 0, top: int = 20) -> GapStats:
    capture = link(trace)
    calls = operator_calls(trace, capture.launches, capture.steps.span)
    _, gaps = device_time(capture, device)
    return gap_stats(capture, device, gaps, calls, SourceLines(trace, calls), top)


def two_kernels(first_start: float = 2, first_end: float = 10, second_start: float = 5_010) -> list:
    """A step of 6 ms in which the loader runs between two kernels of different operators."""
    return [
        step(1, 0, 6_000),
        operator("aten::mm", 0, 4),
        *launched("gemm", 1, first_start, first_end, 1),
        note("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 20, 4_900),
        operator("aten::add", 5_000, 5_006),
        *launched("vectorized_elementwise_kernel", 5_002, second_start, 6_000, 2),
    ]


def test_gaps_fall_into_buckets_by_length_and_keep_their_sum(tmp_path):
    """Gaps of 2 us (before the first kernel) and 5 ms (between both)."""
    stats = stats_of(trace_of(tmp_path, two_kernels()))
    assert stats.count == 2
    assert stats.total_ns == 2_000 + 5_000_000
    assert {name: n for name, n in stats.histogram.items() if n} == {"1-10 us": 1, "1-10 ms": 1}
    assert {name: n for name, n in stats.time_ns.items() if n} == {"1-10 us": 2_000, "1-10 ms": 5_000_000}
    assert stats.median_ns == (2_000 + 5_000_000) // 2


@pytest.mark.parametrize(
    ("length_us", "bucket"),
    [(0.999, "<1 us"), (1, "1-10 us"), (9.999, "1-10 us"), (10, "10-100 us"), (1000, "1-10 ms"), (10_000, ">10 ms")],
)
def test_a_bucket_contains_its_lower_edge(tmp_path, length_us, bucket):
    events = [step(1, 0, 100_000), kernel("a", 0, 10), kernel("b", 10 + length_us, 100_000)]
    assert stats_of(trace_of(tmp_path, events)).histogram[bucket] == 1


def test_the_longest_gap_names_cause_kernels_and_operators(tmp_path):
    gap = stats_of(trace_of(tmp_path, two_kernels())).longest[0]
    assert (gap.start_ns, gap.length_ns) == (10_000, 5_000_000)
    assert gap.category == "data_wait"
    assert (gap.kernel_before, gap.kernel_after) == ("gemm", "vectorized_elementwise_kernel")
    assert (gap.operator_before, gap.operator_after) == ("aten::mm", "aten::add")
    assert gap.source == ""


def test_only_the_longest_are_listed_but_all_are_counted(tmp_path):
    events = [step(1, 0, 1_000)]
    for number in range(50):
        events.append(kernel(f"k{number}", 20 * number + number / 10, 20 * number + 15))
    stats = stats_of(trace_of(tmp_path, events), top=3)
    assert len(stats.longest) == 3
    lengths = [gap.length_ns for gap in stats.longest]
    assert lengths == sorted(lengths, reverse=True)
    # The k-th gap before a kernel is 5 + k/10 us; after the last one 1000 - 995 us are left.
    assert lengths[0] == 5_000 + 4_900
    assert stats.count == 50
    assert sum(stats.time_ns.values()) == stats.total_ns


def test_an_external_id_names_the_operator_of_a_launch_outside_operators(tmp_path):
    events = [
        step(1, 0, 100),
        event("cpu_op", "aten::mm", 1, 5, **{"External id": 77}),
        runtime("cudaLaunchKernel", 10, 11, 5),
        event("kernel", "gemm", 40, 100, correlation=5, device=0, stream=7, **{"External id": 77}),
    ]
    assert stats_of(trace_of(tmp_path, events)).longest[0].operator_after == "aten::mm"


def test_python_functions_give_the_line_of_the_user_on_the_launching_thread(tmp_path):
    events = [
        *two_kernels(),
        event("python_function", "train.py(12): main", 0, 6_000),
        event("python_function", "train.py(54): step", 4_950, 5_990),
        event("python_function", "train.py(60): done_before", 4_960, 4_980),
        event("python_function", "torch/nn/modules/module.py(1511): _call_impl", 4_990, 5_980),
        event("python_function", "<built-in method add>", 4_995, 5_970),
        event("python_function", "other.py(1): elsewhere", 4_990, 5_980, OTHER),
    ]
    assert stats_of(trace_of(tmp_path, events)).longest[0].source == "train.py(54): step"


def test_old_stacks_are_found_on_the_operator_or_around_it(tmp_path):
    stack = "/usr/lib/python3.8/site-packages/torch/nn/functional.py(1): relu;model.py(7): forward;train.py(3): main"
    events = [
        step(1, 0, 200),
        event("cpu_op", "aten::relu", 0, 50, **{"Call stack": stack}),
        event("cpu_op", "aten::clamp_min", 5, 40, **{"External id": 3}),
        *launched("k", 10, 100, 200, 1),
    ]
    gap = stats_of(trace_of(tmp_path, events)).longest[0]
    assert (gap.operator_after, gap.source) == ("aten::clamp_min", "model.py(7): forward")


@pytest.mark.parametrize(
    ("frame", "own"),
    [
        ("train.py(54): main", True),
        ("/home/me/project/model.py(3): forward", True),
        ("C:\\me\\train.py(3): <module>", True),
        ("torch/nn/modules/module.py(1511): _call_impl", False),
        ("/opt/conda/lib/python3.11/threading.py(12): run", False),
        ("/venv/lib/python3.11/site-packages/timm/layers.py(2): forward", False),
        ("<built-in method step>", False),
        ("nn.Module: ResNet_0", False),
        ("", False),
    ],
)
def test_frames_of_libraries_are_not_the_users(frame, own):
    assert is_user_frame(frame) is own


def test_a_stack_of_libraries_only_names_no_line():
    assert user_line("torch/optim/sgd.py(3): step;<built-in method>") == ""


def slow_launcher(capture: Capture, row: int) -> int:
    """Innermost operator around the launch call, one by one; shorter ones are inside longer ones."""
    host, launches = capture.trace.host, capture.launches
    time, thread = launches.start[row], launches.thread[row]
    around = [
        r
        for r in range(len(host))
        if host.kind[r] == Kind.OPERATOR and host.thread[r] == thread and host.start[r] <= time < host.end[r]
    ]
    return max(around, key=lambda r: (host.start[r], -host.end[r])) if launches.row[row] >= 0 and around else -1


def nested_operators(generator: random.Random, low: int, high: int, thread: int, depth: int) -> list:
    """Random operators inside [low, high), properly nested, and launches among them."""
    events, time = [], low
    while depth and time + 2 < high:
        start = generator.randint(time, high - 2)
        end = generator.randint(start + 1, high)
        events.append(operator(f"aten::op{generator.randint(0, 3)}", start, end, thread))
        events += nested_operators(generator, start, end, thread, depth - 1)
        time = end
    return events


@pytest.mark.parametrize("seed", range(10))
def test_launching_operators_and_own_times_agree_with_a_slow_search(tmp_path, seed):
    generator = random.Random(seed)
    events = [step(1, 0, 400)]
    for thread in (MAIN, OTHER):
        events += nested_operators(generator, 0, 300, thread, 3)
    for correlation in range(1, 40):
        call = generator.randint(0, 310)
        begin = call + generator.randint(1, 30)
        events += launched(f"k{correlation}", call, begin, begin + 2, correlation, generator.choice((MAIN, OTHER)))
    generator.shuffle(events)
    trace = trace_of(tmp_path, events)
    capture = link(trace)
    span = (50_000, 250_000)
    calls = operator_calls(trace, capture.launches, span)
    names = [trace.host.name[r] if r >= 0 else -1 for r in calls.launched_by.tolist()]
    slow = [slow_launcher(capture, row) for row in range(len(trace.work))]
    assert names == [trace.host.name[r] if r >= 0 else -1 for r in slow]
    assert int(calls.self_ns.sum()) == slow_busy_time(trace, span)
    assert_parents_are_around(trace, calls)


def slow_busy_time(trace: Trace, span: tuple[int, int]) -> int:
    """Time in which a thread runs some operator, added over threads: own times must share exactly that."""
    host, total = trace.host, 0
    for thread in set(host.thread.tolist()):
        rows = np.flatnonzero((host.kind == Kind.OPERATOR) & (host.thread == thread))
        low, high = span
        busy = np.zeros((high - low) // 1000, dtype=bool)
        for row in rows.tolist():
            busy[max(0, host.start[row] - low) // 1000 : max(0, host.end[row] - low) // 1000] = True
        total += int(busy.sum()) * 1000
    return total


def assert_parents_are_around(trace: Trace, calls: OperatorCalls) -> None:
    host = trace.host
    for row in np.flatnonzero(calls.parent >= 0).tolist():
        outer = calls.parent[row]
        assert host.thread[outer] == host.thread[row]
        assert host.start[outer] <= host.start[row]
        assert host.end[row] <= host.end[outer]


@needs_traces
@pytest.mark.parametrize("name", NAMES)
def test_real_gaps_add_up_to_the_idle_categories(name):
    trace = read_trace(trace_file(name))
    capture = link(trace)
    for device in capture.device_numbers:
        segments, gaps = device_time(capture, device)
        stats = stats_of(trace, device)
        low, high = capture.steps.span
        busy = sum(
            int(e - s)
            for s, e, c in zip(segments.start, segments.end, segments.category, strict=True)
            if CATEGORIES[c].group not in ("gaps", "unknown") and CATEGORIES[c].category not in idle_inputs()
        )
        assert stats.total_ns == high - low - busy
        assert sum(stats.histogram.values()) == stats.count
        assert tuple(stats.histogram) == BUCKETS
        assert len(gaps.start) == stats.count


def idle_inputs() -> tuple[str, ...]:
    return ("data_wait", "epoch_restart")


@needs_traces
def test_the_input_bound_trace_waits_longest_for_data():
    gaps = stats_of(read_trace(trace_file("h200_resnet18_input_bound_w0"))).longest
    assert [gap.category for gap in gaps[:4]] == ["data_wait"] * 4
    assert {gap.operator_after for gap in gaps[:4]} == {"aten::copy_"}


@needs_traces
def test_old_traces_name_the_source_of_the_wait():
    gap = stats_of(read_trace(trace_file("kineto_resnet50_v100_workers0"))).longest[0]
    assert gap.source.startswith("resnet50_profiler_api.py(")
