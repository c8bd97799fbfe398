"""Rules for compute: recomputation, the optimizer, fusion, layouts, precision, distance from the roofline."""

from __future__ import annotations

from steptune.tuner.costs.bounds import compute_floor_ns
from steptune.tuner.costs.categories import COMPUTE, Category
from steptune.tuner.profiling.evidence import Evidence
from steptune.tuner.profiling.facts import BF16, FP16, TF32
from steptune.tuner.profiling.rules.kernel_causes import fusable_cause
from steptune.tuner.profiling.rules.remedies import AT_ONCE, COMPILE, FUSE
from steptune.tuner.profiling.rules.rule import Remedy, Rule
from steptune.tuner.strategies.api import Settings
from steptune.tuner.strategies.cures import Cure
from steptune.tuner.strategies.precision.choice import PrecisionSetting

FASTEST_PRODUCTS = 8
"""Maximum ratio of the speed of tensor cores to the speed of FP32 units; the smallest ratio of any device is 2."""
FUSED_OPTIMIZER = 0.8
"""Maximum share of the optimizer's time that a fused optimizer saves: a fused optimizer still reads and writes every
parameter.
"""
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
        unless="the device has TF32 or BF16, or has no tensor cores",
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


COMPUTE_RULES: tuple[Rule, ...] = (
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
        cause=fusable_cause,
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
)
