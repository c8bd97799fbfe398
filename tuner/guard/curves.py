"""Comparison of a candidate's losses, gradient norms and first update with the reference's.

Tolerances come from repeated and disturbed runs of the reference. This module only judges; the steps run in
`trials/guard_protocol.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from steptune.tuner.guard.averages import Average
from steptune.tuner.guard.between import Moves
from steptune.tuner.guard.gradients import REPETITIONS
from steptune.tuner.guard.mask_rates import ModuleMasks
from steptune.tuner.guard.update_replay import RELATIVE, UpdateRule
from steptune.tuner.records import Choice, GuardCheck, Record

if TYPE_CHECKING:
    import torch

FACTOR = 10.0
SEED_SPREADS = 5.0
FLOOR_ROUNDOFFS = 4.0
FLOOR = 1e-6
"""Floor of relative tolerances: a few units in the last place of the compared FP32 figures."""
COSINE_ROUNDOFF = 1e-13
"""Minimum difference of two vectors, as one minus their cosine: smaller values count as zero, because rounding of the
cosine alone reaches them.
"""
MIN_PROGRESS = 0.9
"""Minimum share of the reference's fall in loss that a lossy candidate must reach."""
ARITHMETICS = {2.0**-24: "FP32", 2.0**-11: "TF32 or float16", 2.0**-8: "bfloat16"}


class Protocol(Record):
    """Number of steps in each part of the guard's protocol, and how randomness is switched off."""

    num_pointwise: int
    num_curve: int
    num_horizon: int
    randomness: str
    """Kind of the model's randomness, as in `WorkloadFacts.randomness`."""
    seed: int = 0
    num_disturbed: int = 2
    """Number of runs that are disturbed at each unit roundoff."""
    num_audits: int = 0
    """Number of further pointwise steps that each begin from the initial parameters."""
    num_draws: int = 0
    """Number of steps of a candidate that each begin from the initial parameters and draw new masks. These steps
    replace the curve part of the protocol.
    """

    @property
    def exact(self) -> tuple[int, ...]:
        """Indices of those pointwise and audit steps that begin from the initial parameters."""
        return (0, *range(self.num_pointwise, self.num_pointwise + self.num_audits))


class Curve(Record):
    """Losses, gradient norms and the first update of one run of the protocol."""

    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    update_norm: float
    curve_losses: tuple[float, ...] = ()
    horizon_losses: tuple[float, ...] = ()
    skipped_steps: int = 0

    @property
    def finite(self) -> bool:
        return all(math.isfinite(v) for v in (*self.losses, *self.curve_losses, *self.horizon_losses, self.update_norm))


class Tolerance(Record):
    """Relative deviations, by step, that rounding at one unit roundoff causes."""

    loss: tuple[float, ...]
    gradient_norm: tuple[float, ...]
    update_norm: float
    update_direction: float
    curve_loss: float = 0.0
    """Relative deviation of the mean loss over the curve part of the protocol, between runs with the same dropout
    masks.
    """


class GuardReference(Record):
    """Reference of a study, with which the guard compares candidates."""

    protocol: Protocol
    curve: Curve
    repetition: Tolerance
    """Tolerance between runs with the same seed and settings in one process; it also covers runs in several processes
    as soon as such runs have been compared.
    """
    rounding: dict[str, Tolerance]
    """Tolerances by unit roundoff (as `float.hex`)."""
    bias_corrections: Tolerance | None = None
    """Largest effect of rounding the bias corrections in the update, if candidates or the reference may round them."""
    seed_means: tuple[float, ...] = ()
    """Mean loss over the curve part of the protocol, for each seed."""
    horizon_ends: tuple[float, ...] = ()
    """Mean loss of the last quarter of the horizon, for each run of the reference."""
    choices: dict[str, Choice] = {}  # noqa: RUF012 (a struct copies its defaults)
    """Settings of the reference."""
    rule: UpdateRule | None = None
    """Update rule of the optimizer, if its replay on the reference agrees with the reference's own updates."""
    further_rules: tuple[UpdateRule, ...] = ()
    """Update rules of the other optimizers, if the workload defines a step in which several optimizers step."""
    why_no_rule: str = ""
    moves: Moves | None = None
    """Parameters that a step defined by the workload changes between updates; None for other steps."""
    own_roundoff: float = 0.0
    """Unit roundoff of the reference's own arithmetic; 0 in references of versions that did not record it."""
    eager: bool = False
    """True if the reference was made without the compilation in its settings."""
    averages: tuple[Average, ...] = ()
    """Buffers that hold averages of weights."""
    masks: dict[str, ModuleMasks] = {}  # noqa: RUF012
    """Masks by module, for modules that set a part of their input to zero."""
    peak_bytes: int = 0
    """Peak of device memory, in bytes, of the rank that uses the most; 0 on a CPU."""


def deviations(
    curve: Curve, update: dict[str, torch.Tensor], reference: Curve, reference_update: dict[str, torch.Tensor]
) -> Tolerance:
    """Return the relative deviations of one run from the reference."""
    return Tolerance(
        loss=_relative(curve.losses, reference.losses),
        gradient_norm=_relative(curve.gradient_norms, reference.gradient_norms),
        update_norm=_relative((curve.update_norm,), (reference.update_norm,))[0],
        update_direction=_turned(update, reference_update),
        curve_loss=_of_curves(curve.curve_losses, reference.curve_losses),
    )


def _of_curves(losses: Sequence[float], references: Sequence[float]) -> float:
    """Return the relative deviation of the mean loss; 0 unless both runs have a curve."""
    return _relative((_mean(losses),), (_mean(references),))[0] if losses and references else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def _relative(values: Sequence[float], references: Sequence[float]) -> tuple[float, ...]:
    scale = max((abs(r) for r in references), default=0.0) * 1e-3
    return tuple(
        abs(v - r) / max(abs(r), scale, 1e-30) if math.isfinite(v) else math.inf
        for v, r in zip(values, references, strict=True)
    )


def _turned(update: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """Return one minus the cosine between two updates; infinite if these update different parameters."""
    if update.keys() != reference.keys():
        return math.inf
    dot = sum(float((update[name].double() * reference[name].double()).sum()) for name in reference)
    first = math.sqrt(sum(float(piece.double().pow(2).sum()) for piece in update.values()))
    second = math.sqrt(sum(float(piece.double().pow(2).sum()) for piece in reference.values()))
    if first == 0 or second == 0:
        return 0.0 if first == second else 1.0
    turned = 1.0 - dot / (first * second)
    return turned if turned > COSINE_ROUNDOFF else 0.0


def widest(tolerances: Sequence[Tolerance]) -> Tolerance:
    """Return the largest deviation of several runs, by step; later steps allow at least the deviations of earlier
    ones.
    """
    return Tolerance(
        loss=_running_max([t.loss for t in tolerances]),
        gradient_norm=_running_max([t.gradient_norm for t in tolerances]),
        update_norm=max(t.update_norm for t in tolerances),
        update_direction=max(t.update_direction for t in tolerances),
        curve_loss=max(t.curve_loss for t in tolerances),
    )


def widened(rounding: Tolerance, bound: Tolerance) -> Tolerance:
    """Widen tolerances by a bound. Checks multiply tolerances by `FACTOR`, because samples determine them; a bound must
    count only once, so it is divided by `FACTOR` here.
    """

    def plus(ours: tuple[float, ...], theirs: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(our + their / FACTOR for our, their in zip(ours, theirs, strict=True))

    return Tolerance(
        loss=plus(rounding.loss, bound.loss),
        gradient_norm=plus(rounding.gradient_norm, bound.gradient_norm),
        update_norm=rounding.update_norm + bound.update_norm / FACTOR,
        update_direction=rounding.update_direction + bound.update_direction / FACTOR,
        curve_loss=rounding.curve_loss + bound.curve_loss / FACTOR,
    )


def _running_max(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    result: list[float] = []
    for column in zip(*rows, strict=True):
        result.append(max([*column, *result[-1:]]))
    return tuple(result)


def compare(
    reference: GuardReference,
    reference_update: dict[str, torch.Tensor],
    curve: Curve,
    update: dict[str, torch.Tensor],
    *,
    unit_roundoff: float,
    lossy: bool,
    rounds_bias_corrections: bool = False,
) -> list[GuardCheck]:
    """Compare one candidate's run with the reference and return the checks."""
    if not curve.finite:
        return [
            GuardCheck(
                name="finite loss",
                kind="pointwise",
                passed=False,
                observed=math.inf,
                tolerance=0.0,
                detail="the loss or the update is not finite",
            )
        ]
    if lossy:
        return [_check_horizon(reference, curve)]
    repetition = check_repetition(reference)
    rounding = _rounding(reference, unit_roundoff)
    if rounds_bias_corrections and reference.bias_corrections is not None:
        rounding = widened(rounding, reference.bias_corrections)
    checks = _check_pointwise(reference, reference_update, curve, update, unit_roundoff, rounding)
    if reference.seed_means:
        checks.append(_check_curve(reference, curve, unit_roundoff, rounding))
    return checks if repetition is None else [repetition, *checks]


def _check_pointwise(
    reference: GuardReference,
    reference_update: dict[str, torch.Tensor],
    curve: Curve,
    update: dict[str, torch.Tensor],
    unit_roundoff: float,
    allowed: Tolerance,
) -> list[GuardCheck]:
    found = deviations(curve, update, reference.curve, reference_update)
    floor = max(FLOOR_ROUNDOFFS * unit_roundoff, FLOOR)
    pairs = {
        "loss": (found.loss, allowed.loss),
        "gradient norm": (found.gradient_norm, allowed.gradient_norm),
        "size of the first update": ((found.update_norm,), (allowed.update_norm,)),
        "direction of the first update": ((found.update_direction,), (allowed.update_direction,)),
    }
    checks = []
    for name, (observed, tolerances) in pairs.items():
        limits = [FACTOR * tolerance + floor for tolerance in tolerances]
        step = max(range(len(observed)), key=lambda k: observed[k] - limits[k], default=0)
        checks.append(
            GuardCheck(
                name=name,
                kind="pointwise",
                passed=all(o <= limit for o, limit in zip(observed, limits, strict=True)),
                observed=observed[step] if observed else 0.0,
                tolerance=limits[step] if limits else 0.0,
                detail=f"{name} differs by {observed[step]:.2g} at step {step + 1}, allowed {limits[step]:.2g}"
                if observed
                else "",
            )
        )
    return checks


def _rounding(reference: GuardReference, unit_roundoff: float) -> Tolerance:
    """Return the tolerance at this roundoff, or at the next coarser one that was measured. The tolerance is widened to
    the difference between runs of the same settings, up to that difference's own bound.
    """
    rounding = _measured(reference, unit_roundoff)
    return widest([rounding, _at_most(reference.repetition, _repetition_bound(reference))])


def _measured(reference: GuardReference, unit_roundoff: float) -> Tolerance:
    measured = sorted((float.fromhex(key), value) for key, value in reference.rounding.items())
    return next((tolerance for roundoff, tolerance in measured if roundoff >= unit_roundoff), measured[-1][1])


def _repetition_bound(reference: GuardReference) -> Tolerance:
    """Return the bound on differences between runs of the same settings: a multiple of the rounding effect in their own
    arithmetic.
    """
    rounding = _measured(reference, reference.own_roundoff)

    def wide(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(REPETITIONS * (value + FLOOR) for value in values)

    return Tolerance(
        loss=wide(rounding.loss),
        gradient_norm=wide(rounding.gradient_norm),
        update_norm=REPETITIONS * (rounding.update_norm + FLOOR),
        update_direction=REPETITIONS**2 * (rounding.update_direction + FLOOR),  # one less a cosine goes with the square
        curve_loss=REPETITIONS * (rounding.curve_loss + FLOOR),
    )


def _at_most(tolerance: Tolerance, bound: Tolerance) -> Tolerance:
    def least(ours: tuple[float, ...], theirs: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(min(our, their) for our, their in zip(ours, theirs, strict=True))

    return Tolerance(
        loss=least(tolerance.loss, bound.loss),
        gradient_norm=least(tolerance.gradient_norm, bound.gradient_norm),
        update_norm=min(tolerance.update_norm, bound.update_norm),
        update_direction=min(tolerance.update_direction, bound.update_direction),
        curve_loss=min(tolerance.curve_loss, bound.curve_loss),
    )


def check_repetition(reference: GuardReference) -> GuardCheck | None:
    """Return a failed check if runs of the reference's own settings differ by more than allowed; None otherwise."""
    seen, bound = reference.repetition, _repetition_bound(reference)
    pairs = {
        "loss": [*zip(seen.loss, bound.loss, strict=True)],
        "gradient norm": [*zip(seen.gradient_norm, bound.gradient_norm, strict=True)],
        "first update's size": [(seen.update_norm, bound.update_norm)],
        "first update's direction": [(seen.update_direction, bound.update_direction)],
        "loss curve": [(seen.curve_loss, bound.curve_loss)],
    }
    ratio, what, by = max((found / allowed, name, found) for name, both in pairs.items() for found, allowed in both)
    if ratio <= 1:
        return None
    return GuardCheck(
        name="repetition",
        kind="pointwise",
        passed=False,
        observed=ratio,
        tolerance=1.0,
        detail="the training is not reproducible: two runs of today's settings with the same seed and batches "
        f"differ by {by:.2g} in the {what}, {ratio:.2g} times the difference allowed beyond rounding, "
        "so the effect of a change cannot be distinguished from chance. Seed every generator that data and loss use "
        "(worker_init, NumPy, Python), keep no state between processes, or allow lossy choices, which are "
        "compared over a longer horizon",
    )


def _check_curve(reference: GuardReference, curve: Curve, unit_roundoff: float, rounding: Tolerance) -> GuardCheck:
    """Compare the mean loss of the curve with the reference's. The tolerance allows for other dropout masks, by the
    spread over seeds, and for different rounding.
    """
    means = reference.seed_means
    centre = _mean(means)
    spread = math.sqrt(sum((m - centre) ** 2 for m in means) / max(1, len(means) - 1))
    floor = max(FLOOR_ROUNDOFFS * unit_roundoff, FLOOR)
    relative = FACTOR * rounding.curve_loss + floor
    observed = abs(_mean(curve.curve_losses) - centre)
    tolerance = SEED_SPREADS * spread + relative * abs(centre)
    return GuardCheck(
        name="loss curve",
        kind="curve",
        passed=observed <= tolerance,
        observed=observed,
        tolerance=tolerance,
        detail=f"mean loss over {len(curve.curve_losses)} steps differs by {observed:.3g}, allowed {tolerance:.3g} "
        f"(spread over seeds {spread:.3g})",
    )


def _check_horizon(reference: GuardReference, curve: Curve) -> GuardCheck:
    """Check the share of the reference's fall in loss that the candidate has not reached."""
    ends = reference.horizon_ends
    centre = sum(ends) / len(ends)
    spread = max(ends) - min(ends)
    start = (reference.curve.curve_losses or reference.curve.losses)[0]  # with dropout on, as the end
    fall = max(1e-12, start - centre)
    missing = (last_quarter(curve.horizon_losses) - centre) / fall
    tolerance = max(1 - MIN_PROGRESS, 3 * spread / fall)
    return GuardCheck(
        name="loss horizon",
        kind="curve",
        passed=missing <= tolerance,
        observed=missing,
        tolerance=tolerance,
        detail=f"after {len(curve.horizon_losses)} steps the candidate's loss lags by {missing:.1%} of the "
        f"reference's fall in loss, allowed {tolerance:.1%}",
    )


def last_quarter(losses: Sequence[float]) -> float:
    return _mean(losses[-max(1, len(losses) // 4) :])


def compared(checks: Sequence[GuardCheck], curve: Curve, unit_roundoff: float) -> tuple[str, ...]:
    """List the comparisons that a verdict rests on, part by part."""
    arithmetic = ARITHMETICS.get(unit_roundoff, f"{unit_roundoff:.2g}")
    steps = len(curve.losses)
    parts = {
        "update": f"updates equal within a relative tolerance of {RELATIVE:g} in {steps} steps",
        "gradient": f"gradients within the rounding of {arithmetic}",
        "twin": "gradients within the rounding of FP32 when the candidate runs without its precision choice",
        "output": f"module outputs within the rounding of {arithmetic}, for the inputs that each module received",
        "state": f"statistics and other untrained state within the rounding of {arithmetic}",
        "average": "weight averages that follow the reference's averaging rule",
        "calls": "dropout rates, clipping bounds and scheduler steps",
        "pointwise": f"losses and gradient norms in {steps} steps",
        "masks": f"mean and spread of gradients over dropout masks in {len(curve.curve_losses)} steps",
        "mask rate": "rate and scale of dropout masks in each module",
        "curve": f"mean loss of {len(curve.curve_losses) or len(curve.horizon_losses)} steps with dropout on",
        "loader": "order and content of samples",
    }
    found = []
    for kind, text in parts.items():
        shares = [check.observed / check.tolerance for check in checks if check.kind == kind and check.tolerance]
        if any(check.kind == kind for check in checks):
            found.append(f"{text} ({max(shares):.1g} of the limit)" if shares else text)
    return tuple(found)
