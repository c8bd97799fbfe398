"""Floors, utilisation and peaks, on traces with known answers."""

import io
import json
from pathlib import Path

import pytest
from analysed import make_analysis
from rich.console import Console
from trace_events import event, kernel, launched, operator, runtime, step, trace_of

from steptune.dashboards.roofline import get_roofline_info, get_utilisation
from steptune.dashboards.trace_info import get_trace_headline
from steptune.dashboards.trace_page import render_trace_page
from steptune.service.cli.trace_summary import print_analysis
from steptune.tuner.profiling.analysis import analyse_rank, analyse_trace
from steptune.tuner.profiling.argument_shapes import parse_arguments
from steptune.tuner.profiling.operator_work import GRADIENT, WorkModel
from steptune.tuner.profiling.peaks import PEAKS, peak_of
from steptune.tuner.profiling.work import Work
from steptune.tuner.trace_records import RankAnalysis

H100 = {"id": 0, "name": "NVIDIA H100 80GB HBM3", "computeMajor": 9, "computeMinor": 0}
CAPTURES = Path(__file__).parents[1] / "captures"


def shaped(name: str, start: float, end: float, dims: list, types: list, values: list | None = None) -> dict:
    args = {"Input Dims": dims, "Input type": types} | ({"Concrete Inputs": values} if values else {})
    return event("cpu_op", name, start, end, **args)


def analysed(folder: Path, events: list, device: dict = H100) -> RankAnalysis:
    return analyse_trace(trace_of(folder, events, deviceProperties=[device]), "trace.json")[0]


def matmul(start: float, size: int, dtype: str, name: str, correlation: int, at: float, length: float) -> list:
    """A square matmul with its kernel."""
    dims = [[size, size], [size, size]]
    return [
        shaped("aten::mm", start, start + 10, dims, [dtype, dtype]),
        *launched(name, start + 2, at, at + length, correlation),
    ]


def work(name: str, dims: list, types: list, values: list | None = None, **options) -> Work:
    text = f"{json.dumps(dims)}|{json.dumps(types)}" + (f"|{json.dumps(values)}" if values else "")
    arguments = parse_arguments(text.encode())
    return WorkModel([(name, arguments)], options.pop("parameters", None)).work(name, arguments, **options)


def test_a_matmul_has_its_floor_and_the_step_its_utilisation(tmp_path):
    """2 · 4096³ FLOP at 989.4 TFLOP/s of BF16 are 138.9 us, of 500 us that the kernel takes and 1000 us of the step."""
    found = analysed(
        tmp_path,
        [step(1, 0, 1000), *matmul(10, 4096, "c10::BFloat16", "nvjet_sm90_tst_128x256", 1, 100, 500)],
    ).roofline
    [row] = found.operators
    assert (row.name, row.limit, row.count, row.time_ns) == ("aten::mm", "compute", 1, 500_000)
    assert row.floor_ns == pytest.approx(2 * 4096**3 / 989.4e12 * 1e9, rel=1e-4)
    assert found.kernels[0].floor_ns == row.floor_ns
    assert row.above_ns == 500_000 - row.floor_ns
    assert found.step_flops == 2 * 4096**3
    assert found.mfu == pytest.approx(2 * 4096**3 / 989.4e12 / 1e-3)
    assert found.known_share == 1.0
    assert get_utilisation([found]) == "MFU 14 %: 137 GFLOP of matmuls, convolutions and attention per step"


@pytest.mark.parametrize(
    ("kernel_name", "rate"),
    [("sm80_xmma_gemm_f32f32_tf32f32_f32_tn", 494.7e12), ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_ffma", 66.9e12)],
)
def test_of_fp32_the_kernel_says_what_multiplied(tmp_path, kernel_name, rate):
    found = analysed(tmp_path, [step(1, 0, 6000), *matmul(10, 4096, "float", kernel_name, 1, 100, 5000)]).roofline
    assert found.mfu == pytest.approx(2 * 4096**3 / rate / 6e-3)


def test_unknown_arithmetic_has_no_utilisation(tmp_path):
    found = analysed(tmp_path, [step(1, 0, 6000), *matmul(10, 4096, "float", "gemm", 1, 100, 5000)]).roofline
    assert (found.mfu, found.step_flops) == (None, 2 * 4096**3)
    # Its bytes have a floor all the same: three matrices of 64 MiB.
    assert found.operators[0].floor_ns == pytest.approx(3 * 4096**2 * 4 / 3350e9 * 1e9, rel=1e-4)


def test_most_worth_comes_first(tmp_path):
    """Both take long; the one that its bytes explain is not worth looking at."""
    big = [[1 << 28], [1 << 28]]
    events = [
        step(1, 0, 5000),
        shaped("aten::mul", 10, 20, big, ["float", "float"]),
        *launched("vectorized_elementwise_kernel", 12, 100, 1100, 1),
        *matmul(30, 1024, "c10::Half", "cutlass_80_tensorop_h16816gemm", 2, 1200, 900),
    ]
    found = analysed(tmp_path, events).roofline
    assert [(row.name, row.limit) for row in found.operators] == [("aten::mm", "compute"), ("aten::mul", "memory")]
    assert found.operators[1].floor_ns == pytest.approx(3 * 4 * (1 << 28) / 3350e9 * 1e9, rel=1e-4)


def test_without_shapes_nothing_is_stated(tmp_path):
    analysis = analysed(tmp_path, [step(1, 0, 100), operator("aten::mm", 0, 10), *launched("gemm", 5, 30, 60, 1)])
    found = analysis.roofline
    assert (found.step_flops, found.mfu, found.operators, found.kernels) == (None, None, (), ())
    assert "not recorded" in found.silent
    assert get_roofline_info(found, analysis.breakdowns, 5).note.startswith("No roofline is available: argument shapes")
    assert get_trace_headline(make_analysis(analysis)).utilisation == ""


def test_where_matmuls_have_no_count_the_step_has_none(tmp_path):
    events = [
        step(1, 0, 1000),
        *matmul(10, 256, "float", "sgemm", 1, 100, 100),
        operator("my::matmul", 40, 50),
        *launched("ampere_sgemm_128x64_tn", 42, 300, 400, 2),
    ]
    found = analysed(tmp_path, events).roofline
    assert (found.step_flops, found.mfu) == (None, None)
    assert found.silent == "the FLOP count is unknown for 50% of the time of matmuls and attention"


def test_an_unknown_device_stays_silent(tmp_path):
    device = H100 | {"name": "NVIDIA Graphics Device"}
    analysis = analysed(tmp_path, [step(1, 0, 1000), *matmul(10, 256, "float", "sgemm", 1, 100, 100)], device)
    found = analysis.roofline
    assert (found.peak_known, found.mfu, found.operators) == (False, None, ())
    assert "peaks of NVIDIA Graphics Device are unknown" in get_roofline_info(found, analysis.breakdowns, 5).note


def test_a_floor_never_exceeds_the_time_of_what_ran(tmp_path):
    """A kernel faster than its floor (a cache, other shapes) is not worth a negative time."""
    found = analysed(tmp_path, [step(1, 0, 1000), *matmul(10, 4096, "c10::Half", "hgemm", 1, 100, 10)]).roofline
    assert (found.operators[0].floor_ns, found.operators[0].above_ns) == (10_000, 0)


def test_recomputation_does_not_count(tmp_path):
    whole = [
        step(1, 0, 1000),
        *matmul(10, 512, "c10::Half", "hgemm", 1, 100, 100),
        event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 300, 400),
        event(
            "cpu_op",
            "aten::mm",
            310,
            330,
            **{"Sequence number": 5, "Fwd thread id": 0},
            **{"Input Dims": [[512, 512], [512, 512]], "Input type": ["c10::Half", "c10::Half"]},
        ),
        *launched("hgemm", 312, 400, 500, 2),
    ]
    found = analysed(tmp_path, whole).roofline
    assert found.step_flops == 2 * 512**3
    assert found.operators[0].count == 2


def bound_by_kernels(number: int) -> list:
    """A step of 1000 us: two matmuls of 450 us on the device, for which the host waits."""
    at = 1000 * number
    return [
        step(number, at, at + 1000),
        *matmul(at + 2, 4096, "c10::BFloat16", "nvjet_slow", 10 * number + 1, at + 20, 450),
        *matmul(at + 20, 4096, "c10::BFloat16", "nvjet_other", 10 * number + 2, at + 471, 450),
        runtime("cudaDeviceSynchronize", at + 40, at + 930),
    ]


def test_a_kernel_at_its_floor_is_replayed(tmp_path):
    """138.9 us instead of 450 save 31 % of the step each; the host goes on sooner."""
    analysis = analysed(tmp_path, [found for number in range(4) for found in bound_by_kernels(number)])
    first, second = analysis.roofline.kernels
    assert first.saved_share == pytest.approx(0.311, abs=0.02)
    # One is simulated, which is what costs time.
    assert second.saved_share is None
    [what_if] = [one for one in analysis.what_ifs if "roofline" in one.scenario]
    assert what_if.replayed
    assert "bound" in what_if.scenario
    assert what_if.step_time_ns == pytest.approx(1_000_000 - 2 * 311_000, rel=0.06)
    [breakdown] = analysis.breakdowns
    assert (breakdown.mfu, breakdown.step_flops) == (analysis.roofline.mfu, 2 * 2 * 4096**3)


def test_real_captures_stay_above_their_floors():
    """FP32 on an H100 reaches 25 to 75 % of its peak; the optimizer 60 % of the bandwidth."""
    found = analyse_rank(CAPTURES / "h100_checkpointed.json.gz").roofline
    assert found.step_flops == 12 * 6 * 2 * 512 * 1024 * 4096 / 4
    assert 0.1 < found.mfu < 0.2
    reached = {row.name: row.floor_ns / row.time_ns for row in found.operators}
    assert all(share < 0.95 for share in reached.values())
    assert 0.4 < reached["aten::_fused_adamw_"] < 0.95


# --- work of operators ------------------------------------------------------------------------------

HALF = ["c10::Half"]


@pytest.mark.parametrize(
    ("name", "dims", "flops", "least", "elements"),
    [
        # 2 batches, 3 heads, 16 queries, 32 keys, 8 channels; forward 2 and backward 5 matmuls.
        ("_scaled_dot_product_cudnn_attention", [[2, 3, 16, 8], [2, 3, 32, 8], [2, 3, 32, 8]], 4, 2, 2 * 3 * 8 * 96),
        ("_flash_attention_forward", [[2, 16, 3, 8], [2, 32, 3, 8], [2, 32, 3, 8]], 4, 2, 2 * 3 * 8 * 96),
        ("_efficient_attention_forward", [[2, 16, 3, 8], [2, 32, 3, 8], [2, 32, 3, 8]], 4, 2, 2 * 3 * 8 * 96),
        (
            "_flash_attention_backward",
            [[2, 16, 3, 8], [2, 16, 3, 8], [2, 32, 3, 8], [2, 32, 3, 8], [2, 16, 3, 8], [2, 3, 16]],
            10,
            5,
            2 * 3 * 8 * (4 * 16 + 4 * 32),
        ),
    ],
)
def test_attention(name, dims, flops, least, elements):
    found = work(f"aten::{name}", dims, HALF * len(dims))
    pairs = 2 * 3 * 16 * 32 * 8
    assert (found.flops, found.needed_flops, found.num_bytes) == (flops * pairs, least * pairs, 2 * elements)


def test_attention_that_is_not_causal_needs_all_of_it():
    dims = [[2, 3, 16, 8]] * 3 + [[], [], [], []]
    types = [*HALF * 3, "Scalar", "Scalar", "", ""]
    values = ["", "", "", "0.", "False", "", ""]
    found = work("aten::_scaled_dot_product_flash_attention", dims, types, values)
    assert found.needed_flops == found.flops


def test_packed_sequences_have_no_count():
    dims = [[1, 64, 3, 8], [1, 64, 3, 8], [1, 64, 3, 8], [5], [5]]
    assert work("aten::_flash_attention_forward", dims, [*HALF * 3, "int", "int"]).flops is None


@pytest.mark.parametrize(
    ("a", "b", "flops"),
    [
        ([64, 32], [4, 32, 16], 2 * 64 * 32 * 16),
        ([32, 64], [64, 16], 2 * 32 * 64 * 16),
        ([4, 8, 32], [4, 32, 16], 4 * 2 * 8 * 32 * 16),
    ],
)
def test_grouped_matmuls_cost_what_all_tokens_cost(a, b, flops):
    assert work("aten::_grouped_mm", [a, b, [4]], [*HALF * 2, "int"]).flops == flops


@pytest.mark.parametrize(
    ("name", "dims", "types", "values", "num_bytes"),
    [
        ("native_layer_norm", [[8, 32], [], [32], [32], []], ["float", "", "float", "float", "Scalar"], None, 4 * 576),
        ("_softmax", [[8, 32], [], []], ["c10::Half", "Scalar", "Scalar"], None, 2 * 512),
        ("_softmax_backward_data", [[8, 32], [8, 32], [], []], [*HALF * 2, "Scalar", "Scalar"], None, 2 * 768),
        # 10 rows of 16 are written; the indices are read.
        ("embedding", [[100, 16], [10], []], ["float", "long int", "Scalar"], None, 80 + 640),
        ("index_select", [[100, 16], [], [10]], ["float", "Scalar", "long int"], ["", "0", ""], 80 + 640),
        ("index_select", [[100, 16], [], [10]], ["float", "Scalar", "long int"], None, None),
        (
            "embedding_dense_backward",
            [[10, 16], [10], [], [], []],
            ["float", "long int", "Scalar", "Scalar", "Scalar"],
            ["", "", "100", "-1", "False"],
            640 + 80 + 6400,
        ),
        # TorchInductor: every argument once; none where it may read a part only.
        ("triton_poi_fused_add_relu_0", [[64, 8], [64, 8], [64, 8], []], [*HALF * 3, "Scalar"], None, 2 * 3 * 512),
        ("triton_red_fused_embedding_0", [[64, 8], [64, 8]], HALF * 2, None, None),
    ],
)
def test_bytes_of_what_computes_little(name, dims, types, values, num_bytes):
    prefix = "" if name.startswith("triton") else "aten::"
    assert work(prefix + name, dims, types, values).num_bytes == num_bytes


def test_a_template_is_the_matmul_that_its_arguments_allow():
    dims = [[16], [8, 32], [32, 16], [8, 16]]
    assert work("triton_tem_fused_addmm_0", dims, HALF * 4).flops == 2 * 8 * 32 * 16
    assert work("triton_tem_fused_0", [[8, 32], [7, 5], [8, 16]], HALF * 3).flops is None


def gradient(*shape: int, dtype: str = "float"):
    return parse_arguments(f'[{json.dumps(shape)}]|["{dtype}"]'.encode())


def test_an_update_reads_and_writes_its_lists_once():
    lists = [[[4, 4], [8]]] * 4 + [[], [[], []]]
    found = work("aten::_fused_adamw_", lists, ["TensorList"] * 6, parameters={gradient(4, 4): 3, gradient(8): 3})
    assert found.num_bytes == 7 * 24 * 4
    copied = work("aten::_foreach_mul_", [[[4, 4], [8]], []], ["TensorList", "Scalar"], parameters={gradient(8): 1})
    assert copied.num_bytes == 2 * 24 * 4
    # Lists of tensors do not tell their type: without gradients it is not known, nor with those of two types.
    assert work("aten::_fused_adamw_", lists, ["TensorList"] * 6).num_bytes is None
    mixed = {gradient(4): 1, gradient(4, dtype="c10::Half"): 1}
    assert work("aten::_fused_adamw_", lists, ["TensorList"] * 6, parameters=mixed).num_bytes is None


def test_long_lists_are_as_large_as_the_gradients():
    """Traces leave out long lists. 5 backward passes of 3 matrices and a vector, in two groups of parameters."""
    parameters = {gradient(4, 4): 15, gradient(8): 5}
    found = work("aten::_fused_adamw_", [[]] * 6, ["TensorList"] * 6, parameters=parameters, calls_per_step=2)
    assert found.num_bytes == 7 * (3 * 16 + 8) // 2 * 4
    assert GRADIENT == "torch::autograd::AccumulateGrad"


# --- peaks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bfloat16", "gb_per_s"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4, 3350),
        ("NVIDIA H100 PCIe", 756.0, 2000),
        ("NVIDIA H200", 989.4, 4800),
        ("NVIDIA A100-SXM4-80GB", 312.0, 2039),
        ("NVIDIA L4", 121.0, 300),
        ("NVIDIA L40S", 362.05, 864),
        ("NVIDIA A10", 125.0, 600),
        ("Tesla V100-SXM2-32GB", None, 900),
        ("Tesla T4", None, 320),
        ("NVIDIA GeForce RTX 4090", 165.2, 1008),
        ("AMD Instinct MI250X", 191.5, 1600),
        ("AMD Instinct MI300X", 1307.4, 5300),
        ("AMD Instinct MI300X OAM", 1307.4, 5300),
        ("NVIDIA B200", 2250.0, 7700),
    ],
)
def test_devices_are_known_by_the_names_of_their_drivers(name, bfloat16, gb_per_s):
    peak = peak_of(name)
    assert peak.flops_per_s.get("bfloat16") == (None if bfloat16 is None else bfloat16 * 1e12)
    assert peak.bytes_per_s == gb_per_s * 1e9


@pytest.mark.parametrize(
    "name",
    [
        "",
        "NVIDIA H100",
        "NVIDIA H200 NVL",
        "NVIDIA A10G",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-PG509-200",
        "NVIDIA L400",
        "AMD Instinct MI250X / MI250",
    ],
)
def test_other_devices_are_not_guessed(name):
    assert peak_of(name) is None


def test_each_device_multiplies_faster_in_fewer_bits():
    for pattern, peak in PEAKS:
        rates = [
            peak.flops_per_s[name] for name in ("float32", "tf32", "float16", "float8") if name in peak.flops_per_s
        ]
        assert rates == sorted(rates), pattern


def test_torch_s_own_table_agrees():
    """Its figures of Hopper and Ada are those with sparsity. They cite the makers' data sheets, but for L4's memory."""
    torch = pytest.importorskip("torch")
    from torch._inductor.analysis.device_info import _device_mapping

    for theirs, ours in (
        ("NVIDIA H100", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA A100", "NVIDIA A100-SXM4-80GB"),
        ("AMD MI300X", "AMD Instinct MI300X"),
        ("AMD MI300A", "AMD Instinct MI300A"),
        ("AMD MI350X", "AMD Instinct MI350X"),
        ("AMD MI210X", "AMD Instinct MI210"),
    ):
        info, peak = _device_mapping[theirs], peak_of(ours)
        sparsity = getattr(info, "tops_sparsity_factor", 2 if theirs == "NVIDIA H100" else 1)
        assert info.tops[torch.float32] == pytest.approx(peak.flops_per_s["float32"] / 1e12, rel=0.01)
        assert info.tops[torch.bfloat16] / sparsity == pytest.approx(peak.flops_per_s["bfloat16"] / 1e12, rel=0.01)
        assert info.dram_bw_gbs == pytest.approx(peak.bytes_per_s / 1e9, rel=0.01)


def test_copies_from_the_host_have_no_floor(tmp_path):
    events = [
        step(1, 0, 1000),
        shaped("aten::copy_", 10, 60, [[1024], [1024], []], ["float", "float", "Scalar"]),
        runtime("cudaMemcpyAsync", 12, 50, 1),
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 20, 50, 0, correlation=1, device=0, stream=7),
        *matmul(100, 256, "float", "sgemm", 2, 200, 100),
        kernel("lonely", 400, 410),
    ]
    found = analysed(tmp_path, events).roofline
    assert [row.name for row in found.operators] == ["aten::mm"]
    assert found.known_share == pytest.approx(100 / 110)


def test_page_and_terminal_show_the_list(tmp_path):
    analysis = analysed(tmp_path, [found for number in range(4) for found in bound_by_kernels(number)])
    whole = make_analysis(analysis)
    page = render_trace_page(whole)
    console = Console(width=160, file=io.StringIO())
    print_analysis(console, whole, top=3)
    for text in (page.replace("\u00a0", " "), console.file.getvalue()):
        assert "MFU 28 %: 275 GFLOP of matmuls, convolutions and attention per step" in text
        assert "Kernels by time above the" in text
        assert "nvjet_other" in text
    assert 'aria-label="Roofline"' in page


def test_a_cpu_has_no_roofline(tmp_path):
    events = [step(1, 0, 100), shaped("aten::mm", 10, 90, [[8, 8], [8, 8]], ["float", "float"])]
    analysis = analyse_trace(trace_of(tmp_path, events), "trace.json")[0]
    assert analysis.roofline.step_flops == 2 * 8**3
    assert get_roofline_info(analysis.roofline, analysis.breakdowns, 5) is None
    assert 'aria-label="Roofline"' not in render_trace_page(make_analysis(analysis))
