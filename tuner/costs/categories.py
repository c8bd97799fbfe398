"""The exclusive categories of a step's time, in one ordered table.

Every nanosecond of a step belongs to exactly one category. Where several apply at once, the one
that stands first in `CATEGORIES` wins: compute before communication before copies, and only time in
which the device does nothing is a gap, blamed on what the host was doing. On a CPU the host is the
device: an operator's own time (without the operators inside it) counts for its class, and what no
operator covers is `host`.

`classify_operator` and `classify_kernel` are the only places that read names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache


class Category(StrEnum):
    MATMUL = "compute_matmul"
    ATTENTION = "compute_attention"
    NORMALISATION = "compute_normalisation"
    REDUCTION = "compute_reduction"
    ELEMENTWISE = "compute_elementwise"
    OTHER_COMPUTE = "compute_other"
    OPTIMIZER = "optimizer"
    RECOMPUTE = "recompute"
    COMMUNICATION = "communication"
    PIPELINE_BUBBLE = "pipeline_bubble"
    COPY_H2D = "copy_host_to_device"
    COPY_D2H = "copy_device_to_host"
    COPY_D2D = "copy_on_device"
    DATA_WAIT = "data_wait"
    EPOCH_RESTART = "epoch_restart"
    SYNCHRONISATION = "synchronisation"
    ALLOCATION = "allocation"
    OPTIMIZER_HOST = "optimizer_host"
    HOST = "host"
    LAUNCH_LATENCY = "launch_latency"
    DISPATCH = "dispatch"
    QUEUED = "queued"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class CategoryInfo:
    """Meaning of a category, and the group of categories under which reports list it."""

    category: Category
    group: str
    title: str
    counts: str
    host: bool = False
    """True for host time; profiling lengthens such time."""


CATEGORIES: tuple[CategoryInfo, ...] = (
    CategoryInfo(
        category=Category.MATMUL,
        group="compute",
        title="matmuls and convolutions",
        counts="kernels or operators of dense linear algebra",
    ),
    CategoryInfo(
        category=Category.ATTENTION,
        group="compute",
        title="attention",
        counts="fused attention, forward and backward",
    ),
    CategoryInfo(
        category=Category.NORMALISATION,
        group="compute",
        title="normalisation",
        counts="layer, batch, group and RMS normalisation",
    ),
    CategoryInfo(
        category=Category.REDUCTION,
        group="compute",
        title="reductions",
        counts="sums, means, softmax, losses, pooling",
    ),
    CategoryInfo(
        category=Category.ELEMENTWISE,
        group="compute",
        title="element-wise",
        counts="activations, additions, dropout, casts, copies inside the device's compute, compiled fusions",
    ),
    CategoryInfo(
        category=Category.OTHER_COMPUTE,
        group="compute",
        title="other compute",
        counts="indexing, embeddings, sorting, and compute that belongs to no other category",
    ),
    CategoryInfo(
        category=Category.OPTIMIZER,
        group="compute",
        title="optimizer",
        counts="compute inside the optimizer's step and zero_grad; in a recorded step, kernels over lists of tensors",
    ),
    CategoryInfo(
        category=Category.RECOMPUTE,
        group="compute",
        title="recomputation",
        counts="the forward pass repeated inside the backward pass, as activation checkpointing requires",
    ),
    CategoryInfo(
        category=Category.COMMUNICATION,
        group="communication",
        title="exposed communication",
        counts="collectives while no compute runs",
    ),
    CategoryInfo(
        category=Category.PIPELINE_BUBBLE,
        group="communication",
        title="pipeline bubble",
        counts="point-to-point sends and receives, and waits for them, while no compute runs",
    ),
    CategoryInfo(
        category=Category.COPY_H2D,
        group="input/output",
        title="copies to the device",
        counts="exposed host-to-device copies",
    ),
    CategoryInfo(
        category=Category.COPY_D2H,
        group="input/output",
        title="copies to the host",
        counts="exposed device-to-host copies",
    ),
    CategoryInfo(
        category=Category.COPY_D2D,
        group="compute",
        title="copies on the device",
        counts="exposed device-to-device copies and memsets",
    ),
    CategoryInfo(
        category=Category.DATA_WAIT,
        group="input/output",
        title="waiting for data",
        counts="the device is idle (on a CPU, the main thread waits) while the loader's next() runs",
    ),
    CategoryInfo(
        category=Category.EPOCH_RESTART,
        group="input/output",
        title="epoch restart",
        counts="restart of the loader for a new epoch, averaged over the epoch's steps",
    ),
    CategoryInfo(
        category=Category.SYNCHRONISATION,
        group="gaps",
        title="synchronisation",
        counts="the device is idle because the host waits for it: .item(), synchronize, blocking copies",
        host=True,
    ),
    CategoryInfo(
        category=Category.ALLOCATION,
        group="gaps",
        title="allocation",
        counts="the device is idle during cudaMalloc, cudaFree and similar calls",
        host=True,
    ),
    CategoryInfo(
        category=Category.OPTIMIZER_HOST,
        group="gaps",
        title="optimizer (host)",
        counts="the device is idle while the host runs the optimizer's step",
        host=True,
    ),
    CategoryInfo(
        category=Category.HOST,
        group="gaps",
        title="Python and other host work",
        counts="the device is idle while the host runs operators or Python; on a CPU, no operator runs",
        host=True,
    ),
    CategoryInfo(
        category=Category.LAUNCH_LATENCY,
        group="gaps",
        title="launch latency",
        counts="time from the launch call to the start of the kernel, up to the usual latency of an empty queue",
        host=True,
    ),
    CategoryInfo(
        category=Category.DISPATCH,
        group="gaps",
        title="between queued kernels",
        counts="gaps between two operations that had both been launched already, up to the usual latency; such gaps "
        "remain even on a device that always has work queued",
    ),
    CategoryInfo(
        category=Category.QUEUED,
        group="gaps",
        title="queued but blocked",
        counts="the device is idle because operations that were launched long before must wait for another "
        "stream, a peer or a full queue",
    ),
    CategoryInfo(
        category=Category.UNKNOWN,
        group="unknown",
        title="unknown",
        counts="gaps whose cause the trace does not show",
    ),
)

INFO: dict[str, CategoryInfo] = {info.category.value: info for info in CATEGORIES}
PRIORITY: dict[Category, int] = {info.category: number for number, info in enumerate(CATEGORIES)}
GROUPS: tuple[str, ...] = ("compute", "communication", "input/output", "gaps", "unknown")
COMPUTE: tuple[Category, ...] = (
    Category.MATMUL,
    Category.ATTENTION,
    Category.NORMALISATION,
    Category.REDUCTION,
    Category.ELEMENTWISE,
    Category.OTHER_COMPUTE,
)
COMPUTING: tuple[Category, ...] = (*COMPUTE, Category.OPTIMIZER, Category.RECOMPUTE)
WAITS: dict[str, tuple[Category, ...]] = {
    "input": (Category.DATA_WAIT, Category.EPOCH_RESTART, Category.COPY_H2D),
    "communication": (Category.COMMUNICATION, Category.PIPELINE_BUBBLE),
    "host": (Category.HOST, Category.LAUNCH_LATENCY, Category.ALLOCATION, Category.OPTIMIZER_HOST),
    "synchronisation": (Category.SYNCHRONISATION, Category.QUEUED),
}
"""Categories of waiting time, by the name that reports give the bottleneck."""
HOST_CATEGORIES: frozenset[str] = frozenset(info.category.value for info in CATEGORIES if info.host)

_Rules = tuple[tuple[Category, re.Pattern[str]], ...]


def _rules(*pairs: tuple[Category, str]) -> _Rules:
    return tuple((category, re.compile(pattern, re.IGNORECASE)) for category, pattern in pairs)


_PART = r"((?<![a-z])|(?-i:(?<=[a-z])(?=[A-Z])))"
"""Pattern for the beginning of a word in snake case or camel case, so that "small_reduce" does not match as an
all-reduce.
"""
_COMMUNICATION = re.compile(
    # Libraries by their names: NCCL, RCCL, MSCCL(++), oneCCL, HCCL, NVSHMEM, DeepEP, Transformer Engine's user buffers.
    r"^(nccl|rccl|gloo:|c10d::|oneccl|ccl_|hccl|hcom_)|nccl(Dev)?Kernel|ncclDevFunc|rcclGeneric|\bmsccl|"
    r"\b(one)?ccl::|nvshmem|rocshmem|deep_ep::|userbuffers_|multimem_|"
    # Kernels of vLLM, TensorRT-LLM, FlashInfer, AITER and torch's symmetric memory by what they do.
    rf"^(?!triton_[a-z]{{3}}_).*{_PART}"
    r"(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all(?!oc)|all2all|cross_device_(reduce|store))",
    re.IGNORECASE,
)

_OPERATOR_RULES = _rules(
    (Category.COMMUNICATION, r"^(c10d::|gloo:|nccl:)"),
    (Category.ATTENTION, r"attention|flash"),
    (Category.NORMALISATION, r"(layer|batch|group|rms|instance|local_response)_?norm|norm_backward"),
    (
        Category.MATMUL,
        r"::(addmm|mm|bmm|baddbmm|matmul|linear|dot|mv|addmv|einsum|_scaled_mm|_weight_int)|conv|mkldnn|mkl_|"
        r"lstm|gru|rnn|onednn|_addmm_activation",
    ),
    (
        Category.REDUCTION,
        r"::(sum|mean|amax|amin|max|min|argmax|argmin|norm|linalg_vector_norm|var|std|cumsum|prod|all|any|nll_loss|"
        r"cross_entropy|_?log_softmax|_?softmax|logsumexp)|_loss|softmax|pool|foreach_norm|foreach_max",
    ),
    (
        Category.ELEMENTWISE,
        r"::(add|sub|mul|div|addcmul|addcdiv|pow|sqrt|rsqrt|exp|log|neg|abs|sigmoid|tanh|relu|gelu|silu|threshold|"
        r"clamp|where|copy|_to_copy|to|contiguous|clone|cat|stack|fill|zero|ones|zeros|full|native_dropout|dropout|"
        r"bernoulli|lerp|sign|eq|ne|lt|gt|le|ge|masked_fill|erf|sin|cos|floor|round|bitwise|logical|_foreach)|"
        r"CompiledFunction|Torch-Compiled|inductor|cpp_fused|triton_",
    ),
)

_NAMESPACES = re.compile(r"\b(deep_gemm|flashinfer|fp8_blockscale_gemm)::")
"""Namespaces removed from kernel names before classification: these libraries are named after their first kernel,
although they contain other kernels too.
"""

_KERNEL_RULES = _rules(
    # Inductor names a fused kernel after everything it fuses ("triton_poi_fused_addmm_relu_3" adds a bias):
    # the kind of kernel comes first. A template is a matmul or a convolution, unless it is one of attention.
    (Category.NORMALISATION, r"^triton_(poi|red|per)_.*(layer|batch|group|rms)_?norm"),
    (Category.ELEMENTWISE, r"^triton_(poi|for)_"),
    (Category.REDUCTION, r"^triton_(red|per|spl)_"),
    (
        Category.ATTENTION,
        # Of a name with "attn" alone, what it does decides: to fill a mask or copy is no attention.
        rf"^(?![^<(]*(elementwise|copy|(?<!pre)fill|cast|transpose)).*{_PART}attn(?-i:(?![a-z]))|"
        r"flash_?(?!infer)|fmha|attention|sdpa|\bmla_|kernel_mha|gemm_softmax_gemm|(prefill|decode)with\w*kvcache|"
        # Triton's backward pass of attention, and flash-linear-attention.
        r"delta_rule|cudnn::fusion::compute_dot_do_o|bwd_kernel_(dq|dkdv|dk_dv)|chunk_(fwd|bwd)_kernel_",
    ),
    (Category.MATMUL, r"^triton_tem_"),
    (
        Category.NORMALISATION,
        r"layer_?norm|batch_?norm|bn_fw|bn_bw|group_?norm|rms_?norm|GammaBetaBackward|RowwiseMoments|normalization::",
    ),
    (Category.ELEMENTWISE, r"^(void )?transpose_fp32|scale_1x128|smxx_layout"),
    (
        Category.MATMUL,
        r"(?<!fb)gemm|gemv|cutlass|wgmma|conv(?!ert)|winograd|xmma|implicit_con|nvjet|cublas|dot_kernel|triton_.*mm|"
        r"_sm\d+_.*tensor|Cijk_|splitK|[sh]cudnn_|cudnn::cnn|dgrad|wgrad|matmul|(^|_)b?mm_|fused_moe_kernel|marlin|"
        r"mqa_logits|kernel_contraction",
    ),
    (Category.REDUCTION, r"reduce|softmax|nll_loss|cross_entropy|cumsum|scan|pool|norm_kernel"),
    (
        Category.ELEMENTWISE,
        r"elementwise|copy|fill|dropout|CatArray|gelu|relu|multi_tensor_apply|vectorized_(?!gather)|pointwise|cast(?<!broadcast)|"
        # XLA names a fused loop after what it fuses, or just a fusion.
        r"nchwToNhwc|nhwcToNchw|swiglu|geglu|silu|^(loop|wrapped)_|(^|_)fusion([._]\d+)*$",
    ),
)


def classify_operator(name: str) -> Category | None:
    """Return the category of a CPU operator or annotation by its name; None if the name does not determine it."""
    for category, pattern in _OPERATOR_RULES:
        if pattern.search(name):
            return category
    return None


@lru_cache(maxsize=4096)
def classify_kernel(name: str) -> Category:
    """Return the category of a device kernel by its name. Memory copies are classified by `classify_copy`."""
    if is_communication(name):
        return Category.COMMUNICATION
    short = _NAMESPACES.sub("", name)
    for category, pattern in _KERNEL_RULES:
        if pattern.search(short):
            return category
    return Category.OTHER_COMPUTE


def is_communication(name: str) -> bool:
    return bool(_COMMUNICATION.search(name))


def classify_copy(name: str) -> Category:
    """Return the category of a memory copy or memset by its name ("Memcpy HtoD (Pageable -> Device)")."""
    lowered = name.lower()
    if "htod" in lowered or "hosttodevice" in lowered:
        return Category.COPY_H2D
    if "dtoh" in lowered or "devicetohost" in lowered:
        return Category.COPY_D2H
    return Category.COPY_D2D


def bottleneck(per_step_ns: dict[str, float]) -> str:
    """Return the name of a step's bottleneck: one of `WAITS`, the optimizer, or compute.

    Compute only counts as the bottleneck when nothing else takes a fifth of the step: time that
    computes is useful, time that waits is not.
    """
    total = max(1.0, sum(per_step_ns.values()))
    waits = {name: sum(per_step_ns.get(category, 0.0) for category in categories) for name, categories in WAITS.items()}
    name, value = max(waits.items(), key=lambda item: item[1])
    if value / total >= 0.2:
        return name
    return "optimizer" if per_step_ns.get(Category.OPTIMIZER, 0.0) / total >= 0.3 else "compute"
