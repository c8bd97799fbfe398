"""Table of the rules that find the limits of a step in its breakdown.

A rule checks exclusive shares of the (rescaled) step. It fires at its lowest threshold; the higher
ones raise its severity. A finding names its evidence, the advice, the strategies that would act on
it, and the most that they could save. If the capture is bad, that is the only finding.

Gains of synchronisations, stalls, batches, allocations and late ranks are replayed (`replay`): the steps' graph is
simulated without them. Without a replay, the gain is a range from 0 to the share of the categories, marked as such.

Advice is a list of remedies. Each is left out if the step's facts (`facts`) show that it is enabled already; a rule
with no remedy left finds nothing. Host time inside stalls (`stalls`) is not dispatch: launching less would
not shorten it, so it has a separate finding.

The thresholds are those of torch-tb-profiler, TensorFlow's and XProf's rules and our own proposals:
see docs/diagnosis.md for each one's source.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from steptune.kernels.names import WITHOUT_WAITING
from steptune.tuner.costs.bounds import compute_floor_ns
from steptune.tuner.costs.categories import COMPUTE, COMPUTING, Category, classify_operator
from steptune.tuner.profiling.claims import Subject, claimed
from steptune.tuner.profiling.evidence import PLACES, SEVERITIES, Evidence
from steptune.tuner.profiling.facts import BF16, FP16, TF32
from steptune.tuner.profiling.gains import ASIDE, BESIDE, LATE_RULE, Gain, bound_of, by_worth
from steptune.tuner.profiling.process_groups import hosts_of, reach
from steptune.tuner.profiling.quality import PROBLEMS
from steptune.tuner.profiling.rank_findings import SKEW_THRESHOLDS
from steptune.tuner.profiling.replay.answers import (
    ALLOCATIONS,
    DISPATCH,
    EXTRA,
    LATE_RANKS,
    LAUNCHES,
    LOADER,
    STALLS,
    SYNCHRONISATION,
)
from steptune.tuner.profiling.stall_findings import STALL_ADVICE, STALL_RULE, diagnose_stalls
from steptune.tuner.profiling.stalls import cause_of, listed
from steptune.tuner.records import Finding, StepFacts
from steptune.tuner.strategies.api import Settings
from steptune.tuner.strategies.cures import Cure
from steptune.tuner.strategies.fused_kernels.choice import FusedKernelsSetting
from steptune.tuner.strategies.precision.choice import PrecisionSetting
from steptune.tuner.strategies.registry import strategies_for
from steptune.tuner.trace_records import RankAnalysis, Synchronisation
from steptune.tuner.wording import counted, milliseconds

BAD_CAPTURE = "bad_capture"
"""Name of the rule whose findings state why a capture cannot be trusted."""
FASTEST_PRODUCTS = 8
"""Maximum speed of tensor cores, as a multiple of the speed of FP32 units; the minimum multiple is 2."""
FUSED_OPTIMIZER = 0.8
"""Maximum share of the optimizer's time that a fused optimizer saves: a fused optimizer still reads and writes every
parameter.
"""
NOTABLE = 0.01
"""Minimum excess, as a share of the step, of a gain with other causes present over the gain without them, for that
excess to be reported.
"""
HIDDEN = 0.2
"""Minimum share of communication hidden behind compute for communication to count as already overlapped."""
EXTRA_ADVICE = (
    "run the additional work of these steps (an evaluation, samples, statistics) less often, or in parallel with "
    "training"
)
BUSY = 0.8
"""Minimum share of the loading time spent computing, or waiting for a core, for loading to count as CPU-bound."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Remedy for a finding: advice, and the strategies that carry it out.

    Attributes:
        advice: Text shown to users, as an imperative.
        cures: Effects by which strategies carry out the remedy.
        useful: True if the remedy is not enabled yet and the device supports it.
        unless: Text shown to users: condition under which the remedy is left out; empty for never.
    """

    advice: str
    cures: tuple[Cure, ...] = ()
    useful: Callable[[StepFacts], bool] = lambda facts: True
    unless: str = ""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Cause that calls for other advice than the rule's own."""

    name: str
    message: str
    remedies: tuple[Remedy, ...]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Rule for one limit of a step.

    Attributes:
        categories: Categories whose joint share is compared with the thresholds.
        thresholds: Minimum shares for the severities note, warning and high.
        message: Text shown to users; `{share}` is filled in.
        remedies: Possible remedies; the rule finds nothing if none of them is useful.
        devices: Kinds of device to which the rule applies.
        applies: Further condition for the rule to fire.
        reach: The largest part of the share that the advice could save.
        measure: Quantity that is compared with the thresholds instead of the share; None if it is unknown. Such a
            rule bounds no gain, unless it has categories: then the measure is a part of their share, and the bound.
        cause: Function that distinguishes causes that need different advice.
        of_causes: Cures that only remedies of causes have.
        replayed: Name of the replay's edit that removes the rule's cause. If the steps can be replayed, the gain
            of that edit is compared with the thresholds, and bounds what the advice could save.
        replayed_message: Text shown to users instead of `message` for a replayed gain.
        bounded_by: Name of another edit whose gain is the bound if it is larger.
        aside: True if another cause is removed first: then this finding is a note, after all findings with a gain.
        aside_message: Text shown to users instead of `replayed_message` in that case.
    """

    name: str
    categories: tuple[Category, ...]
    thresholds: tuple[float, float, float]
    message: str
    remedies: tuple[Remedy, ...]
    devices: tuple[str, ...] = ("cpu", "cuda")
    applies: Callable[[Evidence], bool] = lambda evidence: True
    reach: float = 1.0
    measure: Callable[[Evidence], float | None] | None = None
    cause: Callable[[Evidence], Cause | None] = lambda evidence: None
    of_causes: tuple[Cure, ...] = ()
    replayed: str = ""
    replayed_message: str = ""
    bounded_by: str = ""
    aside: Callable[[Evidence], bool] = lambda evidence: False
    aside_message: str = ""

    @property
    def strategies(self) -> tuple[str, ...]:
        """Return the strategies named in any remedy of the rule or of its causes."""
        return strategies_for(*(cure for remedy in self.remedies for cure in remedy.cures), *self.of_causes)


READ_NOTHING = Remedy(advice="do not read device values during the step: avoid .item() and printing the loss")
COMPILE = Remedy(
    advice="compile the model",
    cures=(Cure.FUSE_OPERATORS,),
    useful=lambda facts: not facts.compiled,
    unless="it is compiled",
)
REPLAY = Remedy(
    advice="replay the step as a CUDA graph",
    cures=(Cure.REPLAY_LAUNCHES,),
    useful=lambda facts: not facts.cuda_graphs,
    unless="CUDA graphs are replayed",
)
FUSABLE = frozenset({"Adam", "AdamW", "SGD", "Adagrad", ""})
"""PyTorch optimizers that have a fused implementation; "" because an optimizer of unknown class may be any of them."""


def _can_fuse(facts: StepFacts) -> bool:
    """Say whether the optimizer can be fused; if a trial's trace does not tell, the strategy itself decides later."""
    known = ("for_loop", "foreach", "") if facts.own_capture else ("for_loop", "foreach")
    return facts.optimizer in known and facts.optimizer_name in FUSABLE


FUSE = Remedy(
    advice="fuse the optimizer (fused=True)",
    cures=(Cure.FUSE_UPDATE,),
    useful=_can_fuse,
    unless="it is fused, has no fused implementation in PyTorch, or the trace does not show how it updates",
)
AT_ONCE = Remedy(
    advice="update all parameters at once (foreach=True, or a third-party fused implementation)",
    cures=FUSE.cures,
    useful=lambda facts: facts.optimizer == "for_loop" and facts.optimizer_name not in (*FUSABLE, "LBFGS"),
    unless="the optimizer already does, PyTorch has a fused version, or the trace does not show how it updates",
)
ENLARGE = Remedy(advice="use larger micro-batches", cures=(Cure.ENLARGE_PIECES,))
LAUNCH_LESS = (
    REPLAY,
    COMPILE,
    FUSE,
    AT_ONCE,
    Remedy(advice="use larger micro-batches", cures=(Cure.LAUNCH_PER_LARGER_PIECE,)),
)
COMMUNICATE_LESS = Remedy(
    advice="communicate less often or in smaller dtypes",
    cures=(Cure.COMMUNICATE_LESS,),
)
LOWER_PRECISION = (
    Remedy(
        advice="use TF32 or 16-bit matmuls, with dimensions that are multiples of 8",
        cures=(Cure.LOWER_PRECISION,),
        useful=lambda facts: TF32 in (facts.faster_dtypes or ()),
        unless="the device has no TF32",
    ),
    Remedy(
        advice="use BF16 or FP16 matmuls, with dimensions that are multiples of 8",
        cures=(Cure.LOWER_PRECISION,),
        useful=lambda facts: BF16 in (facts.faster_dtypes or ()) and TF32 not in (facts.faster_dtypes or ()),
        unless="the device also has TF32, or has no BF16",
    ),
    Remedy(
        advice="use FP16 matmuls, with dimensions that are multiples of 8 (this device has neither TF32 nor BF16)",
        cures=(Cure.LOWER_PRECISION,),
        useful=lambda facts: facts.faster_dtypes == (FP16,),
        unless="the device has TF32 or BF16, or no tensor cores",
    ),
)


def _products_would_pay(evidence: Evidence) -> bool:
    situation = evidence.situation
    if situation is None:
        return False
    peaks = situation.environment.calibration.matmul_flops_per_s
    fastest = max((peaks.get(d, 0.0) for d in ("bfloat16", "float16", "tf32")), default=0.0)
    if evidence.facts.matmul_dtype not in ("", "float32"):
        return False
    return Settings(situation.choices)[PrecisionSetting].level == "fp32" and fastest > 1.5 * peaks.get("float32", 0.0)


def _tensor_cores_idle(evidence: Evidence) -> bool:
    # Of a trial, the machine's own products were measured: single_precision speaks of them.
    analysis = evidence.analysis if evidence.situation is None else None
    share = analysis.tensor_core_share if analysis is not None else None
    return share is not None and share < 0.1 and evidence.facts.matmul_dtype == "float32"


def _far_from_roofline(evidence: Evidence) -> bool:
    situation = evidence.situation
    floor = compute_floor_ns(situation) if situation is not None else 0.0
    return situation is not None and floor > 0 and situation.time_ns(COMPUTE) > 3 * floor


def _converting(evidence: Evidence) -> float | None:
    """Return the share of the step spent converting layouts, in element-wise kernels."""
    share = evidence.facts.layout_ns / max(1.0, sum(evidence.breakdown.per_step_ns.values()))
    return min(share, evidence.share(Category.ELEMENTWISE))


def _step_variation(evidence: Evidence) -> float | None:
    """Return the variation of step times; None for Steptune's own captures, because trials are judged by their timing
    windows.
    """
    if evidence.facts.own_capture or evidence.analysis is None:
        return None
    return evidence.analysis.step_time_cv


def _extra_share(evidence: Evidence) -> float | None:
    """Return the share of the step spent on compute that only some of the steps do."""
    extra = evidence.analysis.extra_work if evidence.analysis is not None else None
    if extra is None:
        return None
    return min(extra.time_ns / max(1, evidence.breakdown.step_time_ns), evidence.share(*COMPUTE))


def _extra_cause(evidence: Evidence) -> Cause | None:
    """Return the cause that names the steps with extra work, and the kind of work if recorded."""
    extra = evidence.analysis.extra_work if evidence.analysis is not None else None
    if extra is None:
        return None
    kind = cause_of(extra.name)
    where = f"step{'' if len(extra.steps) == 1 else 's'} {listed(extra.steps)} of {evidence.breakdown.num_steps}"
    advice = STALL_ADVICE.get(kind, EXTRA_ADVICE)
    message = f"{where}, during {extra.name}" if extra.name else f"{where}, in operations that other steps do not run"
    return Cause(name=kind or "unknown", message=message, remedies=(Remedy(advice=advice),))


def _memory_filled(evidence: Evidence) -> float | None:
    """Return the peak memory that the allocator reserved, as a share of the device's memory or of a rank's part."""
    stats = evidence.analysis.memory if evidence.analysis else ()
    situation = evidence.situation
    parts = [device.memory_bytes for device in situation.environment.hardware.devices] if situation else []
    filled = [s.peak_reserved_bytes / min([s.total_memory_bytes, *parts]) for s in stats if s.total_memory_bytes]
    return max(filled, default=None)


def _copy_cause(evidence: Evidence) -> Cause | None:
    """Return the cause for copies that already come from pinned memory; None for other copies."""
    if evidence.facts.pinned_memory is not True:
        return None
    return Cause(
        name="pinned",
        message="batches already come from pinned memory",
        remedies=(
            Remedy(
                advice="copy the next batch on another stream while this one computes, or send fewer bytes",
                cures=(Cure.COPY_AHEAD,),
                useful=lambda facts: not facts.prefetched,
            ),
            Remedy(
                advice="send fewer bytes: copies already use a separate stream",
                cures=(Cure.COPY_AHEAD,),
                useful=lambda facts: facts.prefetched,
            ),
        ),
    )


def _communication_cause(evidence: Evidence) -> Cause | None:
    """Return the cause of exposed communication: `network` if waits for late ranks are reported separately,
    `overlapped` if enough communication already overlaps with compute; None otherwise.
    """
    breakdown = evidence.breakdown
    hidden = breakdown.overlapped.get(Category.COMMUNICATION.value, 0)
    overlaps = hidden >= HIDDEN * max(1, hidden + breakdown.categories.get(Category.COMMUNICATION.value, 0))
    overlap = Remedy(
        advice="overlap communication with the backward pass",
        cures=COMMUNICATE_LESS.cures,
        useful=lambda facts: not overlaps,
    )
    remedies = (overlap, COMMUNICATE_LESS)
    if evidence.late_share >= SKEW_THRESHOLDS[0]:
        message = f"waiting for a late rank takes another {evidence.late_share:.0%}, which is not included"
        return Cause(name="network", message=message, remedies=remedies)
    message = f"{hidden / breakdown.num_steps / 1e6:.3g} ms a step overlap with compute already"
    return Cause(name="overlapped", message=message, remedies=remedies) if overlaps else None


def _input_cause(evidence: Evidence) -> Cause | None:
    """Return the cause of waiting for data: epoch restart, preprocessing or storage; for a trace alone, the kind of
    loader.
    """
    if evidence.share(Category.EPOCH_RESTART) > evidence.share(Category.DATA_WAIT):
        return Cause(
            name="restart",
            message="most of this time is spent restarting the loader for every epoch",
            remedies=(Remedy(advice="keep the worker processes between epochs", cures=(Cure.KEEP_WORKERS,)),),
        )
    activity = evidence.situation.input if evidence.situation else None
    if activity is None:
        return _loader_cause(evidence.facts)
    if activity.num_workers:
        where = f"num_workers={activity.num_workers}: the worker processes"
    else:
        where = "num_workers=0: loading runs in the main process and"
    if activity.runnable_share >= BUSY:
        bound = "are CPU-bound" if activity.num_workers else "is CPU-bound"
        return Cause(
            name="preprocessing",
            message=f"{where} {bound} ({activity.runnable_share:.0%} of the time)",
            remedies=(
                Remedy(
                    advice="use as many worker processes as there are free cores, keep decoded samples, or make "
                    "the transforms cheaper",
                    cures=(Cure.MAKE_BATCHES_SOONER,),
                ),
            ),
        )
    sleeps = "are" if activity.num_workers else "is"
    return Cause(
        name="storage",
        message=f"{where} {sleeps} idle for {1 - activity.runnable_share:.0%} of the time, reading "
        f"{activity.read_bytes_per_s / 1e6:.0f} MB/s from storage: blocked on a disk, a network or a lock",
        remedies=(
            Remedy(
                advice="read ahead with more worker processes than cores, keep samples in memory or on a local disk, "
                "or pack small files",
                cures=(Cure.READ_LESS_OFTEN,),
            ),
        ),
    )


def _loader_cause(facts: StepFacts) -> Cause | None:
    """Return the cause for worker processes that are too slow; None if the main process loads, or the loader is
    unknown.
    """
    if facts.loader != "workers":
        return None
    count = f"{facts.num_workers} worker processes" if facts.num_workers else "worker processes"
    return Cause(
        name="workers",
        message=f"{count} already load batches, but do not keep up",
        remedies=(
            Remedy(
                advice="use more workers or prefetch more batches if cores are free, make samples cheaper to load, or "
                "keep decoded samples",
                cures=(Cure.MAKE_BATCHES_SOONER,),
            ),
        ),
    )


def _usable_kernels(evidence: Evidence) -> list[str]:
    """Return the kernels that could compute a part of the training and are not enabled yet."""
    situation = evidence.situation
    if situation is None:
        return []
    used = situation.choices.get(FusedKernelsSetting.strategy, {})
    return [n for n, refusal in situation.workload.model.kernel_refusals.items() if not refusal and not used.get(n)]


def _fusable_cause(evidence: Evidence) -> Cause | None:
    """Return the cause for parts of the model that a fused kernel could compute, but does not yet."""
    return _kernels_cause(_usable_kernels(evidence), "can compute a part of this work", COMPILE)


def _of_loss(evidence: Evidence) -> list[str]:
    """Return the usable kernels for parts of the loss that loop over images and read values from the device."""
    return [name for name in _usable_kernels(evidence) if name in WITHOUT_WAITING]


def _waiting_cause(evidence: Evidence) -> Cause | None:
    return _kernels_cause(_of_loss(evidence), "can assign the boxes of a batch without waiting", READ_NOTHING)


def _launching_cause(evidence: Evidence) -> Cause | None:
    found = _of_loss(evidence)
    return _kernels_cause(found, "can assign the boxes of a batch in a few launches", *LAUNCH_LESS)


def _kernels_cause(found: list[str], message: str, *otherwise: Remedy) -> Cause | None:
    if not found:
        return None
    kernels = " and ".join(found)
    fuse = Remedy(advice=f"use the fused kernels that apply: {kernels}", cures=(Cure.FUSE_PARTS,))
    return Cause(name="kernels", message=f"{kernels} {message}", remedies=(fuse, *otherwise))


RULES: tuple[Rule, ...] = (
    Rule(
        name="input_bound",
        categories=(Category.DATA_WAIT, Category.EPOCH_RESTART),
        thresholds=(0.05, 0.10, 0.20),
        message="input-bound: {share} of the step waits for data",
        remedies=(
            Remedy(
                advice="load with worker processes, keep them between epochs, or keep decoded samples",
                cures=(Cure.MAKE_BATCHES_SOONER,),
            ),
        ),
        cause=_input_cause,
        replayed=LOADER,
        replayed_message="input-bound: with batches always ready the step would be {share} shorter",
    ),
    Rule(
        name="exposed_copies",
        categories=(Category.COPY_H2D,),
        thresholds=(0.03, 0.05, 0.15),
        message="{share} of the step is spent copying batches to the device while it computes nothing",
        remedies=(
            Remedy(
                advice="pin memory, so that copies are asynchronous, and copy the next batch while this one computes",
                cures=(Cure.PIN_BATCHES, Cure.COPY_AHEAD),
            ),
        ),
        devices=("cuda",),
        cause=_copy_cause,
    ),
    Rule(
        name="launch_bound",
        categories=(Category.HOST, Category.LAUNCH_LATENCY),
        thresholds=(0.02, 0.10, 0.30),
        message="launch-bound: for {share} of the step the device waits for the host to launch work",
        remedies=LAUNCH_LESS,
        cause=_launching_cause,
        of_causes=(Cure.FUSE_PARTS,),
        devices=("cuda",),
        replayed=DISPATCH,
        replayed_message="launch-bound: apart from stalls and waits, launches take {share} of the step",
        bounded_by=LAUNCHES,
        aside=lambda evidence: evidence.sets_launches_aside,
        aside_message="apart from stalls and waits, launches take {share} of the step",
    ),
    Rule(
        name="python_bound",
        categories=(Category.HOST,),
        thresholds=(0.10, 0.20, 0.40),
        message="{share} of the step is spent running Python and dispatching operators",
        remedies=(COMPILE, FUSE, AT_ONCE, ENLARGE),
        devices=("cpu",),
    ),
    Rule(
        name="synchronisation",
        categories=(Category.SYNCHRONISATION,),
        thresholds=(0.02, 0.05, 0.15),
        message="for {share} of the step the device is idle because the host waits for it",
        remedies=(READ_NOTHING,),
        cause=_waiting_cause,
        of_causes=(Cure.FUSE_PARTS,),
        devices=("cuda",),
        replayed=SYNCHRONISATION,
        replayed_message="the host waits for the device, which empties the launch queue: without these waits the step "
        "would be {share} shorter",
    ),
    Rule(
        name="allocation",
        categories=(Category.ALLOCATION,),
        thresholds=(0.01, 0.03, 0.10),
        message="for {share} of the step the device is idle because memory is allocated or freed",
        remedies=(
            Remedy(
                advice=(
                    "let the allocator reuse its memory: keep tensor shapes constant, do not call empty_cache(), "
                    "or use expandable segments"
                ),
                cures=(Cure.KEEP_ALLOCATED,),
            ),
        ),
        devices=("cuda",),
        replayed=ALLOCATIONS,
        replayed_message="without allocating and freeing memory the step would be {share} shorter",
    ),
    Rule(
        name="blocked",
        categories=(Category.QUEUED,),
        thresholds=(0.05, 0.10, 0.30),
        message="for {share} of the step launched work waits for another stream, a peer or a full queue",
        remedies=(
            Remedy(
                advice="look for the collective or copy that the next kernel waits for, and for waits between streams"
            ),
        ),
        devices=("cuda",),
    ),
    Rule(
        name="exposed_communication",
        categories=(Category.COMMUNICATION,),
        thresholds=(0.05, 0.10, 0.30),
        message="{share} of the step is spent communicating while no compute runs",
        remedies=(
            Remedy(advice="overlap communication with the backward pass", cures=COMMUNICATE_LESS.cures),
            COMMUNICATE_LESS,
        ),
        cause=_communication_cause,
    ),
    Rule(
        name="pipeline_bubble",
        categories=(Category.PIPELINE_BUBBLE,),
        thresholds=(0.05, 0.10, 0.30),
        message="for {share} of the step a pipeline stage sends to or waits for its neighbour",
        remedies=(
            Remedy(
                advice="use more and smaller micro-batches, an interleaved schedule, or stages of equal duration",
                cures=(Cure.SHRINK_PIECES,),
            ),
        ),
    ),
    Rule(
        name="recomputation",
        categories=(Category.RECOMPUTE,),
        thresholds=(0.05, 0.15, 0.25),
        message="{share} of the step recomputes the forward pass",
        remedies=(Remedy(advice="checkpoint fewer blocks, as far as memory allows", cures=(Cure.RECOMPUTE_LESS,)),),
    ),
    Rule(
        name="optimizer",
        categories=(Category.OPTIMIZER, Category.OPTIMIZER_HOST),
        thresholds=(0.05, 0.10, 0.25),
        message="the optimizer takes {share} of the step",
        reach=FUSED_OPTIMIZER,
        remedies=(FUSE, AT_ONCE),
    ),
    Rule(
        name="unfused",
        categories=(Category.ELEMENTWISE, Category.NORMALISATION, Category.REDUCTION),
        thresholds=(0.15, 0.30, 0.50),
        message="{share} of the step is memory-bound element-wise work, normalisation and reductions",
        remedies=(COMPILE,),
        cause=_fusable_cause,
        of_causes=(Cure.FUSE_PARTS,),
    ),
    Rule(
        name="layout_conversions",
        categories=(Category.ELEMENTWISE,),
        thresholds=(0.05, 0.10, 0.20),
        message="{share} of the step is spent converting tensors between NCHW and NHWC for convolutions",
        remedies=(Remedy(advice="keep model and batches in channels_last", cures=(Cure.CHOOSE_LAYOUT,)),),
        devices=("cuda",),
        measure=_converting,
    ),
    Rule(
        name="single_precision",
        categories=(Category.MATMUL, Category.ATTENTION),
        thresholds=(0.10, 0.20, 0.40),
        message="{share} of the step is FP32 matmul; this device is faster in a lower precision",
        reach=1 - 1 / FASTEST_PRODUCTS,
        remedies=(Remedy(advice="use TF32 or 16-bit matmuls", cures=(Cure.LOWER_PRECISION,)),),
        applies=_products_would_pay,
    ),
    Rule(
        name="idle_tensor_cores",
        categories=(Category.MATMUL, Category.ATTENTION),
        thresholds=(0.10, 0.20, 0.40),
        message="{share} of the step is FP32 matmul, which uses no tensor cores",
        reach=1 - 1 / FASTEST_PRODUCTS,
        remedies=LOWER_PRECISION,
        devices=("cuda",),
        applies=_tensor_cores_idle,
    ),
    Rule(
        name="inefficient_compute",
        categories=COMPUTE,
        thresholds=(0.30, 0.50, 0.80),
        message="compute takes {share} of the step and runs at under a third of peak",
        remedies=(
            COMPILE,
            Remedy(
                advice="try other thread counts, memory layouts and kernels",
                cures=(Cure.TUNE_COMPUTE,),
            ),
        ),
        applies=_far_from_roofline,
    ),
    Rule(
        name="extra_work",
        categories=COMPUTE,
        thresholds=(0.05, 0.15, 0.30),
        message="{share} of the steps' time is compute that only some steps run",
        remedies=(Remedy(advice=EXTRA_ADVICE),),
        measure=_extra_share,
        cause=_extra_cause,
        replayed=EXTRA,
        replayed_message="without work that only some of the steps have, steps would be {share} shorter",
    ),
    Rule(
        name="unsteady_steps",
        categories=(),
        thresholds=(0.10, 0.20, 0.50),
        message="step times vary by {share} around their mean: conclusions from a few steps are uncertain",
        remedies=(Remedy(advice="profile more steps, after a longer warm-up, on a machine that is otherwise idle"),),
        measure=_step_variation,
    ),
    Rule(
        name="memory_nearly_full",
        categories=(),
        thresholds=(0.85, 0.90, 0.97),
        message="{share} of the device's memory is reserved at the peak",
        remedies=(
            Remedy(
                advice="checkpoint activations",
                cures=(Cure.RECOMPUTE_MORE,),
                useful=lambda facts: not facts.checkpointed,
                unless="it is done",
            ),
            Remedy(
                advice=(
                    "use smaller micro-batches or shard the model, before fragmentation causes an out-of-memory error"
                ),
                cures=(Cure.HOLD_LESS,),
            ),
        ),
        devices=("cuda",),
        measure=_memory_filled,
    ),
)

SUBJECTS: Mapping[str, Subject] = {
    **{rule.name: Subject(categories=rule.categories, cause=rule.replayed) for rule in RULES},
    STALL_RULE: Subject(categories=(Category.HOST,), cause=STALLS),
    LATE_RULE: Subject(categories=(Category.COMMUNICATION,), cause=LATE_RANKS),
}
"""Categories and replayed cause of every rule."""
UNKNOWN_PROBLEM = "profile again with more warm-up and less detail"
"""Advice if an older record does not name the problem of its capture."""


def diagnose(evidence: Evidence) -> tuple[Finding, ...]:
    """Return the findings of a breakdown, the largest gain first; for a bad capture, only its problems."""
    quality = evidence.breakdown.quality
    if quality.problems:
        names = quality.problem_names or ("",) * len(quality.problems)
        own = evidence.facts.own_capture
        return tuple(_bad_capture(problem, name, own) for problem, name in zip(quality.problems, names, strict=True))
    applied = [*(_apply(rule, evidence) for rule in RULES), diagnose_stalls(evidence)]
    found = by_worth(finding for finding in applied if finding is not None)
    return claimed(found, [evidence], SUBJECTS)


def _bad_capture(problem: str, name: str, own: bool) -> Finding:
    known = next((known for known in PROBLEMS if known.name == name), None)
    advice = UNKNOWN_PROBLEM if known is None else known.own_advice if own else known.advice
    return Finding(
        rule=BAD_CAPTURE,
        severity="warning",
        message=f"the profile cannot be trusted: {problem}",
        advice=advice,
        strategies=(),
        bound=0.0,
        evidence={"problem": name} if name else {},
    )


def _apply(rule: Rule, evidence: Evidence) -> Finding | None:
    share = rule.measure(evidence) if rule.measure is not None else evidence.share(*rule.categories)
    if evidence.device_kind not in rule.devices or share is None:
        return None
    gain = evidence.gain(rule.replayed, share) if rule.replayed else None
    aside = rule.aside(evidence)
    message = _message(rule, gain, share, aside=aside)
    if gain is not None and gain.expected is not None:
        share = gain.expected
    if share < rule.thresholds[0] or not rule.applies(evidence):
        return None
    level = 0 if aside else sum(share >= threshold for threshold in rule.thresholds) - 1
    cause = rule.cause(evidence)
    facts = evidence.facts
    remedies = [remedy for remedy in (cause.remedies if cause else rule.remedies) if remedy.useful(facts)]
    if not remedies:
        return None
    beside = evidence.gain(rule.bounded_by, share) if rule.bounded_by else None
    return Finding(
        rule=rule.name,
        severity=SEVERITIES[level],
        message=f"{message}; {cause.message}" if cause else message,
        advice=", ".join(remedy.advice for remedy in remedies),
        strategies=strategies_for(*(cure for remedy in remedies for cure in remedy.cures)),
        bound=max(_most(rule, evidence, gain, share), _beside(beside)),
        evidence={
            **(gain.evidence if gain is not None else {}),
            **({BESIDE: f"{beside.high:.1%}"} if beside and gain and _beside(beside) > gain.bound + NOTABLE else {}),
            **({ASIDE: "others come first"} if aside else {}),
            **_times(rule, evidence),
            **({"cause": cause.name} if cause else {}),
            **_places(rule, evidence),
        },
    )


def _message(rule: Rule, gain: Gain | None, share: float, *, aside: bool) -> str:
    """Return the message of a finding, with its simulated gain if there is one."""
    if gain is None or gain.expected is None:
        return (rule.aside_message if aside else rule.message).format(share=f"{'at most ' if aside else ''}{share:.0%}")
    return (rule.aside_message if aside else rule.replayed_message).format(share=gain.share)


def _most(rule: Rule, evidence: Evidence, gain: Gain | None, share: float) -> float:
    """Return the maximum share of the step that a rule's advice could save."""
    removable = evidence.removable_share(*rule.categories)
    return bound_of(gain, rule.reach * (min(removable, share) if rule.measure is not None else removable), share)


def _beside(gain: Gain | None) -> float:
    """Return the bound of a gain simulated with other causes present; 0 if it was not simulated."""
    return gain.bound if gain is not None and gain.expected is not None else 0.0


def _times(rule: Rule, evidence: Evidence) -> dict[str, float | str]:
    """Return milliseconds per step of each category; for communication also the part that delayed compute."""
    breakdown, own = evidence.breakdown, evidence.own_part
    times = {c.value: own(c) * breakdown.per_step_ns.get(c, 0.0) for c in rule.categories}
    blocking = [c for c in rule.categories if c.value in breakdown.blocking]
    held = {f"{c.value}_blocking": own(c) * breakdown.removable_ns(c) for c in blocking}
    return {f"{name}_ms": round(value / 1e6, 4) for name, value in {**times, **held}.items() if value > 0}


def _waiting(one: Synchronisation) -> str:
    """Describe a place where the host waits, with its cost."""
    where = ", ".join(filter(None, (one.source, one.module)))
    costs = "" if one.saved_share is None else f", costs {one.saved_share:.1%} of the step"
    return f"{one.call}{costs}" + (f" ({where})" if where else "")


def _exchanges(analysis: RankAnalysis) -> list[str]:
    """Describe the collectives with the most exposed time, and how many hosts their groups span."""
    exposed = sorted((one for one in analysis.collectives if one.exposed_ns > 0), key=lambda one: -one.exposed_ns)
    return [
        f"{one.name} of {counted(one.group_size, 'rank')}"
        + (f" {where}" if (where := reach(hosts_of(analysis.groups, one.group))) else "")
        + f": {milliseconds(one.exposed_ns)} exposed in {counted(one.count, 'call')}"
        for one in exposed
    ]


def _places(rule: Rule, evidence: Evidence) -> dict[str, float | str]:
    """Return places as evidence of a finding: its longest gaps, and the longest kernels of its categories."""
    analysis, device = evidence.analysis, evidence.breakdown.device
    if analysis is None:
        return {}
    gaps = analysis.gaps[device].longest if device in analysis.gaps else ()
    stalls = evidence.breakdown.stalls
    limit_ns = stalls.limit_ns if stalls is not None else math.inf
    found = [_waiting(one) for one in analysis.synchronisations if Category.SYNCHRONISATION in rule.categories]
    found += [
        f"{milliseconds(gap.length_ns)} before {gap.operator_after or gap.kernel_after or 'the end'}"
        + (f" ({place})" if (place := ", ".join(filter(None, (gap.source, gap.module)))) else "")
        for gap in gaps
        if gap.category in rule.categories and not (gap.category == Category.HOST and gap.length_ns > limit_ns)
    ]
    if Category.COMMUNICATION in rule.categories:
        found += _exchanges(analysis)
    computing = [c for c in rule.categories if c in COMPUTING]
    found += [
        f"{operator.name}: {operator.device_ns / 1e6:.3g} ms in {operator.count} calls ({where})"
        for operator in analysis.operators
        if (where := ", ".join(filter(None, (operator.source, operator.module))))
        and classify_operator(operator.name) in computing
    ][:1]
    found += [
        f"{kernel.name}: {kernel.total_ns / 1e6:.3g} ms in {kernel.count} runs"
        for kernel in analysis.kernels
        if kernel.category in computing
    ]
    return {f"at_{number}": place for number, place in enumerate(found[:PLACES], 1)}
