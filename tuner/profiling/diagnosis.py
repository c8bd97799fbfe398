"""What limits a step, from its breakdown: one table of rules.

A rule looks at exclusive shares of the (rescaled) step. It fires at its lowest threshold; the higher
ones raise its severity. A finding names its evidence, the advice, the strategies that would act on
it, and the most that they could save. Where the capture is bad, nothing is claimed but that.

The thresholds are those of torch-tb-profiler, TensorFlow's and XProf's rules and our own proposals:
see docs/diagnosis.md for each one's source.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tuner.profiling.bounds import Situation, compute_floor_ns, removable
from tuner.profiling.categories import COMPUTE, Category
from tuner.records import Finding


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
    """

    name: str
    categories: tuple[Category, ...]
    thresholds: tuple[float, float, float]
    message: str
    advice: str
    strategies: tuple[str, ...]
    devices: tuple[str, ...] = ("cpu", "cuda")
    applies: Callable[[Situation], bool] = lambda situation: True


def _products_would_pay(situation: Situation) -> bool:
    peaks = situation.environment.calibration.matmul_flops_per_s
    fastest = max((peaks.get(d, 0.0) for d in ("bfloat16", "float16", "tf32")), default=0.0)
    return situation.choices.get("precision", {}).get("level") == "fp32" and fastest > 1.5 * peaks.get("float32", 0.0)


def _far_from_roofline(situation: Situation) -> bool:
    floor = compute_floor_ns(situation)
    return floor > 0 and situation.time_ns(COMPUTE) > 3 * floor


RULES: tuple[Rule, ...] = (
    Rule(
        name="input_bound",
        categories=(Category.DATA_WAIT, Category.EPOCH_RESTART),
        thresholds=(0.05, 0.10, 0.20),
        message="input-bound: {share} of the step waits for data",
        advice="load with worker processes, keep them between epochs, or keep decoded samples",
        strategies=("data_loading", "dataset_cache", "cpu_threads"),
    ),
    Rule(
        name="exposed_copies",
        categories=(Category.COPY_H2D,),
        thresholds=(0.03, 0.05, 0.15),
        message="{share} of the step copies batches to the device while it computes nothing",
        advice="pin memory, so that copies are asynchronous",
        strategies=("data_loading",),
        devices=("cuda",),
    ),
    Rule(
        name="launch_bound",
        categories=(Category.HOST, Category.LAUNCH_LATENCY),
        thresholds=(0.03, 0.10, 0.30),
        message="launch-bound: for {share} of the step the device waits for the host to launch work",
        advice="launch less: compile the model, fuse the optimizer, use larger micro-batches",
        strategies=("compile", "optimizer_implementation", "micro_batch"),
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
        name="exposed_communication",
        categories=(Category.COMMUNICATION,),
        thresholds=(0.05, 0.10, 0.30),
        message="{share} of the step communicates while nothing is computed",
        advice="overlap communication with the backward pass, or communicate less often",
        strategies=("micro_batch",),
    ),
    Rule(
        name="optimizer",
        categories=(Category.OPTIMIZER, Category.OPTIMIZER_HOST),
        thresholds=(0.05, 0.10, 0.25),
        message="the optimizer takes {share} of the step",
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
        advice="use TF32 or 16-bit products",
        strategies=("precision",),
        applies=_products_would_pay,
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
)

_SEVERITIES = ("note", "warning", "high")


def diagnose(situation: Situation) -> tuple[Finding, ...]:
    """The findings of a breakdown, the largest bound first; only the capture's problems if it is bad."""
    problems = situation.breakdown.quality.problems
    if problems:
        return tuple(
            Finding(
                rule="bad_capture",
                severity="warning",
                message=f"the profile cannot be trusted: {problem}",
                advice="profile again with more warm-up and less detail",
                strategies=(),
                bound=0.0,
            )
            for problem in problems
        )
    found = [finding for rule in RULES if (finding := _apply(rule, situation)) is not None]
    return tuple(sorted(found, key=lambda finding: -finding.bound))


def _apply(rule: Rule, situation: Situation) -> Finding | None:
    share = removable(situation, *rule.categories)
    if situation.environment.hardware.device_kind not in rule.devices or share < rule.thresholds[0]:
        return None
    if not rule.applies(situation):
        return None
    level = sum(share >= threshold for threshold in rule.thresholds) - 1
    per_step_ms = {c.value: situation.time_ns((c,)) / 1e6 for c in rule.categories}
    return Finding(
        rule=rule.name,
        severity=_SEVERITIES[level],
        message=rule.message.format(share=f"{share:.0%}"),
        advice=rule.advice,
        strategies=rule.strategies,
        bound=share,
        evidence={f"{name}_ms": round(value, 4) for name, value in per_step_ms.items() if value > 0},
    )
