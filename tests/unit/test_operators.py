"""Operators: their time, their FLOP and bytes from recorded shapes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_events import OTHER, copy, event, kernel, launched, operator, runtime, step, trace_of
from traces import NAMES, needs_traces, trace_file

from steptune.tuner.profiling.argument_shapes import Arguments, item_bytes, parse_arguments
from steptune.tuner.profiling.call_work import group_calls
from steptune.tuner.profiling.capture import link
from steptune.tuner.profiling.operator_calls import operator_calls
from steptune.tuner.profiling.operator_work import WorkModel
from steptune.tuner.profiling.operators import operator_stats
from steptune.tuner.profiling.reader import read_trace
from steptune.tuner.profiling.source_lines import SourceLines
from steptune.tuner.profiling.trace import Kind, Trace
from steptune.tuner.profiling.work import Work
from steptune.tuner.trace_records import OperatorStats


def stats_of(trace: Trace, top: int = 1000) -> tuple[OperatorStats, ...]:
    capture = link(trace)
    calls = operator_calls(trace, capture.launches, capture.steps.span)
    return operator_stats(capture, calls, group_calls(capture, calls), SourceLines(trace, calls), top)


def shaped(name: str, start: float, end: float, dims: list, types: list | None = None) -> dict:
    args = {"Input Dims": dims} | ({} if types is None else {"Input type": types})
    return event("cpu_op", name, start, end, **args)


def arguments(dims: list, types: list) -> Arguments:
    return parse_arguments(f"{json.dumps(dims)}|{json.dumps(types)}".encode())


def work(name: str, dims: list, types: list | None = None, *others: tuple[str, list]) -> Work:
    """Work of one operator, float32 unless told, with others of the same trace."""
    known = [(name, arguments(dims, types if types is not None else ["float"] * len(dims)))]
    known += [(other, arguments(shape, ["float"] * len(shape))) for other, shape in others]
    return WorkModel(known).work(*known[0])


def test_kernels_count_for_the_innermost_operator(tmp_path):
    """`linear` (0 to 20 us) contains `addmm` (2 to 18 us), which launches a kernel of 30 us and a copy of 5 us."""
    events = [
        step(1, 0, 100),
        shaped("aten::linear", 0, 20, [[4, 8], [16, 8]], ["float", "float"]),
        shaped("aten::addmm", 2, 18, [[16], [4, 8], [8, 16]], ["float", "float", "float"]),
        *launched("gemm", 5, 30, 60, 1),
        runtime("cudaMemcpyAsync", 10, 11, 2),
        copy("Memcpy DtoD (Device -> Device)", 60, 65, 2),
    ]
    addmm, linear = stats_of(trace_of(tmp_path, events))
    assert (addmm.name, addmm.count, addmm.device_ns, addmm.host_ns) == ("aten::addmm", 1, 35_000, 16_000)
    assert (linear.name, linear.count, linear.device_ns, linear.host_ns) == ("aten::linear", 1, 0, 4_000)
    assert addmm.flops == 2 * 4 * 8 * 16
    assert addmm.flops_per_s == pytest.approx(2 * 4 * 8 * 16 / 35e-6)
    # What `addmm` does is not done by `linear` once more.
    assert (linear.flops, linear.num_bytes, linear.flops_per_s) == (None, None, None)
    assert addmm.shapes == "float[16], float[4, 8], float[8, 16]"


def test_calls_are_apart_by_shape_and_together_over_threads(tmp_path):
    events = [
        step(1, 0, 100),
        shaped("aten::relu", 0, 10, [[8]], ["float"]),
        shaped("aten::relu", 20, 30, [[4]], ["float"]),
        shaped("aten::relu", 40, 45, [[8]], ["float"]) | {"tid": OTHER},
    ]
    found = {stats.shapes: (stats.count, stats.host_ns) for stats in stats_of(trace_of(tmp_path, events))}
    assert found == {"float[8]": (2, 15_000), "float[4]": (1, 10_000)}


def test_on_a_cpu_own_time_is_device_time(tmp_path):
    events = [
        step(1, 0, 100),
        shaped("aten::addmm", 0, 50, [[16], [4, 8], [8, 16]], ["float", "float", "float"]),
        # The copy of the bias moves bytes, but the product is addmm's own all the same.
        shaped("aten::copy_", 10, 20, [[4, 16], [4, 16]], ["float", "float"]),
    ]
    addmm, copied = stats_of(trace_of(tmp_path, events))
    assert (addmm.device_ns, addmm.host_ns, addmm.flops) == (40_000, 40_000, 1024)
    assert copied.num_bytes == 2 * 4 * 16 * 4
    assert copied.bytes_per_s == pytest.approx(512 / 10e-6)


def test_bytes_that_an_operator_inside_moves_count_once(tmp_path):
    events = [
        step(1, 0, 100),
        shaped("aten::mul", 0, 50, [[4, 16], [4, 16]], ["float", "float"]),
        shaped("aten::copy_", 10, 20, [[4, 16], [4, 16]], ["float", "float"]),
    ]
    assert [stats.num_bytes for stats in stats_of(trace_of(tmp_path, events))] == [None, 512]


def test_calls_whose_kernels_are_not_there_have_no_rate(tmp_path):
    """One of two matmuls has its kernel: FLOP are those of one, the time is that of one."""
    mm = [[32, 32], [32, 32]], ["float", "float"]
    events = [
        step(1, 0, 100),
        shaped("aten::mm", 0, 10, *mm),
        *launched("gemm", 5, 30, 60, 1),
        shaped("aten::mm", 12, 20, *mm),
    ]
    (stats,) = stats_of(trace_of(tmp_path, events))
    assert (stats.count, stats.flops) == (2, 2 * 32**3)


def test_operators_outside_the_steps_do_not_count(tmp_path):
    events = [operator("aten::before", -20, -10), step(1, 0, 100), operator("aten::inside", 0, 10), kernel("k", 1, 90)]
    assert [stats.name for stats in stats_of(trace_of(tmp_path, events))] == ["aten::inside"]


def test_the_top_holds_the_most_of_device_and_of_host_time(tmp_path):
    events = [step(1, 0, 1000)]
    for number in range(10):
        low = number * 50
        # Later ones take longer on the host and shorter on the device.
        events += [
            operator(f"aten::op{number}", low, low + 10 + number),
            *launched("k", low + 1, 500 + low, 520 + low - number, number + 1),
        ]
    assert [stats.name for stats in stats_of(trace_of(tmp_path, events), top=1)] == ["aten::op0", "aten::op9"]


# --- FLOP and bytes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dims", "flops", "elements"),
    [
        ("aten::mm", [[3, 4], [4, 5]], 2 * 3 * 4 * 5, 12 + 20 + 15),
        ("aten::addmm", [[5], [3, 4], [4, 5]], 2 * 3 * 4 * 5, 5 + 12 + 20 + 15),
        ("aten::bmm", [[2, 3, 4], [2, 4, 5]], 2 * 2 * 3 * 4 * 5, 24 + 40 + 30),
        ("aten::baddbmm", [[2, 3, 5], [2, 3, 4], [2, 4, 5]], 2 * 2 * 3 * 4 * 5, 30 + 24 + 40 + 30),
        ("aten::linear", [[7, 3, 4], [5, 4], [5]], 2 * 7 * 3 * 4 * 5, 84 + 20 + 5 + 105),
    ],
)
def test_products(name, dims, flops, elements):
    assert work(name, dims) == Work(flops, 4 * elements)


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        ("aten::mm", [[3, 4], [5, 6]]),
        ("aten::mm", [[3, 4]]),
        ("aten::mm", []),
        ("aten::bmm", [[2, 3, 4], [3, 4, 5]]),
        ("aten::linear", [[3, 4], [5, 6]]),
        ("aten::convolution", [[1, 3, 8, 8], [4, 3, 3, 3]]),
        ("aten::topk", [[3, 4]]),
    ],
)
def test_shapes_that_do_not_say_give_no_flop(name, dims):
    assert work(name, dims).flops is None


BACKWARD = ("aten::convolution_backward", [[2, 8, 5, 5], [2, 6, 10, 10], [8, 3, 3, 3]])
FORWARD = "aten::convolution", [[2, 6, 10, 10], [8, 3, 3, 3]]
CONVOLUTION_FLOPS = 2 * (2 * 8 * 5 * 5) * (3 * 3 * 3)
"""For every output element a multiplication and addition by channel of its group and place in the window."""


def test_a_convolution_costs_its_output_times_its_window():
    """A grouped convolution with stride 2, whose output only the backward pass tells."""
    elements = 2 * 6 * 10 * 10 + 8 * 3 * 3 * 3 + 2 * 8 * 5 * 5
    assert work(*FORWARD, None, BACKWARD) == Work(CONVOLUTION_FLOPS, 4 * elements)


def test_the_backward_pass_of_a_convolution_costs_two_of_the_forward_pass():
    assert work(*BACKWARD).flops == 2 * CONVOLUTION_FLOPS


def test_two_strides_for_the_same_shapes_leave_the_output_unknown():
    other = ("aten::convolution_backward", [[2, 8, 10, 10], [2, 6, 10, 10], [8, 3, 3, 3]])
    assert work(*FORWARD, None, BACKWARD, other) == Work()


def test_old_backward_operators_share_the_work_of_the_new_one():
    """Before 2022 input, output gradient and weight stood in another order, and two operators did the work."""
    output, image, weight = BACKWARD[1]
    together = ("aten::cudnn_convolution_backward", [image, output, weight])
    assert work(*together).flops == 2 * CONVOLUTION_FLOPS
    parts = [
        work("aten::cudnn_convolution_backward_input", [[], output, weight], ["GenericList", "float", "float"]),
        work("aten::cudnn_convolution_backward_weight", [[], output, image], ["", "float", "float"], together),
    ]
    assert [part.flops for part in parts] == [CONVOLUTION_FLOPS] * 2


@pytest.mark.parametrize(
    ("name", "dims", "types", "num_bytes"),
    [
        ("aten::relu", [[10, 3]], ["float"], 240),
        ("aten::add", [[10, 3], [3], []], ["c10::BFloat16", "c10::BFloat16", "Scalar"], 2 * (30 + 3 + 30)),
        ("aten::add_", [[10, 3], [3], []], ["float", "float", "Scalar"], 4 * (30 + 3 + 30)),
        ("aten::mul", [[4, 1], [1, 5]], ["double", "double"], 8 * (4 + 5 + 20)),
        ("aten::copy_", [[10], [10], []], ["c10::Half", "float", "Scalar"], 20 + 40),
        ("aten::fill_", [[10], []], ["int", "Scalar"], 40),
        ("aten::mul", [[4, 3], [1, 5]], ["float", "float"], None),
        ("aten::relu", [[10]], ["a new type"], None),
        ("aten::relu", [[10]], [], None),
        ("aten::sum", [[10]], ["float"], 40),
        ("aten::sort", [[10]], ["float"], None),
    ],
)
def test_elementwise_operators_read_inputs_and_write_the_output_once(name, dims, types, num_bytes):
    assert work(name, dims, types) == Work(None, num_bytes)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("float", 4),
        ("c10::BFloat16", 2),
        ("BFloat16", 2),
        ("long int", 8),
        ("unsigned char", 1),
        ("Float", 4),
        ("c10::complex<float>", 8),
        ("Scalar", 0),
        ("", 0),
        ("TensorList", 0),
        ("Float8_e4m3fn", 1),
    ],
)
def test_sizes_of_types_by_all_their_names(name, size):
    assert item_bytes(name) == size


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"|",
        b"[]|[]",
        b"[[1, 2",
        b'{"a": 1}|[]',
        b'"text"|"text"',
        b"[[1, -1]]|[]",
        b"[[1.5]]|[]",
        b"\xff|\xff",
        b'[[[2, 3], [4]], []]|["TensorList", "Scalar"]',
        b"[null, [2]]|[null]",
        b"[[true, 2]]|[1]",
        b"[[2]]|[[[]]]",
    ],
)
def test_odd_texts_are_not_understood_but_do_no_harm(text):
    parsed = parse_arguments(text)
    for name in ("aten::mm", "aten::linear", "aten::convolution_backward", "aten::add", "aten::copy_", "aten::fill_"):
        assert WorkModel([(name, parsed)]).work(name, parsed).flops is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=12,
)


@given(
    json_values, json_values, st.sampled_from(["mm", "addmm", "bmm", "linear", "convolution_backward", "add", "copy_"])
)
def test_no_recorded_text_breaks_the_analysis(dims, types, name):
    parsed = parse_arguments(f"{json.dumps(dims)}|{json.dumps(types)}".encode())
    found = WorkModel([(name, parsed)]).work(name, parsed)
    assert found.flops is None or found.flops >= 0
    assert found.num_bytes is None or found.num_bytes >= 0


def test_flop_of_a_network_agree_with_torch(tmp_path):
    """Ungrouped only: torch's counter forgets the groups in the gradient of a weight."""
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, stride=2, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 16, 3, dilation=2),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * 4 * 4, 32),
        torch.nn.Linear(32, 4, bias=False),
    )
    images = torch.randn(5, 3, 16, 16, requires_grad=True)

    def run() -> None:
        output = network(images)
        (output @ output.T).sum().backward()
        torch.bmm(torch.randn(2, 3, 4), torch.randn(2, 4, 5))

    with FlopCounterMode(display=False) as counter:
        run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        run()
    profiler.export_chrome_trace(str(tmp_path / "network.json"))
    stats = stats_of(read_trace(tmp_path / "network.json"))
    assert sum(found.flops or 0 for found in stats) == counter.get_total_flops()


# --- real traces ------------------------------------------------------------------------------------


@needs_traces
@pytest.mark.parametrize("name", NAMES)
def test_real_operators_share_the_device_time_that_is_linked(name):
    trace = read_trace(trace_file(name))
    capture = link(trace)
    calls = operator_calls(trace, capture.launches, capture.steps.span)
    stats = operator_stats(capture, calls, group_calls(capture, calls), SourceLines(trace, calls), 100_000)
    work, (low, high) = trace.work, capture.steps.span
    linked = sum(
        end - start
        for start, end, kind, owner in zip(
            work.start.tolist(), work.end.tolist(), work.kind, calls.launched_by.tolist(), strict=True
        )
        if owner >= 0 and kind != Kind.SYNC and end > low and start < high
    )
    assert sum(found.device_ns for found in stats) == linked
    assert sum(found.host_ns for found in stats) <= int(calls.self_ns.sum())


@needs_traces
def test_real_convolutions_achieve_what_a_v100_can():
    """15.7 TFLOP/s of float32 at most; Winograd's transformation saves up to 2.25 times of the direct FLOP."""
    stats = stats_of(read_trace(trace_file("kineto_resnet50_v100_workers0")))
    rates = [s.flops_per_s for s in stats if s.flops_per_s and "convolution" in s.name and s.device_ns > 1_000_000]
    assert len(rates) > 20
    assert max(rates) < 15.7e12 * 2.25
    assert sorted(rates)[len(rates) // 2] > 1e12
    # 12.3 GFLOP of an image's forward and backward pass, 32 images, 6 steps; 1 x 1 products and the first layer apart.
    counted = sum(s.flops for s in stats if s.flops and "conv" in s.name)
    assert counted == pytest.approx(32 * 6 * 3 * 8.2e9, rel=0.15)
