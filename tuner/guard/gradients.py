"""Comparison of gradients, tensor by tensor, within the effect of rounding on each of them.

The reference's gradients at some steps are known, and so is by how much they differ when all values that the model
computes are disturbed by one unit roundoff. A candidate that computes at this roundoff may differ by a few times that.
A tensor is compared by its own noise, because rounding moves one gradient of a model by a thousandth and the next by
half.

Some of the steps begin from exactly the reference's parameters: there deviations do not accumulate, and what was
measured at one of them holds at the others. At the other steps the candidate begins where its own updates led: further
from the reference than the disturbed runs, where an optimizer that normalises has turned a gradient's rounding into a
full step. There noise is as many times larger as the candidate is further away (`distances`).

The same is done with what a step changes beside the parameters: running statistics, averages, counters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor"]
"""Sampled elements of tensors, by the tensor's name, in FP64 on the CPU."""

FLOOR_ROUNDOFFS = 2.0
"""Floor of a tensor's noise, in unit roundoffs of its largest norm over the steps: storing the tensor rounds by this
much.
"""
SHARE_OF_ALL = 0.02
"""Floor of each element's noise, in unit roundoffs of the root mean square of all gradients."""
SMALLEST_SCORE = 1e-3
REPETITIONS = 10.0
"""Maximum difference between runs of the same settings, as a multiple of the rounding effect; beyond it a training is
not repeatable.
"""
LARGE_PART = 0.5
"""Share above which a difference cannot come from a decision that rounding reversed, such as the sign of a ReLU's
input. It applies to the difference relative to a tensor's norm, and to the share of tensors with such a difference.
"""
FP32_ROUNDOFF = 2.0**-23
"""Maximum unit roundoff at which the limits of FP32 apply. Those limits are wide, because FP32 numbers are also summed
in FP32, where another order of a long sum changes many roundings.
"""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Maximum passing scores, in units of the measured noise.

    Attributes:
        residual: Limit for the tensor that differs most.
        slope: Limit for the tensor whose size differs most.
        scale: Limit for the change of size of all tensors together.
        pooled: Geometric mean of the residuals.
        zeros: Share of elements beyond the noise that are exactly zero in the candidate.
    """

    residual: float
    slope: float
    scale: float
    pooled: float
    zeros: float


KINDS = ("residual", "slope", "scale", "pooled", "zeros")
SIZES_THAT_STRAY = 1.75
"""Factor by which the limit on a tensor's size is raised at steps that follow earlier updates: each update rounds
parameters stored in 16 bits, and the noise measured from disturbed runs does not include this rounding.
"""
FINE = Limits(residual=110.0, slope=240.0, scale=32.0, pooled=32.0, zeros=0.002)
COARSE = Limits(residual=3.3, slope=6.0, scale=2.6, pooled=2.0, zeros=0.002)


def limits_of(unit_roundoff: float) -> Limits:
    """Return the limits for arithmetic with this unit roundoff."""
    return FINE if unit_roundoff <= FP32_ROUNDOFF else COARSE


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Effect of rounding at one step.

    Attributes:
        residuals: Norm of the difference, by tensor.
        slopes: Relative change of size, by tensor.
        scale: Relative change of size of all tensors together.
    """

    residuals: dict[str, float]
    slopes: dict[str, float]
    scale: float


@dataclass(frozen=True, kw_only=True)
class Score:
    """Distance of a candidate from the reference.

    Attributes:
        ratio: Score as a share of its limit; at most 1 passes.
        kind: Field of `Limits`.
        step: Number of the step, from 1.
        name: Name of the tensor; empty for all tensors together.
        excess: Relative difference of size at this step.
        is_other: Whether most tensors of this step differ by a large part of themselves.
    """

    ratio: float
    kind: str = ""
    step: int = 0
    name: str = ""
    excess: float = 0.0
    is_other: bool = False


# --- noise ------------------------------------------------------------------------------------


def measure_noise(
    reference: Sequence[Tensors],
    disturbed: Sequence[Sequence[Tensors]],
    repeated: Sequence[Tensors],
    *,
    unit_roundoff: float,
    exact: Sequence[int],
) -> list[Noise]:
    """Measure the noise of each step from disturbed and repeated runs.

    Args:
        reference: Gradients of the reference, by step.
        disturbed: Gradients of the same steps, for each run that was disturbed by `unit_roundoff`.
        repeated: Gradients of the same steps in a second run that was not disturbed.
        exact: Indices of the steps that begin from the reference's parameters.
    """
    raw = [_raw(wanted, [run[k] for run in disturbed], repeated[k]) for k, wanted in enumerate(reference)]
    pooled = _largest([raw[k] for k in exact])
    largest = _largest_norms(reference)
    result = []
    grown = pooled
    for place, wanted in enumerate(reference):
        if place not in exact:  # what was seen at one step may be seen at the next
            grown = _largest([grown, raw[place]])
        seen = pooled if place in exact else grown
        result.append(_floored(seen, wanted, largest, unit_roundoff))
    return result


def _raw(wanted: Tensors, runs: Sequence[Tensors], repeated: Tensors) -> Noise:
    def root_mean_square(values: Sequence[float]) -> float:
        return math.sqrt(sum(value * value for value in values) / max(1, len(values)))

    residuals, slopes = {}, {}
    for name, reference in wanted.items():
        apart = [run[name] - reference for run in runs if name in run]
        again = repeated[name] - reference if name in repeated else reference * 0
        residuals[name] = _with_repetition(root_mean_square([float(d.norm()) for d in apart]), float(again.norm()))
        slopes[name] = _with_repetition(
            root_mean_square([_slope(d, reference) for d in apart]), abs(_slope(again, reference))
        )
    scale = root_mean_square([_scale(run, wanted) for run in runs])
    return Noise(residuals=residuals, slopes=slopes, scale=_with_repetition(scale, abs(_scale(repeated, wanted))))


def _with_repetition(rounding: float, repetition: float) -> float:
    """Return the larger of the effect of rounding and the difference between runs of the same settings; the difference
    is limited to a multiple of the effect.
    """
    return max(rounding, min(repetition, REPETITIONS * rounding))


def _largest(noises: Sequence[Noise]) -> Noise:
    def merged(pieces: Sequence[dict[str, float]]) -> dict[str, float]:
        names = dict.fromkeys(name for piece in pieces for name in piece)
        return {name: max(piece.get(name, 0.0) for piece in pieces) for name in names}

    return Noise(
        residuals=merged([noise.residuals for noise in noises]),
        slopes=merged([noise.slopes for noise in noises]),
        scale=max((noise.scale for noise in noises), default=0.0),
    )


def _floored(noise: Noise, wanted: Tensors, largest: Mapping[str, float], unit_roundoff: float) -> Noise:
    """Raise a step's noise to at least the rounding of a stored gradient, and to a share of the rounding of all
    gradients.
    """
    count = sum(tensor.numel() for tensor in wanted.values())
    everything = math.sqrt(sum(float(tensor.norm()) ** 2 for tensor in wanted.values()))
    residuals, slopes = {}, {}
    for name, tensor in wanted.items():
        share = SHARE_OF_ALL * unit_roundoff * everything * math.sqrt(tensor.numel() / max(1, count))
        floor = max(FLOOR_ROUNDOFFS * unit_roundoff * largest[name], share)
        residuals[name] = max(noise.residuals.get(name, 0.0), floor)
        norm = float(tensor.norm())
        independent = residuals[name] / (norm * math.sqrt(tensor.numel())) if norm else 0.0
        slopes[name] = max(noise.slopes.get(name, 0.0), independent, unit_roundoff / 2)
    # One number that multiplies all gradients, as one over how many tokens there are, is rounded by up to this much.
    return Noise(residuals=residuals, slopes=slopes, scale=max(noise.scale, unit_roundoff))


def _largest_norms(steps: Sequence[Tensors]) -> dict[str, float]:
    norms: dict[str, float] = {}
    for tensors in steps:
        for name, tensor in tensors.items():
            norms[name] = max(norms.get(name, 0.0), float(tensor.norm()))
    return norms


def measure_distances(steps: Sequence[Tensors], disturbed: Sequence[Sequence[Tensors]]) -> list[Noise]:
    """Measure the distances of disturbed runs from the reference's parameters after each step."""
    return [_raw(wanted, [run[k] for run in disturbed], wanted) for k, wanted in enumerate(steps)]


def distances(reference: Sequence[Tensors], noise: Sequence[Noise], found: Sequence[Tensors]) -> list[float]:
    """Return the distances of a candidate's parameters from the reference's after each step, as multiples of a
    disturbed run's distances.
    """
    result = []
    for wanted, measured, own in zip(reference, noise, found, strict=False):
        apart = math.hypot(*(float((own[name] - tensor).norm()) for name, tensor in wanted.items() if name in own))
        result.append(_ratio_of(apart, math.hypot(*(measured.residuals[name] for name in wanted if name in own))))
    return result


def at_distance(noise: Sequence[Noise], distances: Sequence[float], exact: Sequence[int]) -> list[Noise]:
    """Scale the noise of a candidate's steps by the distance of its parameters from the reference's, except at steps
    that begin from the reference's parameters.

    For differences this small, gradients differ in proportion to parameters.
    """
    factors = [1.0, *(max(1.0, distance) if math.isfinite(distance) else 1.0 for distance in distances)]
    return [
        measured if place in exact or place >= len(factors) else _times(measured, factors[place])
        for place, measured in enumerate(noise)
    ]


def _times(noise: Noise, factor: float) -> Noise:
    return Noise(
        residuals={name: factor * value for name, value in noise.residuals.items()},
        slopes={name: factor * value for name, value in noise.slopes.items()},
        scale=factor * noise.scale,
    )


# --- scores -----------------------------------------------------------------------------------


def scores(
    reference: Sequence[Tensors],
    noise: Sequence[Noise],
    found: Sequence[Tensors],
    *,
    limits: Limits,
    exact: Sequence[int],
    has_twin: bool = False,
    may_turn: bool = True,
) -> dict[str, Score]:
    """Return the score of a candidate over its steps for each kind of distance from the reference.

    A decision that rounding turns over (which expert a token goes to, on which side of zero a unit is before a ReLU)
    moves gradients at one step and not at the next. So the second largest score of the exact steps counts, and the
    smallest of the other steps, if there are at least two of these. The size of all gradients together is compared at
    exact steps only. The size of one tensor at the other steps is compared by their second smallest score (one may be
    small by chance), if there are at least three, and with a limit of its own. If only one step is exact, the smallest
    score of all steps counts. In 16 bits, decisions may turn over at two of a few steps, which moves a row of one
    tensor but hardly its size: if a twin is compared without this rounding, the smallest residual of the exact steps
    counts. An exact step at which most tensors differ by a large part of their size had no such decision but other
    gradients, such as those of two steps added up: it counts alone.

    Args:
        has_twin: Whether the gradients of a twin are compared as well, without the rounding of 16 bits.
        may_turn: Whether rounding may turn such decisions over. If not, one step fewer is needed: what a step changes
            beside the parameters may be wrong only from the second step on, such as an average that begins at its goal.
    """
    steps = [_scores(reference[k], noise[k], tensors, limits, k + 1) for k, tensors in enumerate(found)]
    return {
        kind: _of_steps(
            kind, [step[kind] for step in steps], exact, smallest=has_twin and kind == "residual", may_turn=may_turn
        )
        for kind in KINDS
    }


def _of_steps(kind: str, steps: Sequence[Score], exact: Sequence[int], *, smallest: bool, may_turn: bool) -> Score:
    at_exact = sorted((steps[k] for k in exact if k < len(steps)), key=_ratio, reverse=True)
    others = [score for k, score in enumerate(steps) if k not in exact]
    fewest = 2 if may_turn else 1
    if len(at_exact) < fewest:
        return min(steps, key=_ratio, default=Score(ratio=0.0))
    left = at_exact if smallest else at_exact[:2]
    alone = [score for score in at_exact if score.is_other and kind == "pooled"]
    return max([left[-1], *alone, *_elsewhere(kind, sorted(others, key=_ratio), fewest)], key=_ratio)


def _elsewhere(kind: str, others: Sequence[Score], fewest: int) -> list[Score]:
    """Return the deciding score of the steps that do not begin from the initial parameters, in a list; the list is
    empty if there are too few such steps.
    """
    if kind == "scale":
        return []
    if kind == "slope":
        return [replace(others[1], ratio=others[1].ratio / SIZES_THAT_STRAY)] if len(others) > fewest else []
    return [others[0]] if len(others) >= fewest else []


def worst_of(scores: Mapping[str, Score], kinds: Sequence[str] = KINDS) -> Score:
    """Return the largest of a candidate's scores for these kinds of distance."""
    return max((scores[kind] for kind in kinds), key=_ratio)


def _ratio(score: Score) -> float:
    return score.ratio


def _scores(wanted: Tensors, noise: Noise, found: Tensors, limits: Limits, step: int) -> dict[str, Score]:
    """Return a candidate's scores at one step, one for each kind of distance from the reference."""
    stray = next(_strays(wanted, found), None)
    if stray is not None:
        return {kind: Score(ratio=math.inf, kind="presence", step=step, name=stray) for kind in KINDS}
    result = {kind: Score(ratio=0.0, kind=kind, step=step) for kind in KINDS}
    logs, num_other = [], 0
    for name, reference in wanted.items():
        apart = _of(found, name, reference) - reference
        slope = _slope(apart, reference)
        residual = _ratio_of(float(apart.norm()), noise.residuals[name])
        logs.append(math.log(max(residual, SMALLEST_SCORE)))
        num_other += residual > limits.residual and float(apart.norm()) > LARGE_PART * float(reference.norm())
        for kind, value in (("residual", residual), ("slope", _ratio_of(abs(slope), noise.slopes[name]))):
            score = Score(ratio=value / getattr(limits, kind), kind=kind, step=step, name=name, excess=slope)
            result[kind] = max(result[kind], score, key=_ratio)
    scale = _scale(found, wanted)
    whole = {
        "scale": _ratio_of(abs(scale), noise.scale),
        "pooled": math.exp(sum(logs) / len(logs)) if logs else 0.0,
        "zeros": _zeros(wanted, found, noise),
    }
    is_other = num_other > LARGE_PART * len(wanted)
    for kind, value in whole.items():
        ratio = value / getattr(limits, kind)
        result[kind] = Score(ratio=ratio, kind=kind, step=step, excess=scale, is_other=is_other)
    return result


def _strays(wanted: Tensors, found: Tensors) -> Iterator[str]:
    """Yield the names of tensors that are not finite in the candidate, differ in shape, or exist in only one of the two
    runs (unless all elements are zero).
    """
    for name in dict.fromkeys((*wanted, *found)):
        ours, theirs = found.get(name), wanted.get(name)
        if ours is not None and not bool(ours.isfinite().all()):
            yield name
        elif ours is None or theirs is None:
            only = ours if ours is not None else theirs
            if only is not None and bool(only.any()):
                yield name
        elif ours.shape != theirs.shape:
            yield name


def _of(found: Tensors, name: str, reference: torch.Tensor) -> torch.Tensor:
    tensor = found.get(name)
    return reference * 0 if tensor is None else tensor


def _slope(apart: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the relative growth of a tensor along the reference's direction."""
    square = float((reference * reference).sum())
    return float((apart * reference).sum()) / square if square else 0.0


def _scale(found: Tensors, wanted: Tensors) -> float:
    square = sum(float((reference * reference).sum()) for reference in wanted.values())
    apart = sum(
        float(((_of(found, name, reference) - reference) * reference).sum()) for name, reference in wanted.items()
    )
    return apart / square if square else 0.0


def _zeros(wanted: Tensors, found: Tensors, noise: Noise) -> float:
    """Return the share of elements that are zero in the candidate, of those that exceed the noise in the reference."""
    some = lost = 0
    for name, reference in wanted.items():
        clear = reference.abs() > noise.residuals[name] / math.sqrt(max(1, reference.numel()))
        some += int(clear.sum())
        lost += int((clear & (_of(found, name, reference) == 0)).sum())
    return lost / some if some else 0.0


def _ratio_of(value: float, unit: float) -> float:
    if unit:
        return value / unit
    return math.inf if value else 0.0
