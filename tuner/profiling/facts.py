"""Features that a step already uses, read from its trace or from the choices of the trial that ran it.

Only this module makes the record, `StepFacts`. Every rule of the diagnosis depends on it, so that nothing
is advised that is already enabled; `already_on` lists these features for users.

A fact is set if a trace states it. Otherwise the fact is unknown, not false, except for compilation and
CUDA graphs, which always leave events. Names of kernels say which arithmetic a matmul used, but not all of them do
(and some mislead): recorded types of arguments come first, and FP32 is only claimed where a name states it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import numpy as np

from steptune.tuner.costs.categories import PRIORITY, Category, classify_kernel
from steptune.tuner.profiling.capture import Capture
from steptune.tuner.profiling.intervals import Ints
from steptune.tuner.profiling.kernels import kernel_times, uses_tensor_cores
from steptune.tuner.profiling.regions import HOST
from steptune.tuner.profiling.trace import Kind, Trace
from steptune.tuner.records import StepFacts

COMPILED = (
    r"^Torch-Compiled Region|^CompiledFunction(Backward)?$|^## Call CompiledFxGraph|^(inductor|TorchDynamo)|"
    r"^(triton_(poi|red|per|tem|for|mm)_|cpp_fused_)|^graph_\d+_cpp_fused"
)
"""Pattern for names that only torch.compile produces: host regions and functions, and kernels of TorchInductor."""
GRAPH_LAUNCH = r"GraphLaunch"
COMPILED_UPDATE = re.compile(r"^triton_(poi|for|red|per)_|^cpp_fused_")
FUSED_UPDATE = re.compile(
    # PyTorch's own kernels and operators.
    r"FusedOptimizerTensorList|Fused(Adam|Sgd|Adagrad)MathFunctor|^aten::_fused_(adam|adamw|sgd|adagrad)_?$|"
    # Functors of Apex, DeepSpeed and Transformer Engine in `multi_tensor_apply_kernel`, and their extensions' names.
    r"(?<!Binary)(Adam|SGD|Adagrad|NovoGrad|Lamb|LAMB(Stage\d)?)(Capturable|Master)*Functor|multi_tensor_(adam|sgd|lamb)|"
    r"FusedAdam|FusedSGD|FusedLAMB|FusedAdagrad|(cpu|fused)_adam|"
    # bitsandbytes, Liger, TorchAO, xFormers and the like.
    r"kOptimizer(32bit|Static8bit|8bit)|kPreconditionOptimizer|_?(fused|single_param)_adam\w*",
)
FUSED_CLASS = re.compile(r"Fused|CPUAdam|8bit|4bit|Fp8", re.IGNORECASE)
"""Pattern for optimizer classes whose only implementation is fused."""
FOREACH_UPDATE = re.compile(r"^aten::_foreach_|multi_tensor_apply_kernel")
PLAIN_UPDATE = re.compile(r"^aten::(add|sub|mul|div|addcmul|addcdiv|lerp|sqrt|copy)_$")
OPTIMIZER_MARK = re.compile(r"^Optimizer\.step#(?P<name>\w+)\.step$")

MATMULS = r"^aten::(mm|addmm|bmm|baddbmm|_scaled_mm|_scaled_dot_product\w+|cudnn_convolution|miopen_convolution|mkldnn_"
MATMULS += r"(convolution|linear)|convolution_backward|_convolution|mkldnn_linear_pointwise|_addmm_activation)$"
"""Operators that compute matmuls themselves, so the dtypes of their arguments are those of the matmul."""
RECORDED_TYPES = (
    ("float8", re.compile(rb"float8_e", re.IGNORECASE)),
    ("bfloat16", re.compile(rb"bfloat16", re.IGNORECASE)),
    ("float16", re.compile(rb"half|float16", re.IGNORECASE)),
    ("float32", re.compile(rb'"float"|"float32"', re.IGNORECASE)),
)
KERNEL_DTYPES = (
    ("float8", re.compile(r"e4m3|e5m2|fp8|float8|nvjet_(sm\d+_)?q", re.IGNORECASE)),
    (
        "bfloat16",
        re.compile(r"bf16|bfloat16|nvjet_(sm\d+_)?t[a-z]{2}_|^Cijk_\w*_B(B|S)S_|flash_\w*bf16", re.IGNORECASE),
    ),
    (
        "float16",
        re.compile(
            r"f16f16|_f16_|fp16|half|[_h](884|1688|16816)gemm_f16|\bh(884|1688|16816)|_h(884|1688|16816)|hgemm|"
            r"nvjet_(sm\d+_)?h[a-z]{2}_|^Cijk_\w*_H(H|S)S_",
            re.IGNORECASE,
        ),
    ),
    ("tf32", re.compile(r"tf32|_s1688(gemm|fprop|dgrad|wgrad)", re.IGNORECASE)),
    (
        "float32",
        re.compile(
            r"sgemm|scudnn|simt_s|_ffma_|f32f32_f32f32_f32|(gemm|gemv|convolve|conv|dgrad|wgrad|dot)\w*<float\b|"
            r"(dgrad|wgrad|fprop)_\w*<float\b",
            re.IGNORECASE,
        ),
    ),
)
"""Dtypes by a substring of a kernel's name; the first match counts. A name without a match has an unknown dtype."""
MOST = 0.5
"""Share of the matmul time that must have a known dtype for a dtype to be reported. If the arguments are FP32, none is
reported either where 16-bit and 8-bit kernels take at least this share of the known time.
"""
CONVERSIONS = r"nchwToNhwc|nhwcToNchw"
CHANNELS_LAST = r"nhwc"
ARCHITECTURES = (("volta", 70), ("turing", 75), ("ampere", 80), ("hopper", 90))
OWN_MARK = "steptune.capture"
"""Annotation that identifies Steptune's own captures."""
TF32, BF16, FP16 = "tf32", "bfloat16", "float16"


def facts_of_trace(capture: Capture, device: int | None) -> StepFacts:
    """Read from a trace which features are already enabled.

    Args:
        device: Number of the device whose kernels are read; None on a CPU.
    """
    trace = capture.trace
    texts, times = kernel_times(capture, device) if device is not None else ((), np.empty(0, np.int64))
    optimizer, name = _optimizer(capture)
    pinned, prefetched = _copies(capture, device)
    conversions = _time_of(texts, times, re.compile(CONVERSIONS).search)
    return StepFacts(
        compiled=bool(trace.names_matching(COMPILED).any()),
        cuda_graphs=bool(len(trace.host_rows(GRAPH_LAUNCH, Kind.RUNTIME)) or (trace.work.graph_node >= 0).any()),
        optimizer=optimizer,
        optimizer_name=name,
        loader=_loader(trace),
        pinned_memory=pinned,
        prefetched=prefetched,
        matmul_dtype=_matmul_dtype(capture, texts, times),
        faster_dtypes=_faster_dtypes(trace, device, texts),
        channels_last=_channels_last(texts, times, conversions),
        layout_ns=conversions / len(capture.steps),
        checkpointed=len(capture.regions.recompute.rows) > 0,
        own_capture=is_own(trace),
    )


def joined_facts(seen: StepFacts, chosen: StepFacts) -> StepFacts:
    """Return the facts known from the trace (`seen`) or the choices (`chosen`); if both are known and differ, the trace
    takes precedence.
    """
    unknown = StepFacts()
    values = {name: getattr(seen, name) for name in StepFacts.__struct_fields__}
    silent = [name for name, value in values.items() if value == getattr(unknown, name)]
    return StepFacts(**{**values, **{name: getattr(chosen, name) for name in silent}})


def already_on(facts: StepFacts) -> tuple[str, ...]:
    """List the features already enabled, as shown to users: "torch.compile", "fused AdamW", "bf16", "4 workers"."""
    dtypes = {"bfloat16": "bf16", "float16": "fp16", "float8": "fp8", "tf32": "TF32"}
    update = {"fused": "fused", "foreach": "foreach"}.get(facts.optimizer, "")
    name = facts.optimizer_name or "optimizer"
    if update and FUSED_CLASS.search(name):
        update = ""
    said = (
        "torch.compile" if facts.compiled else "",
        "CUDA graphs" if facts.cuda_graphs else "",
        f"{update} {name}".strip() if facts.optimizer in ("fused", "foreach") else "",
        dtypes.get(facts.matmul_dtype, ""),
        "channels-last" if facts.channels_last else "",
        _workers(facts),
        "pinned memory" if facts.pinned_memory else "",
        "prefetch to the device" if facts.prefetched else "",
        "activation checkpointing" if facts.checkpointed else "",
    )
    return tuple(text for text in said if text)


def is_own(trace: Trace) -> bool:
    """Say whether Steptune itself recorded a trace."""
    return OWN_MARK in trace.names


def _workers(facts: StepFacts) -> str:
    if facts.loader != "workers":
        return ""
    if facts.num_workers is None:
        return "loader workers"
    return f"{facts.num_workers} worker{'' if facts.num_workers == 1 else 's'}"


def _loader(trace: Trace) -> str:
    if len(trace.host_rows(r"_MultiProcessing\w*Iter", *HOST)):
        return "workers"
    return "main process" if len(trace.host_rows(r"_SingleProcess\w*Iter", *HOST)) else ""


def _optimizer(capture: Capture) -> tuple[str, str]:
    """Return implementation and class of the optimizer, from events in its step, or from kernels with known names."""
    trace, regions, launches = capture.trace, capture.regions, capture.launches
    names = trace.names
    marks = [OPTIMIZER_MARK.match(names[n]) for n in np.unique(trace.host.name[regions.optimizer.rows]).tolist()]
    classes = [mark["name"] for mark in marks if mark]
    host = trace.host
    operators = np.flatnonzero(np.isin(host.kind, HOST))
    operators = operators[regions.optimizer.contains(host.thread[operators], host.start[operators])]
    inside = {names[n] for n in np.unique(host.name[operators]).tolist()}
    updates = capture.category == PRIORITY[Category.OPTIMIZER]
    updates |= regions.optimizer.contains(launches.thread, launches.start) & (launches.row >= 0)
    inside |= {names[n] for n in np.unique(trace.work.name[updates]).tolist()}
    recorded = np.unique(np.concatenate([host.name[host.kind != Kind.PYTHON], trace.work.name]))
    anywhere = [names[n] for n in recorded.tolist() if FUSED_UPDATE.search(names[n])]
    name = classes[0] if classes else ""
    if anywhere or any(FUSED_CLASS.search(c) for c in classes) or any(COMPILED_UPDATE.search(n) for n in inside):
        return "fused", name or _class_of_update(anywhere)
    for implementation, pattern in (("foreach", FOREACH_UPDATE), ("for_loop", PLAIN_UPDATE)):
        if any(pattern.search(n) for n in inside):
            return implementation, name
    return "", name


def _class_of_update(names: Iterable[str]) -> str:
    known = {
        "adamw": "AdamW",
        "adam_mode)1": "AdamW",
        "adam": "Adam",
        "sgd": "SGD",
        "adagrad": "Adagrad",
        "lamb": "LAMB",
    }
    text = " ".join(names).lower()
    return next((label for key, label in known.items() if key in text), "")


def _copies(capture: Capture, device: int | None) -> tuple[bool | None, bool]:
    """Say whether most copies to a device come from pinned memory, and whether they use a separate stream."""
    trace, (low, high) = capture.trace, capture.steps.span
    work = trace.work
    own = (work.device == device) & (work.end > low) & (work.start < high) if device is not None else work.start < 0
    copies = np.flatnonzero(own & (capture.category == PRIORITY[Category.COPY_H2D]))
    if len(copies) == 0:
        return None, False
    time = np.maximum(1, work.end[copies] - work.start[copies])
    pinned = trace.names_matching(r"Pinned")[work.name[copies]]
    says = trace.names_matching(r"Pinned|Pageable")[work.name[copies]]
    kernels = np.flatnonzero(own & (work.kind == Kind.KERNEL) & (capture.category != PRIORITY[Category.COMMUNICATION]))
    if len(kernels) == 0:
        return (bool(time[pinned].sum() > time.sum() / 2) if says.any() else None), False
    streams, number = np.unique(work.stream[kernels], return_inverse=True)
    main = streams[np.bincount(number, weights=work.end[kernels] - work.start[kernels]).argmax()]
    apart = bool(time[work.stream[copies] != main].sum() > time.sum() / 2)
    return (bool(time[pinned].sum() > time.sum() / 2) if says.any() else None), apart


def _matmul_dtype(capture: Capture, texts: tuple[str, ...], times: Ints) -> str:
    recorded = _recorded_dtype(capture)
    matmul = [classify_kernel(text) in (Category.MATMUL, Category.ATTENTION) for text in texts]
    weights: dict[str, int] = {}
    whole = 0
    for text, time, counts in zip(texts, times.tolist(), matmul, strict=True):
        if counts:
            whole += time
            name = kernel_dtype(text)
            weights[name] = weights.get(name, 0) + time
    if recorded and recorded != "float32":
        return recorded
    known = whole - weights.pop("", 0)
    if not weights or known < MOST * whole:
        # On a device, FP32 arguments may be multiplied in TF32: only a kernel's name can say.
        return recorded if not len(texts) else ""
    dtype = max(weights, key=lambda name: weights[name])
    sixteen = sum(weights.get(name, 0) for name in (BF16, FP16, "float8"))
    return dtype if recorded != "float32" or sixteen < MOST * known else ""


def kernel_dtype(name: str) -> str:
    """Return the arithmetic (such as "tf32") that a matmul kernel's name states; empty if it states none."""
    found = next((dtype for dtype, pattern in KERNEL_DTYPES if pattern.search(name)), "")
    return "" if found == "float32" and uses_tensor_cores(name) else found


def _recorded_dtype(capture: Capture) -> str:
    """Return the most common argument dtype of the matmul operators; empty if argument types were not recorded."""
    trace, (low, high) = capture.trace, capture.steps.span
    rows = trace.host_rows(MATMULS, Kind.OPERATOR)
    rows = rows[(trace.host.start[rows] >= low) & (trace.host.start[rows] < high) & (trace.host.shape[rows] >= 0)]
    shapes, count = np.unique(trace.host.shape[rows], return_counts=True)
    totals: dict[str, int] = {}
    for shape, number in zip(shapes.tolist(), count.tolist(), strict=True):
        types = trace.shapes[shape].split(b"|")[1]
        dtype = next((name for name, pattern in RECORDED_TYPES if pattern.search(types)), "")
        if dtype:
            totals[dtype] = totals.get(dtype, 0) + number
    return max(totals, key=lambda name: totals[name]) if totals else ""


def _faster_dtypes(trace: Trace, device: int | None, texts: Iterable[str]) -> tuple[str, ...] | None:
    """Return the dtypes whose matmuls are faster than FP32 on the device's architecture; None if the trace does not
    state the architecture.
    """
    if device is None:
        return None
    known = next((d for d in trace.devices if d.number == device), None)
    amd = trace.names_matching(r"^hip[A-Z]|^Cijk_|ROCm|rocblas|miopen|Instinct|Radeon")
    if amd.any() or (known is not None and re.search(r"AMD|Instinct|Radeon|gfx\d", known.name)):
        return (BF16, FP16)
    capability = 10 * known.compute_capability[0] + known.compute_capability[1] if known is not None else 0
    if not capability:
        capability = max((_built_for(text) for text in texts), default=0)
        if not capability:
            return None
    if capability >= 80:
        return (TF32, BF16, FP16)
    return (FP16,) if capability >= 70 else ()


def _built_for(name: str) -> int:
    """Return the minimum compute capability, times ten, that a kernel's name states; 0 if it states none."""
    number = re.search(r"(?:sm|cutlass_)(\d{2,3})_", name)
    named = [capability for word, capability in ARCHITECTURES if word in name.lower()]
    return max([int(number[1]) if number else 0, *named])


def _channels_last(texts: tuple[str, ...], times: Ints, conversions: int) -> bool | None:
    """Say whether convolutions use NHWC without a conversion; None if no kernel's name states a layout."""
    layout = _time_of(texts, times, lambda text: re.search(CHANNELS_LAST, text) and not re.search(CONVERSIONS, text))
    return None if not layout else conversions < 0.02 * layout


def _time_of(texts: Iterable[str], times: Ints, fits: Callable[[str], object]) -> int:
    return sum(time for text, time in zip(texts, times.tolist(), strict=True) if fits(text))
