"""Comparison of how much masks of dropout and similar modules make gradients vary, for candidates that draw other masks
than the reference.

Steps that begin from the same parameters, on one batch, differ only by the masks that they draw. The reference draws
several masks, and its gradients scatter around their mean. The candidate's gradients must scatter around the same mean
by as much: a candidate that drops nothing hardly scatters, one that drops twice as much scatters more, and one that
does not rescale what it keeps has another mean. How far such figures are off by chance is measured on the reference's
own draws, a few at a time compared with the rest.

On several ranks some candidates cannot be set back to the same parameters. There steps run on freely, with several
seeds, and scatter around the mean of each step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from steptune.tuner.guard.gradients import Tensors

if TYPE_CHECKING:
    import torch

FLOOR = 0.5
"""Lowest value of the limit on the mean log ratio of a run's gradient scatter to the reference's: a scatter up to 1.65
times the reference's always passes.
"""
SPREADS = 3.0
"""Multiple of the deviation among the reference's own runs that is added to the lowest value of the limit."""
FLOOR_OF_DRAWS, SPREADS_OF_DRAWS = 0.25, 2.0
"""The values of `FLOOR` and `SPREADS` for draws that begin from the same parameters. Correct trainings reach 0.4 of the
limit (`benchmarks/results/guard_power.json`).
"""
FALSE_SHIFTS = 1e-4
"""Maximum share of correct trainings that may fail because their mean gradients exceed the limit by chance."""
FEWEST_SEEDS = 4
NEGLIGIBLE = 1e-4
"""Share of a gradient's square up to which the scatter from masks is neglected."""
GROUP = 4
"""Number of the reference's draws that are compared with its other draws at a time, to measure the effect of chance."""


@dataclass(frozen=True, kw_only=True)
class Scatter:
    """Statistical scatter of the gradients over the reference's runs.

    Attributes:
        means: Gradients of each step, averaged over the seeds; a single entry for draws, which all are of one step.
        energies: Variance of one run's gradients around the means, by tensor, summed over steps; for draws, of one
            step.
        num_seeds: Number of runs.
        spread: Root mean square of the excess that the reference's own runs show.
        is_of_draws: True if all steps began from the same parameters.
        directions: Number of independent directions in which masks move the gradients of draws; at most one less than
            the number of draws.
    """

    means: Sequence[Tensors]
    energies: dict[str, float]
    num_seeds: int
    spread: float
    is_of_draws: bool = False
    directions: float = 1.0

    @property
    def shift_limit(self) -> float:
        """Maximum distance of mean gradients that passes, in standard errors: the distance that chance reaches in this
        number of directions. Masks that all depend on one random number, as where whole layers are skipped, move all
        gradients in one direction.
        """
        from scipy.special import chdtri

        return math.sqrt(float(chdtri(self.directions, FALSE_SHIFTS)) / self.directions)

    @property
    def limit(self) -> float:
        """Maximum absolute excess that passes."""
        if self.is_of_draws:
            return FLOOR_OF_DRAWS + SPREADS_OF_DRAWS * self.spread
        return FLOOR + SPREADS * self.spread


# --- draws from one place ---------------------------------------------------------------------


def measure_draws(draws: Sequence[Tensors]) -> Scatter | None:
    """Measure how much masks make gradients vary over the reference's draws.

    Args:
        draws: Gradients of steps that began from the same parameters, on one batch, each with a seed of its own.

    Returns:
        None where there are too few draws, or where masks hardly move any gradient.
    """
    if len(draws) < 2 * GROUP:
        return None
    found = []
    for start in range(0, len(draws), GROUP):
        others = _of_draws([*draws[:start], *draws[start + GROUP :]], spread=0.0)
        found.append(excess_of_draws(others, draws[start : start + GROUP]))
    spread = math.sqrt(sum(value * value for value in found) / len(found))
    scatter = _of_draws(draws, spread=spread)
    return scatter if scatter.energies else None


def excess_of_draws(reference: Scatter, draws: Sequence[Tensors], rounding: Mapping[str, float] | None = None) -> float:
    """Return the excess scatter of a candidate's draws over the reference's: the mean, over tensors, of the log ratio.

    Args:
        rounding: Norm of the rounding effect on each tensor, which may scatter it as well.
    """
    logs = []
    for name, energy in reference.energies.items():
        rounded = (rounding or {}).get(name, 0.0) ** 2
        own = [step[name] for step in draws if name in step]
        apart = sum(_square(gradient - reference.means[0][name]) for gradient in own) / max(1, len(own))
        scattered = apart / (1 + 1 / reference.num_seeds)  # the mean is one of few
        logs.append(math.log((scattered + rounded + 1e-6 * energy) / (energy + rounded)))
    return sum(logs) / len(logs) if logs else 0.0


def shift_of_draws(reference: Scatter, draws: Sequence[Tensors], rounding: Mapping[str, float] | None = None) -> float:
    """Return the distance of a candidate's mean gradients over its draws from the reference's, in standard errors: the
    root mean square over the tensors.
    """
    squares = []
    for name, energy in reference.energies.items():
        own = [step[name] for step in draws if name in step]
        if not own:
            return math.inf
        rounded = (rounding or {}).get(name, 0.0) ** 2
        mean = sum(own[1:], own[0]) / len(own)
        error = energy * (1 / len(own) + 1 / reference.num_seeds) + rounded
        squares.append(_square(mean - reference.means[0][name]) / error)
    return math.sqrt(sum(squares) / len(squares)) if squares else 0.0


def _of_draws(draws: Sequence[Tensors], *, spread: float) -> Scatter:
    count = len(draws)
    names = [name for name in draws[0] if all(name in step for step in draws)]
    mean = {name: sum((step[name] for step in draws[1:]), draws[0][name]) / count for name in names}
    energies = {name: sum(_square(step[name] - mean[name]) for step in draws) / (count - 1) for name in names}
    kept = {name: energy for name, energy in energies.items() if energy > NEGLIGIBLE * _square(mean[name])}
    return Scatter(
        means=[mean],
        energies=kept,
        num_seeds=count,
        spread=spread,
        is_of_draws=True,
        directions=_directions(draws, mean, kept),
    )


def _directions(draws: Sequence[Tensors], mean: Tensors, energies: Mapping[str, float]) -> float:
    """Return the participation ratio of the draws' deviations from their mean: the squared trace of their Gram matrix
    over the trace of its square, with each tensor in units of its own scatter.
    """
    if not energies:
        return 1.0
    first, *others = [off @ off.T / energies[name] for name in energies for off in [_off(draws, mean, name)]]
    products = sum(others, first)
    return max(1.0, float(products.trace() ** 2 / (products * products).sum()))


def _off(draws: Sequence[Tensors], mean: Tensors, name: str) -> torch.Tensor:
    import torch

    return torch.stack([(step[name] - mean[name]).reshape(-1) for step in draws]).double()


# --- runs that go on --------------------------------------------------------------------------


def measure_scatter(runs: Sequence[Sequence[Tensors]]) -> Scatter | None:
    """Measure how much masks make gradients vary over the reference's runs with several seeds.

    Args:
        runs: Steps of each seed. Candidates run with the first seed and may draw the same masks, so that its run is
            left out.

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


def excess_of(reference: Scatter, steps: Sequence[Tensors], rounding: Mapping[str, float] | None = None) -> float:
    """Return the excess scatter of one run over the reference's runs: the mean, over tensors, of the log ratio.

    Args:
        rounding: Norm of the rounding effect on each tensor at one step, which may scatter it as well.
    """
    logs = []
    for name, energy in reference.energies.items():
        rounded = len(steps) * (rounding or {}).get(name, 0.0) ** 2
        apart = sum(
            _square(step[name] - mean[name]) for step, mean in zip(steps, reference.means, strict=True) if name in step
        )
        own = apart / (1 + 1 / reference.num_seeds)  # the mean is one of few runs
        logs.append(math.log((max(own, 1e-6 * energy) + rounded) / (energy + rounded)))
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
