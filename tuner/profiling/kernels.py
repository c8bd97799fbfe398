"""Kernels with the most time, and the share of matmul and convolution time on tensor cores."""

from __future__ import annotations

import re

import numpy as np

from steptune.tuner.costs.categories import CATEGORIES, Category, classify_kernel
from steptune.tuner.profiling.capture import Capture
from steptune.tuner.profiling.intervals import Ints
from steptune.tuner.profiling.trace import Kind
from steptune.tuner.records import KernelStats

TENSOR_CORES = re.compile(
    # Shapes of the instruction, as NVIDIA names its kernels after them (the lists of NVIDIA's PyProf and of
    # TensorFlow's profiler, without the entries that also fit kernels on ordinary cores).
    r"[hsic](884|1688)(?!\d)|16816|i8816|i?16832|(h|i|q|b|wg)mma(?![a-z])|tcgen05|"
    # CUTLASS and cuDNN: "cutlass_80_tensorop_s1688gemm", "g1_tensor16x8x8", `MmaTensorOp` in mangled names.
    r"tensorop|_tensor\d+x\d+x\d+|"
    # cuBLAS on Hopper and later: every nvjet kernel is built on wgmma or tcgen05.
    r"^nvjet_|"
    # cuDNN's xmma kernels whose two operands have 16 bits or less, or TF32: "xmma_fprop_implicit_gemm_bf16bf16_".
    r"xmma_\w*?_(f16f16|bf16bf16|tf32f32|tf32tf32|e4m3e4m3|e5m2e4m3|e4m3e5m2|i8i8)_|"
    # FlashAttention 2 and 3 exist for 16 bits and less only.
    r"flash_(fwd|bwd)|"
    # AMD's Tensile names the matrix instruction: "Cijk_..._MI16x16x16x1_".
    r"^Cijk_\w*_MI\d+x\d+",
    re.IGNORECASE,
)


def uses_tensor_cores(name: str) -> bool:
    """Say whether a kernel's name states that it runs on tensor (or matrix) cores; False if it states nothing."""
    return bool(TENSOR_CORES.search(name))


def kernel_stats(capture: Capture, top: int = 20) -> tuple[KernelStats, ...]:
    """Return the kernels of all devices by name, the most time first. Only time within the steps counts."""
    trace, (low, high) = capture.trace, capture.steps.span
    rows, time = _kernels(capture)
    if len(rows) == 0:
        return ()
    names, group = np.unique(trace.work.name[rows], return_inverse=True)
    total = _sums(group, time, len(names))
    longest = np.zeros(len(names), dtype=np.int64)
    np.maximum.at(longest, group, time)
    count = np.bincount(group, minlength=len(names))
    category = np.zeros((len(names), len(CATEGORIES)), dtype=np.int64)
    np.add.at(category, (group, capture.category[rows]), np.maximum(time, 1))
    occupancy = trace.work.occupancy[rows].astype(np.float64)
    known = np.isfinite(occupancy)
    weight = _sums(group[known], time[known], len(names))
    occupied = np.bincount(group[known], weights=occupancy[known] * time[known], minlength=len(names))
    order = np.argsort(-total, kind="stable")[:top]
    return tuple(
        KernelStats(
            name=trace.names[names[number]],
            category=CATEGORIES[int(category[number].argmax())].category.value,
            count=int(count[number]),
            total_ns=int(total[number]),
            share=float(total[number] / max(1, high - low)),
            mean_ns=int(total[number] // count[number]),
            max_ns=int(longest[number]),
            tensor_cores=uses_tensor_cores(trace.names[names[number]]),
            occupancy=float(occupied[number] / weight[number]) if weight[number] else None,
        )
        for number in order.tolist()
    )


def tensor_core_share(capture: Capture) -> float | None:
    """Return the share of tensor cores in the time of matmul and convolution kernels; None without such kernels."""
    texts, total = kernel_times(capture)
    matrix = np.array([classify_kernel(text) is Category.MATMUL for text in texts], dtype=bool)
    tensor = np.array([uses_tensor_cores(text) for text in texts], dtype=bool)
    whole = int(total[matrix].sum()) if len(texts) else 0
    return float(total[matrix & tensor].sum() / whole) if whole else None


def kernel_times(capture: Capture, device: int | None = None) -> tuple[tuple[str, ...], Ints]:
    """Return the names of the kernels in the steps, on one device or on all, and the nanoseconds of each."""
    trace = capture.trace
    rows, time = _kernels(capture)
    if device is not None:
        mine = trace.work.device[rows] == device
        rows, time = rows[mine], time[mine]
    names, group = np.unique(trace.work.name[rows], return_inverse=True)
    return tuple(trace.names[name] for name in names.tolist()), _sums(group, time, len(names))


def _kernels(capture: Capture) -> tuple[Ints, Ints]:
    """Return rows of the kernels that overlap the steps, and the time of each inside the steps."""
    work, (low, high) = capture.trace.work, capture.steps.span
    rows = np.flatnonzero((work.kind == Kind.KERNEL) & (work.end > low) & (work.start < high))
    return rows, np.minimum(work.end[rows], high) - np.maximum(work.start[rows], low)


def _sums(group: Ints, values: Ints, size: int) -> Ints:
    total = np.zeros(size, dtype=np.int64)
    np.add.at(total, group, values)
    return total
