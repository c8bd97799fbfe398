"""Alpha spending: a confirmation spends its error probability block by block, so that it may end as soon as its answer
is clear.

Looking at the data after every block and ending at the first interval that excludes no gain would call far more than
2.5 % of candidates without a gain faster. So the error is spent over the blocks: after a share t of the planned ones at
most `alpha t^3` is gone, and what is left belongs to the last one, whenever that is. Levels are those of a test of
normal variables with known variance; where the variance is estimated, the quantile of Student's t at the same nominal
level takes their place.

Sources: Lan and DeMets, "Discrete sequential boundaries for clinical trials", Biometrika 70 (1983); Kim and DeMets,
"Design and analysis of group sequential tests based on the type I error spending rate function", Biometrika 74 (1987),
for the power family; Armitage, McPherson and Rowe, "Repeated significance tests on accumulating data", J. R. Stat. Soc.
A 132 (1969), for the recursion; Jennison and Turnbull, "Group Sequential Methods" (1999), section 4.4, for nominal
levels under an unknown variance.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

POWER_OF_SPENDING = 3.0
"""Exponent of the alpha-spending function, a power of the share of planned blocks that have run: 1 spends evenly, 3
nearly all at the end.
"""
NUM_POINTS = 257
REACH = 8.0
"""Number of standard deviations beyond which a normal density counts as zero."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Look:
    """Nominal two-sided significance levels at one look at the data.

    Attributes:
        early: Level for ending here with a proven gain, although more blocks are planned.
        last: Level of the interval if this block is the last one: all remaining error is spent.
    """

    early: float
    last: float


@functools.lru_cache(65_536)
def looks(first: int, planned: int, alpha: float, count: int) -> dict[int, Look]:
    """Return the significance levels by number of blocks, from the first look at the data to the look after `count`
    blocks.

    Args:
        first: Number of blocks at the first look at the data.
        planned: Number of blocks at the last look.
        alpha: Two-sided error probability of the whole.
    """
    found: dict[int, Look] = {}
    points, weights, spent = np.zeros(1), np.ones(1), 0.0  # the sum of no block is 0
    step = math.sqrt(first)
    for number in range(first, count + 1):
        may_be_spent = alpha * (number / planned) ** POWER_OF_SPENDING
        early, last = (_bound(points, weights, step, share) for share in (may_be_spent - spent, alpha - spent))
        found[number] = Look(early=_level(early, number), last=_level(last, number))
        points, weights = _going_on(points, weights, step, early)
        spent, step = may_be_spent, 1.0
    return found


@functools.lru_cache(65_536)
def simultaneous_level(alpha: float, num_comparisons: int, degrees: float, correlation: float) -> float:
    """Return the two-sided significance level for each of several intervals such that all of them hold together with
    probability 1 - alpha.

    Args:
        num_comparisons: Number of comparisons with one common side.
        degrees: Degrees of freedom of their common variance.
        correlation: Correlation of any two differences; 0 gives Bonferroni's level, which assumes nothing.

    Source: Dunnett, "A multiple comparison procedure for comparing several treatments with a control", J. Am. Stat.
    Assoc. 50 (1955), equation 3 for two-sided intervals.
    """
    from scipy.optimize import brentq
    from scipy.special import stdtr, stdtrit

    if num_comparisons < 2 or not correlation:
        return alpha / max(1, num_comparisons)
    alone, bonferroni = (float(stdtrit(degrees, 1 - alpha / 2 / count)) for count in (1, num_comparisons))

    def excess(bound: float) -> float:
        return _all_within(bound, num_comparisons, degrees, correlation) - (1 - alpha)

    # No level is beyond these two; with few degrees of freedom the integral's error is.
    if excess(bonferroni) <= 0:
        return alpha / num_comparisons
    if excess(alone) >= 0:
        return alpha
    bound = brentq(excess, alone, bonferroni)
    return 2 * (1 - float(stdtr(degrees, bound)))


def _all_within(bound: float, count: int, degrees: float, correlation: float) -> float:
    """Return the probability that all of `count` equally correlated Student t variables lie between -`bound` and
    `bound`.
    """
    from scipy.special import chdtri, ndtr

    points, weights = _normal_nodes()
    middles = (np.arange(100) + 0.5) / 100
    scales = np.sqrt(chdtri(degrees, 1 - middles) / degrees)[:, None]
    shared, own = math.sqrt(correlation) * points[None, :], math.sqrt(1 - correlation)
    within = ndtr((bound * scales + shared) / own) - ndtr((-bound * scales + shared) / own)
    return float((within**count @ (weights / weights.sum())).mean())


@functools.cache
def _normal_nodes() -> tuple[Floats, Floats]:
    """Return the nodes and weights of Gauss-Hermite quadrature for the standard normal density, without its constant
    factor.
    """
    points, weights = np.polynomial.hermite_e.hermegauss(48)
    return points, weights


def _bound(points: Floats, weights: Floats, step: float, probability: float) -> float:
    """Return the bound that the absolute value of the next sum exceeds with this probability."""
    from scipy.optimize import brentq

    farthest = float(np.max(np.abs(points))) + 2 * REACH * step
    return float(brentq(lambda bound: _beyond(points, weights, step, bound) - probability, 0.0, farthest))


def _beyond(points: Floats, weights: Floats, step: float, bound: float) -> float:
    from scipy.special import ndtr

    return float(weights @ (ndtr((points - bound) / step) + ndtr((-points - bound) / step)))


def _going_on(points: Floats, weights: Floats, step: float, bound: float) -> tuple[Floats, Floats]:
    """Return possible sums inside the bound, and their probabilities by the trapezoidal rule."""
    bound = min(bound, float(np.max(np.abs(points))) + REACH * step)
    inside = np.linspace(-bound, bound, NUM_POINTS)
    density = (
        np.exp(-0.5 * ((inside[:, None] - points[None, :]) / step) ** 2) @ weights / (step * math.sqrt(2 * math.pi))
    )
    share = np.full(NUM_POINTS, inside[1] - inside[0])
    share[[0, -1]] /= 2
    return inside, density * share


def _level(bound: float, count: int) -> float:
    """Return the nominal two-sided significance level that corresponds to a bound on the sum of `count` standard normal
    variables.
    """
    return math.erfc(bound / math.sqrt(2 * count))
