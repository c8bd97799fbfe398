"""Comparing how much dropout and its kin scatter gradients, where a candidate draws other masks than the reference.

The reference runs some steps with several seeds. At each step its gradients scatter around their mean by what masks do
(and by what the masks of the steps before did to the parameters). One run of a candidate scatters around the same mean
by as much, if it drops at the same rate; one that drops nothing hardly scatters, one that drops twice as much does so
more. How far such a ratio is off by chance, the reference's own runs show, each against the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from steptune.tuner.guard.gradients import Tensors

if TYPE_CHECKING:
    import torch

FLOOR = 0.5
"""Least limit on the mean logarithm of the ratios: a scatter 1.65 times as strong passes in any case."""
SPREADS = 3.0
"""Factor over what the reference's own runs are off by."""
FEWEST_SEEDS = 4
NEGLIGIBLE = 1e-4
"""Share of a gradient's square below which masks do not scatter it."""


@dataclass(frozen=True, kw_only=True)
class Scatter:
    """Scatter of gradients over the reference's runs.

    Attributes:
        means: Gradients of each step, averaged over the seeds.
        energies: Variance of one run's gradients around them, summed over steps, by tensor.
        num_seeds: How many runs that is of.
        spread: Root mean square of what each of its runs is off by.
    """

    means: Sequence[Tensors]
    energies: dict[str, float]
    num_seeds: int
    spread: float

    @property
    def limit(self) -> float:
        return FLOOR + SPREADS * self.spread


def measure_scatter(runs: Sequence[Sequence[Tensors]]) -> Scatter | None:
    """
    Args:
        runs: Steps of each seed. Candidates run with that of the first, which so does not belong to what they are
            compared with: they may draw its very masks.

    Returns:
        None where there are too few runs, or where masks hardly move any gradient.
    """
    if len(runs) < FEWEST_SEEDS or not all(runs):
        return None
    own = []
    for number, run in enumerate(runs):
        others = _scatter([other for k, other in enumerate(runs) if k != number], spread=0.0)
        own.append(excess_of(others, run))
    spread = math.sqrt(sum(value * value for value in own) / len(own))
    found = _scatter(runs[1:], spread=spread)
    return found if found.energies else None


def excess_of(reference: Scatter, steps: Sequence[Tensors]) -> float:
    """Mean over the tensors of the logarithm of how much more one run scatters than the reference's do."""
    logs = []
    for name, energy in reference.energies.items():
        apart = sum(
            _square(step[name] - mean[name]) for step, mean in zip(steps, reference.means, strict=True) if name in step
        )
        own = apart / (1 + 1 / reference.num_seeds)  # the mean is one of few runs
        logs.append(math.log(max(own, 1e-6 * energy) / energy))
    return sum(logs) / len(logs) if logs else 0.0


def _scatter(runs: Sequence[Sequence[Tensors]], *, spread: float) -> Scatter:
    count = len(runs)
    means: list[Tensors] = []
    energies: dict[str, float] = {}
    squares: dict[str, float] = {}
    for steps in zip(*runs, strict=True):
        names = [name for name in steps[0] if all(name in step for step in steps)]
        mean = {name: sum((step[name] for step in steps[1:]), steps[0][name]) / count for name in names}
        means.append(mean)
        for name in names:
            apart = sum(_square(step[name] - mean[name]) for step in steps)
            energies[name] = energies.get(name, 0.0) + apart / max(1, count - 1)
            squares[name] = squares.get(name, 0.0) + _square(mean[name])
    kept = {name: energy for name, energy in energies.items() if energy > NEGLIGIBLE * squares[name]}
    return Scatter(means=means, energies=kept, num_seeds=count, spread=spread)


def _square(tensor: torch.Tensor) -> float:
    return float((tensor * tensor).sum())
