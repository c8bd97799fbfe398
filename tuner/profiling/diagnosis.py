"""What limits a step, from its breakdown: one table of rules.

A rule looks at exclusive shares of the (rescaled) step. It fires at its lowest threshold; the higher
ones raise its severity. A finding names its evidence, the advice, the strategies that would act on
it, and the most that they could save. Where the capture is bad, nothing is claimed but that.

The thresholds are those of torch-tb-profiler, TensorFlow's and XProf's rules and our own proposals:
see docs/diagnosis.md for each one's source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from steptune.tuner.profiling.bounds import Situation, compute_floor_ns
from steptune.tuner.profiling.categories import COMPUTE, COMPUTING, Category
from steptune.tuner.profiling.quality import PROBLEMS
from steptune.tuner.records import Breakdown, CollectiveStats, Finding
from steptune.tuner.trace_records import RankAnalysis, RankWait

PLACES = 3
"""How many kernels or gaps a finding names."""
FASTEST_PRODUCTS = 8
"""Tensor cores multiply 2 to 8 times as fast as FP32 units."""
FUSED_OPTIMIZER = 0.8
"""A fused optimizer still reads and writes every parameter."""
SKEW_THRESHOLDS = (0.02, 0.05, 0.15)
"""Our own, for the longest wait for a late rank as a share of the step."""
COMMUNICATION_ADVICE = "overlap communication with the backward pass, or communicate less often"
BUSY = 0.8
"""Makers of batches that compute or queue for a core this share of their time are limited by the processor."""


def busiest(breakdowns: Sequence[Breakdown]) -> Breakdown:
    """Of the device that computes most: another one of the process may have done next to nothing."""
    return max(breakdowns, key=lambda breakdown: sum(breakdown.categories.get(c, 0) for c in COMPUTING))


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a diagnosis can draw on: a trial's situation, the analysis of a trace, or both.

    Attributes:
        analysis: Of one rank; the breakdown of its busiest device is judged where there is no situation.
        late_part: Of its exposed communication: the share in which it waits for a late rank, as far as other ranks'
            traces show that. It is `rank_skew`'s, and no time of the network.
    """

    situation: Situation | None = None
    analysis: RankAnalysis | None = None
    late_part: float = 0.0

    @property
    def breakdown(self) -> Breakdown:
        if self.situation is not None:
            return self.situation.breakdown
        assert self.analysis is not None, "evidence is of a trial or of a trace"
        return busiest(self.analysis.breakdowns)

    @property
    def device_kind(self) -> str:
        if self.situation is not None:
            return self.situation.environment.hardware.device_kind
        return "cpu" if self.breakdown.device == "cpu" else "cuda"

    def share(self, *categories: Category) -> float:
        """Of the step, without waiting for late ranks."""
        return sum(self.own_part(category) * self.breakdown.share(category) for category in categories)

    def removable_share(self, *categories: Category) -> float:
        """As `share`: what would be gone without these categories."""
        return sum(self.own_part(category) * self.breakdown.removable_share(category) for category in categories)

    @property
    def late_share(self) -> float:
        """Of the step: waiting for a late rank while nothing is computed."""
        return self.late_part * self.breakdown.share(Category.COMMUNICATION)

    @property
    def late_removable_share(self) -> float:
        return self.late_part * self.breakdown.removable_share(Category.COMMUNICATION)

    def own_part(self, category: Category) -> float:
        """Of a category: the share that is not waiting for late ranks."""
        return 1.0 - self.late_part if category is Category.COMMUNICATION else 1.0


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Why a rule's condition holds, where that changes what to do."""

    name: str
    message: str
    advice: str
    strategies: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One thing to look for.

    Attributes:
        categories: Their joint share is compared with the thresholds.
        thresholds: Shares from which the rule is a note, a warning, high.
        message, advice: For people; `{share}` is filled in.
        strategies: What would act on it.
        devices: Kinds of device on which it makes sense.
        applies: A further condition.
        reach: The largest part of the share that the advice could save.
        measure: What is compared with the thresholds instead of the share; None where it is not known. Such a
            rule bounds no gain.
        cause: Tells causes apart that need different advice.
    """

    name: str
    categories: tuple[Category, ...]
    thresholds: tuple[float, float, float]
    message: str
    advice: str
    strategies: tuple[str, ...]
    devices: tuple[str, ...] = ("cpu", "cuda")
    applies: Callable[[Evidence], bool] = lambda evidence: True
    reach: float = 1.0
    measure: Callable[[Evidence], float | None] | None = None
    cause: Callable[[Evidence], Cause | None] = lambda evidence: None


def _products_would_pay(evidence: Evidence) -> bool:
    situation = evidence.situation
    if situation is None:
        return False
    peaks = situation.environment.calibration.matmul_flops_per_s
    fastest = max((peaks.get(d, 0.0) for d in ("bfloat16", "float16", "tf32")), default=0.0)
    return situation.choices.get("precision", {}).get("level") == "fp32" and fastest > 1.5 * peaks.get("float32", 0.0)


def _tensor_cores_idle(evidence: Evidence) -> bool:
    share = evidence.analysis.tensor_core_share if evidence.analysis else None
    return share is not None and share < 0.1


def _far_from_roofline(evidence: Evidence) -> bool:
    situation = evidence.situation
    floor = compute_floor_ns(situation) if situation is not None else 0.0
    return situation is not None and floor > 0 and situation.time_ns(COMPUTE) > 3 * floor


def _step_variation(evidence: Evidence) -> float | None:
    return evidence.analysis.step_time_cv if evidence.analysis else None


def _memory_filled(evidence: Evidence) -> float | None:
    """Share of the device's memory, or of the part that a rank has, that the allocator had reserved at its peak."""
    stats = evidence.analysis.memory if evidence.analysis else ()
    situation = evidence.situation
    parts = [device.memory_bytes for device in situation.environment.hardware.devices] if situation else []
    filled = [s.peak_reserved_bytes / min([s.total_memory_bytes, *parts]) for s in stats if s.total_memory_bytes]
    return max(filled, default=None)


def _copy_cause(evidence: Evidence) -> Cause | None:
    """From pinned memory already, where the trace names the copies so."""
    copies = [name for name in evidence.breakdown.copies if "HtoD" in name]
    if not copies or any("Pinned" not in name for name in copies):
        return None
    return Cause(
        name="pinned",
        message="they come from pinned memory already",
        advice="copy the next batch on another stream while this one computes, or send fewer bytes",
        strategies=("device_prefetch",),
    )


def _communication_cause(evidence: Evidence) -> Cause | None:
    """The network's part, where ranks were compared and some of it is waiting for a late one."""
    if evidence.late_share < SKEW_THRESHOLDS[0]:
        return None
    return Cause(
        name="network",
        message=f"waiting for a late rank, another {evidence.late_share:.0%}, is not counted in it",
        advice=COMMUNICATION_ADVICE,
        strategies=(
            "sharding",
            "ddp_buckets",
            "hierarchical_allreduce",
            "gradient_compression",
            "local_sgd",
            "nccl_settings",
            "micro_batch",
        ),
    )


def _input_cause(evidence: Evidence) -> Cause | None:
    """Restart, preprocessing or storage; None where nothing was measured of the loader's processes."""
    if evidence.share(Category.EPOCH_RESTART) > evidence.share(Category.DATA_WAIT):
        return Cause(
            name="restart",
            message="most of it starts the loader anew for every epoch",
            advice="keep the worker processes between epochs",
            strategies=("data_loading",),
        )
    activity = evidence.situation.input if evidence.situation else None
    if activity is None:
        return None
    if activity.num_workers:
        makers, compute, sleep = "the worker processes", "compute", "sleep"
    else:
        makers, compute, sleep = "the main process, which makes the batches itself,", "computes", "sleeps"
    if activity.runnable_share >= BUSY:
        return Cause(
            name="preprocessing",
            message=f"{makers} {compute} for {activity.runnable_share:.0%} of their time: samples cost much to make",
            advice="use as many worker processes as there are cores to spare, keep decoded samples, or make the "
            "transforms cheaper",
            strategies=("data_loading", "dataset_cache", "cpu_threads"),
        )
    return Cause(
        name="storage",
        message=f"{makers} {sleep} for {1 - activity.runnable_share:.0%} of their time, reading "
        f"{activity.read_bytes_per_s / 1e6:.0f} MB/s from storage: they wait for a disk, a network or a lock",
        advice="read ahead with more worker processes than cores, keep samples in memory or on a local disk, or "
        "pack small files",
        strategies=("data_loading", "dataset_cache"),
    )


RULES: tuple[Rule, ...] = (
    Rule(
        name="input_bound",
        categories=(Category.DATA_WAIT, Category.EPOCH_RESTART),
        thresholds=(0.05, 0.10, 0.20),
        message="input-bound: {share} of the step waits for data",
        advice="load with worker processes, keep them between epochs, or keep decoded samples",
        strategies=("data_loading", "dataset_cache", "cpu_threads"),
        cause=_input_cause,
    ),
    Rule(
        name="exposed_copies",
        categories=(Category.COPY_H2D,),
        thresholds=(0.03, 0.05, 0.15),
        message="{share} of the step copies batches to the device while it computes nothing",
        advice="pin memory, so that copies are asynchronous, and copy the next batch while this one computes",
        strategies=("data_loading", "device_prefetch"),
        devices=("cuda",),
        cause=_copy_cause,
    ),
    Rule(
        name="launch_bound",
        categories=(Category.HOST, Category.LAUNCH_LATENCY),
        thresholds=(0.03, 0.10, 0.30),
        message="launch-bound: for {share} of the step the device waits for the host to launch work",
        advice="launch less: replay the step as a CUDA graph, compile the model, fuse the optimizer, use larger "
        "micro-batches",
        strategies=("attention_mask", "cuda_graph", "compile", "optimizer_implementation", "micro_batch"),
        devices=("cuda",),
    ),
    Rule(
        name="python_bound",
        categories=(Category.HOST,),
        thresholds=(0.10, 0.20, 0.40),
        message="{share} of the step runs Python and dispatches operators",
        advice="run fewer, larger operators: compile the model, fuse the optimizer",
        strategies=("compile", "optimizer_implementation", "micro_batch"),
        devices=("cpu",),
    ),
    Rule(
        name="synchronisation",
        categories=(Category.SYNCHRONISATION,),
        thresholds=(0.02, 0.05, 0.15),
        message="for {share} of the step the device is empty because the host waits for it",
        advice="do not read values of the device in the step: no .item(), no print of a loss",
        strategies=(),
        devices=("cuda",),
    ),
    Rule(
        name="allocation",
        categories=(Category.ALLOCATION,),
        thresholds=(0.01, 0.03, 0.10),
        message="for {share} of the step the device is empty because memory is allocated or freed",
        advice="let the allocator keep its memory: steps of one shape, no empty_cache(), expandable segments",
        strategies=("allocator",),
        devices=("cuda",),
    ),
    Rule(
        name="blocked",
        categories=(Category.QUEUED,),
        thresholds=(0.05, 0.10, 0.30),
        message="for {share} of the step work is launched, but waits: for another stream, a peer or a full queue",
        advice="look for the collective or copy that the next kernel waits for, and for waits between streams",
        strategies=(),
        devices=("cuda",),
    ),
    Rule(
        name="exposed_communication",
        categories=(Category.COMMUNICATION,),
        thresholds=(0.05, 0.10, 0.30),
        message="{share} of the step communicates while nothing is computed",
        advice=COMMUNICATION_ADVICE,
        strategies=(
            "sharding",
            "ddp_buckets",
            "hierarchical_allreduce",
            "gradient_compression",
            "local_sgd",
            "nccl_settings",
            "micro_batch",
        ),
        cause=_communication_cause,
    ),
    Rule(
        name="pipeline_bubble",
        categories=(Category.PIPELINE_BUBBLE,),
        thresholds=(0.05, 0.10, 0.30),
        message="for {share} of the step a pipeline stage sends to or waits for its neighbour",
        advice="use more and smaller micro-batches, an interleaved schedule, or stages of equal length",
        strategies=("micro_batch",),
    ),
    Rule(
        name="recomputation",
        categories=(Category.RECOMPUTE,),
        thresholds=(0.05, 0.15, 0.25),
        message="{share} of the step computes the forward pass again",
        advice="checkpoint fewer blocks, as far as memory allows",
        strategies=("activation_checkpointing",),
    ),
    Rule(
        name="optimizer",
        categories=(Category.OPTIMIZER, Category.OPTIMIZER_HOST),
        thresholds=(0.05, 0.10, 0.25),
        message="the optimizer takes {share} of the step",
        reach=FUSED_OPTIMIZER,
        advice="update all parameters at once: a fused or multi-tensor implementation",
        strategies=("optimizer_implementation",),
    ),
    Rule(
        name="unfused",
        categories=(Category.ELEMENTWISE, Category.NORMALISATION, Category.REDUCTION),
        thresholds=(0.15, 0.30, 0.50),
        message="{share} of the step is element-wise work, normalisation and reductions, bound by memory",
        advice="fuse it: compile the model",
        strategies=("compile", "memory_format"),
    ),
    Rule(
        name="single_precision",
        categories=(Category.MATMUL, Category.ATTENTION),
        thresholds=(0.10, 0.20, 0.40),
        message="{share} of the step multiplies in FP32, although this device is faster in another format",
        reach=1 - 1 / FASTEST_PRODUCTS,
        advice="use TF32 or 16-bit products",
        strategies=("precision",),
        applies=_products_would_pay,
    ),
    Rule(
        name="idle_tensor_cores",
        categories=(Category.MATMUL, Category.ATTENTION),
        thresholds=(0.10, 0.20, 0.40),
        message="{share} of the step multiplies, hardly any of it on tensor cores",
        reach=1 - 1 / FASTEST_PRODUCTS,
        advice="use TF32 or 16-bit products, with dimensions that are multiples of 8",
        strategies=("precision",),
        devices=("cuda",),
        applies=_tensor_cores_idle,
    ),
    Rule(
        name="inefficient_compute",
        categories=COMPUTE,
        thresholds=(0.30, 0.50, 0.80),
        message="compute takes {share} of the step, more than three times its roofline",
        advice="use other thread counts, layouts and fusions",
        strategies=("compile", "cpu_threads", "memory_format", "micro_batch", "backend_flags"),
        applies=_far_from_roofline,
    ),
    Rule(
        name="unsteady_steps",
        categories=(),
        thresholds=(0.10, 0.20, 0.50),
        message="the steps' times scatter by {share} around their mean: a verdict on a few of them is uncertain",
        advice="profile more steps, after a longer warm-up, on a machine that is otherwise idle",
        strategies=(),
        measure=_step_variation,
    ),
    Rule(
        name="memory_nearly_full",
        categories=(),
        thresholds=(0.85, 0.90, 0.97),
        message="{share} of the device's memory is reserved at the peak",
        advice="checkpoint activations or use smaller micro-batches, before fragmentation stops the run",
        strategies=("activation_checkpointing", "sharding", "activation_compression", "allocator", "micro_batch"),
        devices=("cuda",),
        measure=_memory_filled,
    ),
)

UNKNOWN_PROBLEM = "profile again with more warm-up and less detail"
"""The advice where a record of an older version does not say which problem it is."""
_SEVERITIES = ("note", "warning", "high")


def diagnose(evidence: Evidence) -> tuple[Finding, ...]:
    """The findings of a breakdown, the largest bound first; only the capture's problems if it is bad."""
    quality = evidence.breakdown.quality
    if quality.problems:
        return tuple(map(_bad_capture, quality.problems, quality.problem_names or ("",) * len(quality.problems)))
    found = [finding for rule in RULES if (finding := _apply(rule, evidence)) is not None]
    return tuple(sorted(found, key=lambda finding: -finding.bound))


def _bad_capture(problem: str, name: str) -> Finding:
    return Finding(
        rule="bad_capture",
        severity="warning",
        message=f"the profile cannot be trusted: {problem}",
        advice=next((known.advice for known in PROBLEMS if known.name == name), UNKNOWN_PROBLEM),
        strategies=(),
        bound=0.0,
        evidence={"problem": name} if name else {},
    )


def diagnose_ranks(
    evidence: Mapping[int, Evidence],
    waits: Sequence[RankWait],
    collectives: Sequence[CollectiveStats],
    straggler: int | None,
) -> list[Finding]:
    """What only several ranks show: they wait for one of them.

    Buckets and bandwidth are not to blame for that: see TraceLens' separation of skew and latency. What is found
    here is no part of `exposed_communication`, so that both can be true without counting a wait twice.

    Args:
        evidence: By rank. The longest wait is judged, as a share of that rank's own step.
        straggler: The rank that the others wait for.
    """
    late = next((wait for wait in waits if wait.rank == straggler), None)
    others = [rank for rank in evidence if rank != straggler]
    waiting = max(others, key=lambda rank: evidence[rank].late_share, default=None)
    if late is None or waiting is None or evidence[waiting].late_share < SKEW_THRESHOLDS[0]:
        return []
    known = [c for c in collectives if c.skew_ns is not None and c.latency_ns is not None]
    skew_ns = sum((c.skew_ns or 0) * c.count for c in known)
    latency_ns = sum((c.latency_ns or 0) * c.count for c in known)
    share = evidence[waiting].late_share
    level = sum(share >= threshold for threshold in SKEW_THRESHOLDS) - 1
    return [
        Finding(
            rule="rank_skew",
            severity=_SEVERITIES[level],
            message=f"for {share:.0%} of the step rank {waiting} waits for rank {late.rank}, which arrives last in "
            f"{late.late_share:.0%} of the collectives: that is no time of the network",
            advice="balance the ranks' work and data, and look at that rank's own findings; buckets would not help",
            strategies=(),
            bound=evidence[waiting].late_removable_share,
            evidence={"skew_ms": round(skew_ns / 1e6, 4), "latency_ms": round(latency_ns / 1e6, 4), "rank": late.rank},
        )
    ]


def _apply(rule: Rule, evidence: Evidence) -> Finding | None:
    share = rule.measure(evidence) if rule.measure is not None else evidence.share(*rule.categories)
    if evidence.device_kind not in rule.devices or share is None or share < rule.thresholds[0]:
        return None
    if not rule.applies(evidence):
        return None
    level = sum(share >= threshold for threshold in rule.thresholds) - 1
    cause = rule.cause(evidence)
    message = rule.message.format(share=f"{share:.0%}")
    return Finding(
        rule=rule.name,
        severity=_SEVERITIES[level],
        message=f"{message}; {cause.message}" if cause else message,
        advice=cause.advice if cause else rule.advice,
        strategies=cause.strategies if cause else rule.strategies,
        bound=rule.reach * evidence.removable_share(*rule.categories),
        evidence={**_times(rule, evidence), **({"cause": cause.name} if cause else {}), **_places(rule, evidence)},
    )


def _times(rule: Rule, evidence: Evidence) -> dict[str, float | str]:
    """Milliseconds per step of each category, and of communication how much of it held compute up."""
    breakdown, own = evidence.breakdown, evidence.own_part
    times = {c.value: own(c) * breakdown.per_step_ns.get(c, 0.0) for c in rule.categories}
    blocking = [c for c in rule.categories if c.value in breakdown.blocking]
    held = {f"{c.value}_blocking": own(c) * breakdown.removable_ns(c) for c in blocking}
    return {f"{name}_ms": round(value / 1e6, 4) for name, value in {**times, **held}.items() if value > 0}


def _places(rule: Rule, evidence: Evidence) -> dict[str, float | str]:
    """Where it happens: the longest gaps blamed on it, and the longest kernels of its categories."""
    analysis, device = evidence.analysis, evidence.breakdown.device
    if analysis is None:
        return {}
    gaps = analysis.gaps[device].longest if device in analysis.gaps else ()
    found = [
        f"{gap.length_ns / 1e6:.3g} ms before {gap.operator_after or gap.kernel_after or 'the end'}"
        + (f" ({gap.source})" if gap.source else "")
        for gap in gaps
        if gap.category in rule.categories
    ]
    computing = [c for c in rule.categories if c in COMPUTING]
    found += [
        f"{kernel.name}: {kernel.total_ns / 1e6:.3g} ms in {kernel.count} runs"
        for kernel in analysis.kernels
        if kernel.category in computing
    ]
    return {f"at_{number}": place for number, place in enumerate(found[:PLACES], 1)}
