"""Replay of weight averages: e' = e + a (w' - e), where e is the average and w' the weights after the candidate's own
step.

How far the weights are from the reference's depends on the precision, and on an optimizer that turns the rounding of a
small gradient into a full step. The average of given weights does not. Which buffer averages which weight, and by which
share per step, is found in the reference's steps: a share that fits hundreds of elements is no coincidence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from steptune.tuner.guard.gradients import Tensors
from steptune.tuner.records import Record

if TYPE_CHECKING:
    import torch

LIMIT = 3.0
"""Maximum root mean square difference that passes, in units of the rounding of the products (1 - a) e and a w'."""
LARGEST_SHARE = 1.01
"""Maximum share `a` of the weight in one step of an average: 1, with a margin for rounding."""
FEWEST_ELEMENTS = 8
"""Minimum number of elements for a fit; fewer elements could fit by coincidence."""


class Average(Record):
    """A buffer that averages a weight.

    Attributes:
        name: Name of the buffer.
        weight: Name of the weight that it averages.
        shares: Share of the weight in each step.
    """

    name: str
    weight: str
    shares: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class StateStep:
    """Buffers before and after a step, and the weights after it: sampled elements, FP64 on the CPU.

    Attributes:
        roundoffs: Distance from 1 to the next larger number, in the dtype of a buffer or weight.
    """

    before: Tensors
    after: Tensors
    weights: Tensors
    roundoffs: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class AverageScore:
    """Largest deviation of an average; `score` is in units of the rounding error allowed, `step` counts from 1."""

    score: float = 0.0
    step: int = 0
    name: str = ""
    share: float = 0.0
    wanted: float = 0.0


def find_averages(steps: Sequence[StateStep]) -> tuple[Average, ...]:
    """Return the reference's buffers that are averages of weights."""
    names = steps[0].before if steps else {}
    found = (_find(name, steps) for name in names)
    return tuple(average for average in found if average is not None)


def _find(name: str, steps: Sequence[StateStep]) -> Average | None:
    if steps[0].before[name].numel() < FEWEST_ELEMENTS or any(_stays(name, step) for step in steps):
        return None
    fits = []
    for weight, value in steps[0].weights.items():
        if value.shape != steps[0].before[name].shape:
            continue
        shares = tuple(_share(name, weight, step) for step in steps)
        if all(0 < share < LARGEST_SHARE for share in shares):
            score = max(_score(name, weight, share, step) for share, step in zip(shares, steps, strict=True))
            fits.append((score, Average(name=name, weight=weight, shares=shares)))
    score, average = min(fits, key=lambda fit: fit[0], default=(math.inf, None))
    return average if score <= LIMIT else None


def worst_average(averages: Sequence[Average], steps: Sequence[StateStep]) -> AverageScore:
    """Return the largest deviation of a candidate's weight averages from those recomputed with the reference's share
    `a` at each step.
    """
    return max(_scores(averages, steps), key=lambda found: found.score, default=AverageScore())


def _scores(averages: Sequence[Average], steps: Sequence[StateStep]) -> Iterator[AverageScore]:
    for average in averages:
        for number, (wanted, step) in enumerate(zip(average.shares, steps, strict=False), start=1):
            name, weight = average.name, average.weight
            if name not in step.before or weight not in step.weights:
                yield AverageScore(score=math.inf, step=number, name=name)
                return
            score, share = _score(name, weight, wanted, step), _share(name, weight, step)
            yield AverageScore(score=score, step=number, name=name, share=share, wanted=wanted)


def _stays(name: str, step: StateStep) -> bool:
    return bool((step.before[name] == step.after[name]).all())


def _distance(name: str, weight: str, step: StateStep) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the change of an average in a step, e' - e, and the distance w' - e of the new weight from the old
    average.
    """
    return step.after[name] - step.before[name], step.weights[weight] - step.before[name]


def _share(name: str, weight: str, step: StateStep) -> float:
    change, way = _distance(name, weight, step)
    square = float((way * way).sum())
    return float((change * way).sum()) / square if square else 0.0


def _score(name: str, weight: str, share: float, step: StateStep) -> float:
    change, way = _distance(name, weight, step)
    size = (1 - share) * step.before[name].abs() + share * step.weights[weight].abs()
    rounding = max(step.roundoffs[name], step.roundoffs[weight]) * size
    square = float((way * way).sum())
    off = float((rounding * way).norm()) / square if square else 0.0  # of a share that was found by such elements
    allowed = rounding + off * way.abs()
    score = float(((change - share * way) / (allowed + 1e-30)).square().mean().sqrt())
    return score if math.isfinite(score) else math.inf
