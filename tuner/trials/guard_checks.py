"""Checks of the guard: deviations from the reference, their limits, and the devices on which a check may reject a
candidate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from steptune.tuner.guard.averages import LIMIT as AVERAGE_LIMIT
from steptune.tuner.guard.averages import Average, worst_average
from steptune.tuner.guard.between import Moves, worst_between
from steptune.tuner.guard.gradients import KINDS, Score, limits_of, scores, worst_of
from steptune.tuner.guard.mask_rates import ModuleMasks, worst_module
from steptune.tuner.guard.masks import Scatter, excess_of, excess_of_draws, shift_of_draws
from steptune.tuner.guard.outputs import ModuleOutput, worst_output
from steptune.tuner.guard.update_replay import LIMIT, Deviation, UpdateRule, worst_deviation
from steptune.tuner.records import GuardCheck
from steptune.tuner.trials.disturbance import FP32_ROUNDOFF, rounds_bias_corrections
from steptune.tuner.trials.gradient_watch import GradientReference, GradientWatch
from steptune.tuner.trials.mask_watch import MaskWatch
from steptune.tuner.trials.output_watch import OutputWatch
from steptune.tuner.trials.update_watch import UpdateWatch

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.job import TrainingJob

UPDATE_DEVICES = ("cpu", "cuda")
"""Devices on which the check of a replayed update may reject a candidate. Correct updates of
`benchmarks/guard_power.py` and `guard_device.py` reach less than half of the limit.
"""
OWN_UPDATE_DEVICES = ("cpu",)
"""Devices on which the check of a replayed update may reject a candidate, if the workload defines the step itself."""
COARSE_GRADIENT_DEVICES = ("cpu",)
"""Devices on which the check of 16-bit or TF32 gradients may reject a candidate. A difference that no rounding explains
(a gradient that is not finite, or that only one of the trainings has) may be rejected on all of `GUARDED_DEVICES`. On
an H100, correct changes of small trainings reach 0.73 of the limits; correct changes of GPT-2 in bfloat16 reach three
times the limit for the size of a tensor's gradient.
"""
OUTPUT_DEVICES = ("cpu",)
"""Devices on which the check of modules' 16-bit outputs may reject a candidate."""
GUARDED_DEVICES = ("cpu", "cuda")
"""Devices on which all other checks may reject a candidate: gradients in FP32, state, averages, and masks."""


def check_update(rules: Sequence[UpdateRule], watch: UpdateWatch, job: TrainingJob) -> GuardCheck:
    """Check that the candidate's updates follow the reference's rules, applied to the candidate's own gradients."""
    in_fp32 = rounds_bias_corrections(job.optimizer)
    tracks = [track.steps for track in watch.tracks]
    if len(tracks) != len(rules):
        found = Deviation(score=math.inf, step=1, name=f"one of {max(len(tracks), len(rules))} optimizers")
    else:
        deviations = [worst_deviation(rule, steps, in_fp32=in_fp32) for rule, steps in zip(rules, tracks, strict=True)]
        found = max(deviations, key=lambda deviation: deviation.score)
    detail = told_deviation(found) if found.name else ""
    devices = OWN_UPDATE_DEVICES if job.workload.has_custom_step else UPDATE_DEVICES
    return gated("replayed update", "update", found.score, LIMIT, detail, job.device.type in devices)


def check_between(moves: Moves, watch: UpdateWatch, device: torch.device) -> list[GuardCheck]:
    """Check that the candidate changes the same parameters between updates as today's settings do. Return no check if
    today's settings change some and no difference is found, because the values of these changes are not compared.
    """
    found = worst_between(watch.around, moves)
    if moves.ever and not found.name:
        return []
    gates = device.type in OWN_UPDATE_DEVICES
    return [gated("weights between updates", "update", found.score, LIMIT, found.detail, gates)]


def check_gradients(
    reference: GradientReference,
    watch: GradientWatch,
    *,
    unit_roundoff: float,
    device: torch.device,
    has_twin: bool,
    has_right_updates: bool,
) -> list[GuardCheck]:
    """Check that gradients, and other changes that a step makes, equal the reference's to within rounding.

    Args:
        has_twin: Whether gradients are compared in FP32 as well.
        has_right_updates: Whether the replay showed that the updates follow from the gradients.
    """
    limits = limits_of(unit_roundoff)
    checks: list[GuardCheck] = []
    parts = (
        ("gradients", "gradient", reference.gradients, watch.gradients, KINDS, has_twin),
        ("untrained state", "state", reference.changes, watch.changes, ("residual",), False),
    )
    for name, kind, wanted, found, kinds, twinned in parts:
        if not any(wanted.steps) and not any(found):
            continue
        is_far = kind == "gradient" and has_right_updates
        noise = reference.noise_of(watch, unit_roundoff) if is_far else wanted.noise_at(unit_roundoff)
        seen = scores(
            wanted.steps,
            noise,
            found,
            limits=limits,
            exact=reference.exact,
            has_twin=twinned,
            may_turn=kind == "gradient",
        )
        score = worst_of(seen, kinds)
        gates = device.type in devices_of(kind, score, unit_roundoff)
        checks.append(gated(name, kind, score.ratio, 1.0, told_score(score, name), gates))
    return checks


def devices_of(kind: str, score: Score, unit_roundoff: float) -> tuple[str, ...]:
    """Return the devices on which a comparison of tensors may reject candidates."""
    is_coarse = kind == "gradient" and unit_roundoff > FP32_ROUNDOFF and math.isfinite(score.ratio)
    return COARSE_GRADIENT_DEVICES if is_coarse else GUARDED_DEVICES


def check_twin(reference: GradientReference, watch: GradientWatch, device: torch.device) -> GuardCheck:
    """Check that the gradients of a candidate's twin (the same training in FP32) equal the reference's to within the
    rounding of FP32.
    """
    found = scores(
        reference.wide.steps,
        reference.wide.noise_at(FP32_ROUNDOFF),
        watch.gradients,
        limits=limits_of(FP32_ROUNDOFF),
        exact=range(len(reference.wide.steps)),
    )
    score, name = worst_of(found, KINDS), "gradients in FP32"
    return gated(name, "twin", score.ratio, 1.0, told_score(score, name), device.type in GUARDED_DEVICES)


def check_outputs(watch: OutputWatch, device: torch.device) -> list[GuardCheck]:
    """Check that modules' 16-bit outputs equal FP32 outputs for the same inputs; return no check without 16-bit
    outputs.
    """
    found = worst_output(output for output in watch.outputs.values() if output is not None)
    if found is None:
        return []
    return [output_check(found, gates=device.type in OUTPUT_DEVICES)]


def output_check(found: ModuleOutput, *, gates: bool) -> GuardCheck:
    """Return the check of the module output with the largest deviation."""
    detail = (
        f"the output of {found.name} differs from the FP32 output for the same inputs by {found.difference:.2g} "
        f"unit roundoffs, and in magnitude by {found.size:+.2g} unit roundoffs"
    )
    return gated("outputs of modules", "output", found.ratio, 1.0, detail, gates)


def check_averages(averages: Sequence[Average], watch: GradientWatch, device: torch.device) -> list[GuardCheck]:
    """Check that buffers with averages of the weights (such as EMA) give new weights the same share as in the
    reference; return no check without such buffers.
    """
    if not averages:
        return []
    found = worst_average(averages, watch.states)
    detail = (
        f"the average {found.name} gives the new weight a share of {found.share:.3g} at step {found.step}, but the "
        f"reference's average gives it {found.wanted:.3g}"
    )
    gates = device.type in GUARDED_DEVICES
    return [gated("averages", "average", found.score, AVERAGE_LIMIT, detail, gates)]


def check_draws(
    reference: GradientReference, scatter: Scatter, watch: GradientWatch, *, unit_roundoff: float, device: torch.device
) -> list[GuardCheck]:
    """Check that random masks (dropout) spread the gradients as much as in the reference, and that the mean gradient is
    the same.
    """
    rounding = reference.gradients.noise_at(unit_roundoff)[0].residuals
    excess = excess_of_draws(scatter, watch.gradients, rounding)
    shift = shift_of_draws(scatter, watch.gradients, rounding)
    gates = device.type in GUARDED_DEVICES
    detail = (
        f"the mean gradient over {len(watch.gradients)} draws of random masks is {shift:.2g} standard errors from "
        f"the reference's, allowed {scatter.shift_limit:.2g}"
    )
    return [
        gated("scatter of masks", "masks", abs(excess), scatter.limit, _told_excess(excess, scatter), gates),
        gated("mean over masks", "masks", shift, scatter.shift_limit, detail, gates),
    ]


def check_rates(masks: Mapping[str, ModuleMasks], watch: MaskWatch, device: torch.device) -> list[GuardCheck]:
    """Check that modules with dropout set elements to zero at the reference's rates; return no check if the reference
    has no such module.
    """
    found = worst_module(masks, watch.modules)
    if found is None:
        return []
    return [gated("rate of masks", "mask rate", found.ratio, 1.0, found.detail, device.type in GUARDED_DEVICES)]


def check_masks(
    scatter: Scatter, watch: GradientWatch, rounding: Mapping[str, float], device: torch.device
) -> GuardCheck:
    """Check that random masks (dropout) spread the gradients as much as in the reference.

    Args:
        rounding: Norm of the rounding effect on each tensor at one step.
    """
    excess = excess_of(scatter, watch.gradients, rounding)
    gates = device.type in GUARDED_DEVICES
    return gated("scatter of masks", "masks", abs(excess), scatter.limit, _told_excess(excess, scatter), gates)


def _told_excess(excess: float, scatter: Scatter) -> str:
    return (
        f"the spread of gradients that dropout and similar operations cause is {math.exp(excess):.2g} times the "
        f"reference's, allowed {math.exp(-scatter.limit):.2g} to {math.exp(scatter.limit):.2g} times"
    )


def gated(name: str, kind: str, observed: float, limit: float, detail: str, gates: bool) -> GuardCheck:
    """Return a check that rejects only on devices for which its limit was measured; on other devices it is only
    reported.
    """
    note = "" if gates or not detail else "; not enforced, because the limit was not measured on this device"
    passed = observed <= limit or not gates
    return GuardCheck(name=name, kind=kind, passed=passed, observed=observed, tolerance=limit, detail=detail + note)


def told_deviation(found: Deviation) -> str:
    """Describe the deviation of an update from its rule."""
    if math.isinf(found.score):
        return (
            f"{found.name} has no finite update at step {found.step}, or is updated at different steps than in the "
            "reference"
        )
    return (
        f"the update of {found.name} at step {found.step} differs from the optimizer's rule by {found.score:.2g} "
        f"times the expected rounding error, allowed {LIMIT:g} times (its rate by {found.rate:.2g}, its decay by "
        f"{found.decay:.2g})"
    )


def told_score(score: Score, part: str) -> str:
    """Describe the deviation of tensors from the reference's."""
    if not score.step:
        return ""
    if math.isinf(score.ratio):
        return f"{score.name or part} is not finite at step {score.step}, or exists in only one of the two trainings"
    what = {
        "residual": f"{score.name} differs",
        "slope": f"the magnitude of {score.name} differs",
        "scale": "the magnitude of all tensors together differs",
        "pooled": "all tensors together differ",
        "zeros": "the share of elements that are zero only in the candidate differs",
    }[score.kind]
    return (
        f"{part}: {what} at step {score.step} by {score.ratio:.2g} times the largest allowed rounding difference "
        f"(relative difference in magnitude {score.excess:+.2g})"
    )
