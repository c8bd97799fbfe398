"""Names to categories, on names that real captures hold."""

import re
from collections import Counter

import numpy as np
import pytest
from kernel_names import HELD_OUT, KNOWN
from traces import needs_traces, trace_file

from steptune.tuner.costs.categories import (
    CATEGORIES,
    COMPUTE,
    GROUPS,
    INFO,
    PRIORITY,
    Category,
    bottleneck,
    classify_copy,
    classify_kernel,
    classify_operator,
    is_communication,
)
from steptune.tuner.profiling.reader import read_trace
from steptune.tuner.profiling.trace import Kind

C = Category

KERNELS = {
    # cuBLAS, CUTLASS, cuDNN, MIOpen
    "nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN": C.MATMUL,
    "ampere_sgemm_128x64_tn": C.MATMUL,
    "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x64_32x6_nt_align1>(Params)": C.MATMUL,
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas": C.MATMUL,
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(float const*)": C.MATMUL,
    "void implicit_convolve_sgemm<float, float, 1024, 6, 7, 3, 3, 5, 1, false, true, true>(int)": C.MATMUL,
    "void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>(int, int)": C.MATMUL,
    "void cudnn::cnn::wgrad_alg0_engine<float, 128, 6, 7, 3, 3, 5, false, 512>(int)": C.MATMUL,
    "volta_scudnn_128x64_relu_interior_nn_v1": C.MATMUL,
    "volta_scudnn_128x64_stridedB_interior_nn_v1": C.MATMUL,
    "cudnn_infer_ampere_scudnn_128x64_relu_xregs_large_nn_v1": C.MATMUL,
    "Cijk_Ailk_Bljk_HHS_BH_MT128x128x16": C.MATMUL,
    # attention, normalisation
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64": C.ATTENTION,
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128>>": C.ATTENTION,
    "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)": C.ATTENTION,
    "void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void const*, void const*)": C.ATTENTION,
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int)": C.NORMALISATION,
    "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float>(long)": C.NORMALISATION,
    "void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 512, true, 1>(float)": C.NORMALISATION,
    "void at::native::batch_norm_collect_statistics_kernel<at::native::Var, float>()": C.NORMALISATION,
    # reductions, element-wise
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>()": C.REDUCTION,
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 6, false, false>()": C.REDUCTION,
    "void at::native::(anonymous namespace)::max_pool_backward_nchw<float, float>(int)": C.REDUCTION,
    "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>>(int)": C.ELEMENTWISE,
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 1, 128, 1>()": C.ELEMENTWISE,
    "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>(params)": C.ELEMENTWISE,
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizer>()": C.ELEMENTWISE,
    # what Inductor generates is named after all it fuses: the kind of kernel decides
    "triton_poi_fused_addmm_gelu_3": C.ELEMENTWISE,
    "triton_poi_fused_convolution_relu_1": C.ELEMENTWISE,
    "triton_poi_fused_convert_element_type_4": C.ELEMENTWISE,
    "triton_poi_fused__scaled_dot_product_flash_attention_clone_2": C.ELEMENTWISE,
    "triton_red_fused_addmm_sum_7": C.REDUCTION,
    "triton_per_fused__softmax_0": C.REDUCTION,
    "triton_per_fused_native_layer_norm_add_5": C.NORMALISATION,
    "triton_tem_fused_addmm_12": C.MATMUL,
    "triton_tem_fused_flex_attention_0": C.ATTENTION,
    # the rest
    "void split_embedding_codegen_forward_unweighted_kernel<c10::Half>(fbgemm_gpu::FixedDivisor)": C.OTHER_COMPUTE,
    "void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long>()": C.OTHER_COMPUTE,
    "void cub::DeviceRadixSortOnesweepKernel<cub::DeviceRadixSortPolicy<long>>()": C.OTHER_COMPUTE,
    # communication wins over the reduction in its name
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": C.COMMUNICATION,
    "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)": C.COMMUNICATION,
    "void vllm::cross_device_reduce_1stage<float, 2>()": C.COMMUNICATION,
}

OPERATORS = {
    "aten::mm": C.MATMUL,
    "aten::addmm": C.MATMUL,
    "aten::bmm": C.MATMUL,
    "aten::linear": C.MATMUL,
    "aten::convolution_backward": C.MATMUL,
    "mkldnn::_linear_pointwise": C.MATMUL,
    "aten::mkldnn_convolution": C.MATMUL,
    "aten::_scaled_dot_product_flash_attention_for_cpu": C.ATTENTION,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": C.ATTENTION,
    "aten::native_layer_norm": C.NORMALISATION,
    "aten::native_batch_norm_backward": C.NORMALISATION,
    "aten::sum": C.REDUCTION,
    "aten::_log_softmax_backward_data": C.REDUCTION,
    "aten::nll_loss_forward": C.REDUCTION,
    "aten::max_pool2d_with_indices_backward": C.REDUCTION,
    "aten::adaptive_avg_pool2d": C.REDUCTION,
    "aten::_foreach_norm": C.REDUCTION,
    "aten::add_": C.ELEMENTWISE,
    "aten::gelu_backward": C.ELEMENTWISE,
    "aten::threshold_backward": C.ELEMENTWISE,
    "aten::native_dropout": C.ELEMENTWISE,
    "aten::_to_copy": C.ELEMENTWISE,
    "aten::copy_": C.ELEMENTWISE,
    "aten::cat": C.ELEMENTWISE,
    "aten::_foreach_addcmul_": C.ELEMENTWISE,
    "c10d::allreduce_": C.COMMUNICATION,
    "gloo:all_reduce": C.COMMUNICATION,
    # their names say nothing: they inherit, or count as other compute
    "aten::index_select": None,
    "aten::empty": None,
    "aten::view": None,
    "autograd::engine::evaluate_function: AddmmBackward0": None,
    "ProfilerStep#7": None,
    "forward": None,
}


def kernel_time(name: str) -> Counter[str]:
    """Nanoseconds by kernel name of a real capture."""
    trace = read_trace(trace_file(name))
    time: Counter[str] = Counter()
    work = trace.work
    for row in np.flatnonzero(work.kind == Kind.KERNEL).tolist():
        time[trace.names[work.name[row]]] += int(work.end[row] - work.start[row])
    return time


@pytest.mark.parametrize("name", KERNELS, ids=lambda name: name[:40])
def test_kernels_by_name(name: str) -> None:
    assert classify_kernel(name) == KERNELS[name]
    assert is_communication(name) == (KERNELS[name] is C.COMMUNICATION)


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("void small_reduce_kernel<float>", C.REDUCTION),
        ("smallReduceKernel", C.REDUCTION),
        ("fast_small_gather", C.OTHER_COMPUTE),
        ("ball_gather", C.OTHER_COMPUTE),
        ("void at::native::overallreduce", C.REDUCTION),
        ("void waitall_to_allocate", C.OTHER_COMPUTE),
        ("void call_all_to_allocate", C.OTHER_COMPUTE),
        ("void ipcAllGatherKernel<float>", C.COMMUNICATION),
        ("elementwise_attn_mask_fill", C.ELEMENTWISE),
        ("copy_attn", C.ELEMENTWISE),
        ("fused_attn_copy", C.ELEMENTWISE),
        ("void ca_pattncast", C.ELEMENTWISE),
        ("paged_prefill_attn_kernel", C.ATTENTION),
        ("void sparseAttnFwd<cute::Copy_Atom<float>>", C.ATTENTION),
    ],
)
def test_a_name_counts_by_its_parts(name: str, category: Category) -> None:
    """Words begin where a part of the name does: what only holds their letters is something else."""
    assert classify_kernel(name) == category
    assert is_communication(name) == (category is C.COMMUNICATION)


@pytest.mark.parametrize(("name", "category"), KNOWN + HELD_OUT, ids=lambda value: str(value)[:40])
def test_kernels_of_public_libraries(name: str, category: Category) -> None:
    assert classify_kernel(name) == category
    assert is_communication(name) == (category is C.COMMUNICATION)


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_by_name(name: str) -> None:
    assert classify_operator(name) == OPERATORS[name]


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("Memcpy HtoD (Pageable -> Device)", C.COPY_H2D),
        ("Memcpy DtoH (Device -> Pinned)", C.COPY_D2H),
        ("Memcpy DtoD (Device -> Device)", C.COPY_D2D),
        ("Memset (Device)", C.COPY_D2D),
        ("CopyHostToDevice", C.COPY_H2D),
        ("CopyDeviceToHost", C.COPY_D2H),
    ],
)
def test_copies_by_direction(name: str, category: Category) -> None:
    assert classify_copy(name) == category


@needs_traces
@pytest.mark.parametrize(
    ("name", "kernels", "category"),
    [
        ("kineto_resnet50_v100_workers0", r"cudnn.*(scudnn|engine)|implicit_con|gemm", C.MATMUL),
        ("h200_swin_t_launch_bound", r"layer_norm|GammaBeta", C.NORMALISATION),
        ("h200_vit_b_ddp2_split0_rank0", r"sdpa|compute_dot_do_o", C.ATTENTION),
        ("hta_job128_rank0", r"^nccl", C.COMMUNICATION),
    ],
)
def test_the_kernels_of_real_captures_fall_into_their_class(name: str, kernels: str, category: Category) -> None:
    found = {classify_kernel(kernel) for kernel in kernel_time(name) if re.search(kernels, kernel)}
    assert found == {category}


@needs_traces
@pytest.mark.parametrize(
    "name", ["kineto_resnet50_v100_workers0", "h200_resnet50_cuda_graph", "h200_vit_b_ddp2_split0_rank1"]
)
def test_little_of_a_real_vision_model_is_left_unnamed(name: str) -> None:
    """Kernels that no rule names are `other`; in common models they take a few per cent of the kernels' time."""
    time = kernel_time(name)
    unnamed = sum(value for kernel, value in time.items() if classify_kernel(kernel) is C.OTHER_COMPUTE)
    assert unnamed < 0.03 * time.total()


class TestTable:
    def test_every_category_has_one_row(self) -> None:
        assert sorted(info.category for info in CATEGORIES) == sorted(Category)
        assert {info.group for info in CATEGORIES} == set(GROUPS)

    def test_compute_wins_over_communication_over_copies_over_gaps(self) -> None:
        ranks = [
            max(PRIORITY[c] for c in (*COMPUTE, C.OPTIMIZER)),
            PRIORITY[C.COMMUNICATION],
            PRIORITY[C.COPY_H2D],
            min(PRIORITY[c] for c in (C.DATA_WAIT, C.SYNCHRONISATION, C.HOST, C.LAUNCH_LATENCY)),
        ]
        assert ranks == sorted(ranks)

    def test_every_category_is_in_a_group_that_people_see(self) -> None:
        assert {INFO[category.value].group for category in Category} == set(GROUPS)


class TestBottleneck:
    @pytest.mark.parametrize(
        ("times", "name"),
        [
            ({C.MATMUL: 100}, "compute"),
            ({C.MATMUL: 60, C.OPTIMIZER: 40}, "optimizer"),
            ({C.MATMUL: 79, C.DATA_WAIT: 21}, "input"),
            ({C.MATMUL: 81, C.DATA_WAIT: 19}, "compute"),
            ({C.MATMUL: 75, C.DATA_WAIT: 10, C.EPOCH_RESTART: 8, C.COPY_H2D: 7}, "input"),
            ({C.MATMUL: 60, C.HOST: 15, C.LAUNCH_LATENCY: 15, C.DATA_WAIT: 10}, "host"),
            ({C.MATMUL: 70, C.SYNCHRONISATION: 30}, "synchronisation"),
            ({C.MATMUL: 50, C.COMMUNICATION: 50}, "communication"),
        ],
    )
    def test_time_that_waits_counts_before_time_that_computes(self, times: dict[Category, float], name: str) -> None:
        assert bottleneck({category.value: float(value) for category, value in times.items()}) == name
