"""The table of kernels and the share of tensor cores."""

import pytest
from trace_events import event, kernel, launched, note, step, trace_of
from traces import NAMES, needs_traces, trace_file

from steptune.tuner.profiling.capture import link
from steptune.tuner.profiling.kernels import kernel_stats, tensor_core_share, uses_tensor_cores
from steptune.tuner.profiling.reader import read_trace
from steptune.tuner.profiling.trace import Kind


@pytest.mark.parametrize(
    "name",
    [
        "volta_h884gemm_128x64_ldg8_nn",
        "volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn",
        "turing_h1688gemm_128x128_nn",
        "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_nn",
        "turing_int8_i8816gemm_int8_128x128_ldg16_mn_align",
        "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x64_32x6_nt_align1>(Params)",
        "sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16_stage4_kernel",
        "sm90_xmma_dgrad_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize256x64x32_warpgroupsize1x1x1",
        "nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN",
        "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>",
        "sm90_fp8_wgmma_kernel",
        "Cijk_Ailk_Bljk_HHS_BH_MT128x128x32_MI32x32x8x1_SN_1LDSB0",
    ],
)
def test_names_of_tensor_core_kernels(name):
    assert uses_tensor_cores(name)


@pytest.mark.parametrize(
    "name",
    [
        "volta_sgemm_64x64_nt",
        "ampere_sgemm_128x64_nn",
        "void implicit_convolve_sgemm<float, float, 1024, 6, 7, 3, 3, 5, 1, false, true, true>(int)",
        "void cutlass::Kernel<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(Params)",
        "volta_scudnn_128x128_stridedB_splitK_small_nn_v1",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float>",
        "void at::native::lgamma_kernel_cuda",
        "sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nhwckrsc_nchw_tilesize128x128x16_kernel",
        "void at::native::vectorized_elementwise_kernel<4, at::native::tensor_apply>",
        "Cijk_Ailk_Bljk_SB_MT64x64x8_SE_K1",
    ],
)
def test_names_that_do_not_say_tensor_cores(name):
    assert not uses_tensor_cores(name)


def test_runs_of_one_kernel_are_added_up(tmp_path):
    """8 + 24 us of one kernel and 10 us of another in a step of 100 us."""
    events = [
        step(1, 0, 100),
        event("kernel", "volta_sgemm_64x64_nn", 0, 8, 1, device=0, stream=7, **{"est. achieved occupancy %": 25}),
        event("kernel", "volta_sgemm_64x64_nn", 10, 34, 1, device=0, stream=7, **{"est. achieved occupancy %": 50}),
        kernel("nvjet_hsh_128x128", 40, 50),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 60, 90, device=0, stream=9),
    ]
    capture = link(trace_of(tmp_path, events))
    first, second = kernel_stats(capture)
    assert (first.name, first.count, first.total_ns, first.mean_ns, first.max_ns) == (
        "volta_sgemm_64x64_nn",
        2,
        32_000,
        16_000,
        24_000,
    )
    assert first.share == pytest.approx(0.32)
    assert first.category == "compute_matmul"
    # (8 * 25 % + 24 * 50 %) / 32
    assert first.occupancy == pytest.approx(0.4375)
    assert (first.tensor_cores, second.tensor_cores) == (False, True)
    assert second.occupancy is None
    assert tensor_core_share(capture) == pytest.approx(10 / 42)


def test_a_kernel_counts_for_where_most_of_its_time_is(tmp_path):
    events = [
        step(1, 0, 100),
        *launched("vectorized_elementwise_kernel", 1, 5, 10, 1),
        note("Optimizer.step#SGD.step", 20, 40),
        *launched("vectorized_elementwise_kernel", 21, 30, 60, 2),
    ]
    (stats,) = kernel_stats(link(trace_of(tmp_path, events)))
    assert (stats.count, stats.category) == (2, "optimizer")


def test_kernels_count_only_inside_the_steps(tmp_path):
    events = [kernel("before", -50, -20), step(1, 0, 100), kernel("inside", 10, 20)]
    assert [stats.name for stats in kernel_stats(link(trace_of(tmp_path, events)))] == ["inside"]


def test_without_matrix_kernels_there_is_no_share(tmp_path):
    capture = link(trace_of(tmp_path, [step(1, 0, 100), kernel("elementwise", 10, 20)]))
    assert tensor_core_share(capture) is None


def test_a_cpu_has_no_kernels(tmp_path):
    capture = link(trace_of(tmp_path, [step(1, 0, 100)]))
    assert kernel_stats(capture) == ()
    assert tensor_core_share(capture) is None


@needs_traces
@pytest.mark.parametrize("name", NAMES)
def test_real_kernels_agree_with_adding_up_one_by_one(name):
    capture = link(read_trace(trace_file(name)))
    work, names, (low, high) = capture.trace.work, capture.trace.names, capture.steps.span
    totals: dict[str, int] = {}
    for kind, number, start, end in zip(work.kind, work.name, work.start.tolist(), work.end.tolist(), strict=True):
        if kind == Kind.KERNEL and end > low and start < high:
            totals[names[number]] = totals.get(names[number], 0) + min(end, high) - max(start, low)
    stats = kernel_stats(capture, top=10_000)
    assert {s.name: s.total_ns for s in stats} == totals
    assert all(s.occupancy is None or 0 <= s.occupancy <= 1 for s in stats)


@needs_traces
@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("h200_swin_t_launch_bound", 0.9, 1.0),  # bf16 autocast
        ("hta_ddp_a100_rank0of2_nccl_args", 0.85, 1.0),  # TF32 by default on A100
        ("kineto_resnet50_v100_workers0", 0.0, 0.0),  # float32 on V100, whose tensor cores take 16 bits only
    ],
)
def test_real_shares_of_tensor_cores(name, low, high):
    share = tensor_core_share(link(read_trace(trace_file(name))))
    assert share is not None
    assert low <= share <= high
