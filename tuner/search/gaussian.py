"""A Gaussian model of a training step over configurations: the time of each category first, then the step as their sum.

Effects multiply, so everything is in logarithms of times over the reference's. In a category an effect of a choice has
a prior width: large on what the choice declares to act on, small elsewhere; choices interact in pairs; neighbours of an
ordered parameter are alike. The step is the sum of the categories as they are at that configuration: an effect counts
with the share that its category has there. What that leaves out is in two small terms on the step itself.

Everything here is NumPy on whole numbers (levels of parameters, 0 being the reference's); nothing knows of strategies.
Sources: Rasmussen and Williams, "Gaussian Processes for Machine Learning" (2006); Duvenaud et al., "Additive Gaussian
Processes" (2011); Astudillo and Frazier, "Bayesian Optimization of Composite Functions" (ICML 2019).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular
from threadpoolctl import ThreadpoolController

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

WIDTH = 0.8
"""Standard deviation of an effect on a category that its choice declares to act on, in logarithms."""
SIDE = 0.1
"""The same on the other categories."""
PAIRS = 0.15
"""Variance of the interaction of two choices, over the product of their own variances."""
SCATTER = 0.008
"""Standard deviation of what no choice explains in a category."""
ALIKE = 0.7
"""Correlation of the effects of two unordered choices of one strategy."""
LENGTH = 0.3
"""Over which effects of ordered choices stay alike, as a part of the range of ranks."""
SMOOTH = 0.85
"""Part of an ordered choice's effect that its neighbours share."""
PROFILE_NOISE = 0.05
"""Of the time of one category in one profile."""
REFERENCE_ERROR = 0.06
"""Standard deviation of the reference's own profile, which all others are held against."""
REST_LOCAL, REST_LENGTH, REST_MAIN = 0.02, 1.5, 0.01
"""What the sum of the categories leaves out: near configurations alike, and by choice."""
BY_ITSELF = 0.002
"""Logarithm of the factor of any change: of two configurations that seem alike, the one that changes less."""
LEVEL = 0.1
"""Standard deviation of the step of the reference, about its first measurement."""
NOISES = (0.003, 0.006, 0.012, 0.025, 0.05)
"""Standard deviations between starts that are compared."""
USUAL_NOISE, NOISE_FACTOR = 0.02, 3.0
CALM_PARTS = (1.0, 0.25)
"""Of that noise, what a step has that never waits for its host."""
DRIFTS = (0.0, 0.006, 0.02)
"""Standard deviations of a machine's drift from one start to the next."""
SCALES = {"width": (0.4, 1.0, 2.0), "pairs": (0.3, 1.0, 3.0), "side": (1.0, 4.0)}
"""What the data may multiply the constants with."""
HOPES = {0.0: 0.25, 0.3: 0.5, 1.0: 0.25}
"""What may be true of the prior means, by how likely that is before anything was measured."""
GROUP = 0.2
"""Standard deviation of what trials that take turns have in common: only their ratio counts."""
PLACE = 0.5
JITTER = 1e-9


@functools.cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController()


def one_blas_thread() -> AbstractContextManager[object]:
    """Limit linear algebra to one thread: some hundred rows are done sooner so, and on a busy machine several threads
    wait for each other forty times as long.
    """
    limited: AbstractContextManager[object] = _blas().limit(limits=1, user_api="blas")
    return limited


def level_kernel(num_levels: int, ranks: Floats | None) -> Floats:
    """Correlations of the effects of a parameter's levels; 0 for level 0, which has no effect.

    Args:
        ranks: From 0 to 1, of ordered levels; None for unordered ones.
    """
    own = np.eye(num_levels)
    own[0, 0] = 0.0
    if ranks is None:
        shared = np.ones((num_levels, num_levels))
        shared[0, :] = shared[:, 0] = 0.0
        return ALIKE * shared + (1 - ALIKE) * own
    distance = (ranks[:, None] - ranks[None, :]) / LENGTH
    plain = np.exp(-0.5 * distance**2)
    centred = plain - plain[:, :1] - plain[:1, :] + plain[0, 0]
    scale = np.mean(np.diag(centred)[1:])
    return np.asarray(SMOOTH * centred / max(scale, 1e-6) + (1 - SMOOTH) * own)


@dataclass(frozen=True)
class Prior:
    """What is expected of every level before it was measured.

    Attributes:
        kernels: By parameter: correlations of its levels.
        widths: By parameter, of level and category: prior width over the usual one; 0 where the choice does not act.
        means: By parameter, of level and category: expected logarithm of the factor.
    """

    kernels: Sequence[Floats]
    widths: Sequence[Floats]
    means: Sequence[Floats]

    def correlations(self, a: Ints, b: Ints) -> Floats:
        """Of every parameter (first axis), between two sets of configurations."""
        return np.stack([kernel[np.ix_(a[:, k], b[:, k])] for k, kernel in enumerate(self.kernels)])

    def widths_at(self, levels: Ints, category: int) -> Floats:
        """Of every parameter (first axis), at configurations."""
        return np.stack([width[levels[:, k], category] for k, width in enumerate(self.widths)])

    def mean_at(self, levels: Ints, category: int) -> Floats:
        return np.asarray(np.sum([mean[levels[:, k], category] for k, mean in enumerate(self.means)], axis=0))


@dataclass(frozen=True)
class Scales:
    width: float = 1.0
    pairs: float = 1.0
    side: float = 1.0

    @property
    def log_prior(self) -> float:
        spread = math.log(self.width) ** 2 + math.log(self.pairs) ** 2 / 2 + math.log(self.side) ** 2 / 4
        return -spread / 2


EVERY_SCALE = [Scales(w, p, s) for w, p, s in itertools.product(SCALES["width"], SCALES["pairs"], SCALES["side"])]


def category_covariance(correlations: Floats, widths_a: Floats, widths_b: Floats, scales: Scales) -> Floats:
    """Prior covariance of one category: main effects, side effects, pairs, and the reference's own error."""
    side = scales.side * SIDE
    wide_a, wide_b = scales.width * WIDTH * widths_a, scales.width * WIDTH * widths_b
    main = wide_a[:, :, None] * wide_b[:, None, :] * correlations
    both = (wide_a + side)[:, :, None] * (wide_b + side)[:, None, :] * correlations
    pairs = 0.5 * (both.sum(0) ** 2 - (both**2).sum(0))
    total = main.sum(0) + side**2 * correlations.sum(0) + scales.pairs * PAIRS * pairs
    return np.asarray(total + REFERENCE_ERROR**2)


class CategoryModel:
    """Posterior of the logarithm of one category's time over the reference's, from profiles."""

    def __init__(self, prior: Prior, category: int, levels: Ints, values: Floats, noise: Floats) -> None:
        self._prior, self._category, self._levels = prior, category, levels
        self._widths = prior.widths_at(levels, category)
        correlations, means = prior.correlations(levels, levels), prior.mean_at(levels, category)
        same = np.all(levels[:, None, :] == levels[None, :, :], axis=2)
        noise = noise + SCATTER**2 * same
        best = -math.inf
        for scales in EVERY_SCALE:
            covariance = category_covariance(correlations, self._widths, self._widths, scales) + noise
            factor = np.linalg.cholesky(covariance + JITTER * np.eye(len(levels)))
            seen, hoped = solve_triangular(factor, np.stack([values, means], axis=1), lower=True).T
            scores = {hope: math.log(p) - 0.5 * float(((seen - hope * hoped) ** 2).sum()) for hope, p in HOPES.items()}
            score = max(scores.values()) - float(np.log(np.diag(factor)).sum()) + scales.log_prior
            if score > best:
                weights = {hope: math.exp(s - max(scores.values())) for hope, s in scores.items()}
                self.hope = sum(hope * w for hope, w in weights.items()) / sum(weights.values())
                best, self.scales, self._factor, self._white = score, scales, factor, seen - self.hope * hoped

    def project(self, levels: Ints, correlations: Floats) -> tuple[Floats, Floats]:
        """Posterior means of configurations, and what they share with the profiles.

        Args:
            correlations: Between the profiled configurations and these.
        """
        widths = self._prior.widths_at(levels, self._category)
        cross = category_covariance(correlations, self._widths, widths, self.scales)
        shared = solve_triangular(self._factor, cross, lower=True)
        mean = self.hope * self._prior.mean_at(levels, self._category) + shared.T @ self._white
        return mean, shared

    def covariance(self, a: Ints, b: Ints, correlations: Floats, shared_a: Floats, shared_b: Floats) -> Floats:
        """Posterior covariance between two sets of configurations."""
        widths_a, widths_b = self._prior.widths_at(a, self._category), self._prior.widths_at(b, self._category)
        same = np.all(a[:, None, :] == b[None, :, :], axis=2)
        prior = category_covariance(correlations, widths_a, widths_b, self.scales) + SCATTER**2 * same
        return np.asarray(prior - shared_a.T @ shared_b)

    def variance(self, levels: Ints, shared: Floats) -> Floats:
        """Posterior variances of configurations."""
        correlations = np.stack([np.diag(kernel)[levels[:, k]] for k, kernel in enumerate(self._prior.kernels)])
        widths = self.scales.width * WIDTH * self._prior.widths_at(levels, self._category)
        side = self.scales.side * SIDE
        both = (widths + side) ** 2 * correlations
        pairs = 0.5 * (both.sum(0) ** 2 - (both**2).sum(0))
        own = (widths**2 * correlations).sum(0) + side**2 * correlations.sum(0) + self.scales.pairs * PAIRS * pairs
        return np.asarray(own + REFERENCE_ERROR**2 + SCATTER**2 - (shared**2).sum(0))


@dataclass(frozen=True)
class Measured:
    """Starts of configurations, in order.

    Attributes:
        levels: Of each start.
        log_s: Logarithm of the seconds of a unit.
        errors: Standard errors of that within the start.
        calm: Whether its step hardly ever waits for its host.
        groups, places: By number; trials of one group took turns.
        profiles: Seconds by category, of the starts that `profiled` lists.
    """

    levels: Ints
    log_s: Floats
    errors: Floats
    calm: NDArray[np.bool_]
    groups: Ints
    places: Ints
    profiles: Floats
    profiled: Ints

    def common(self, drift: float) -> Floats:
        """Covariance of what starts have in common beside their configuration: drift, group, place."""
        order = np.arange(len(self.log_s))
        walk = drift**2 * np.minimum(order[:, None], order[None, :])
        together = self.groups[:, None] == self.groups[None, :]
        paired = together & (together.sum(1) > 1)
        return np.asarray(
            walk + GROUP**2 * paired + PLACE**2 * (self.places[:, None] == self.places[None, :]) * (self.places > 0)
        )


@dataclass(frozen=True)
class Beliefs:
    """What a model says of some configurations.

    Attributes:
        levels: The configurations.
        mean: Of the logarithm of the seconds of a unit.
        variance: Of the same.
    """

    levels: Ints
    mean: Floats
    variance: Floats
    categories_s: Floats
    _shares: Floats
    _shared: Sequence[Floats]
    _white: Floats


class StepModel:
    """Posterior of the step time, from profiles and measured steps.

    Args:
        floor: Part of the reference's step below which a category's time is not told apart from none.
    """

    def __init__(self, prior: Prior, measured: Measured, floor: float = 0.005) -> None:
        self.measured, self._prior = measured, prior
        reference = measured.profiles[0]
        self._floor_s = floor * float(reference.sum())
        self._reference = np.log(reference + self._floor_s)
        self._profiled = measured.levels[measured.profiled]
        self._models = self._fit_categories(drift=0.0)
        self.unique, self._index = np.unique(measured.levels, axis=0, return_inverse=True)
        self._index = self._index.reshape(-1)
        self.noise_sd, self.calm_part, self.drift = self._fit_steps()
        if self.drift > 0:
            self._models = self._fit_categories(self.drift)
            self._fit_steps()

    def _fit_categories(self, drift: float) -> list[CategoryModel]:
        profiled = self.measured.profiled
        common = self.measured.common(drift)[np.ix_(profiled, profiled)]
        values = np.log(self.measured.profiles + self._floor_s) - self._reference
        times = self.measured.profiles
        seen = times / (times + self._floor_s)
        models = []
        for c in range(times.shape[1]):
            noise = np.diag((PROFILE_NOISE * seen[:, c]) ** 2 + USUAL_NOISE**2) + common * (drift > 0)
            models.append(CategoryModel(self._prior, c, self._profiled, values[:, c], noise))
        return models

    # --- the sum of the categories ------------------------------------------------------------

    def _look_at(self, levels: Ints) -> tuple[Floats, Floats, list[Floats]]:
        """Seconds by category, shares of the step, and what is shared with the profiles."""
        correlations = self._prior.correlations(self._profiled, levels)
        seconds, shared = [], []
        for model, reference in zip(self._models, self._reference, strict=True):
            mean, part = model.project(levels, correlations)
            seconds.append(np.maximum(np.exp(mean + reference) - self._floor_s, 1e-3 * self._floor_s))
            shared.append(part)
        times = np.stack(seconds)
        return times, times / times.sum(0), shared

    def _covariance(
        self, a: Ints, b: Ints, shares_a: Floats, shares_b: Floats, shared_a: list[Floats], shared_b: list[Floats]
    ) -> Floats:
        """Of the step, given the profiles alone."""
        correlations = self._prior.correlations(a, b)
        total = LEVEL**2 + REST_MAIN**2 * correlations.sum(0)
        total = total + REST_LOCAL**2 * np.exp(-(a[:, None, :] != b[None, :, :]).sum(2) / REST_LENGTH)
        for c, model in enumerate(self._models):
            own = model.covariance(a, b, correlations, shared_a[c], shared_b[c])
            total = total + shares_a[c][:, None] * shares_b[c][None, :] * own
        return np.asarray(total)

    def _variance(self, levels: Ints, shares: Floats, shared: list[Floats]) -> Floats:
        """Of the step, given the profiles alone; categories are independent of one another."""
        correlations = np.stack([np.diag(kernel)[levels[:, k]] for k, kernel in enumerate(self._prior.kernels)])
        total = LEVEL**2 + REST_LOCAL**2 + REST_MAIN**2 * correlations.sum(0)
        for c, model in enumerate(self._models):
            total = total + shares[c] ** 2 * model.variance(levels, shared[c])
        return np.asarray(total)

    @staticmethod
    def _sum(levels: Ints, times: Floats) -> Floats:
        """Logarithm of the step that the categories make."""
        return np.asarray(np.log(times.sum(0)) + BY_ITSELF * (levels > 0).sum(1))

    # --- the measured steps -------------------------------------------------------------------

    def _fit_steps(self) -> tuple[float, float, float]:
        measured = self.measured
        times, self._shares, self._shared = self._look_at(self.unique)
        prior = self._covariance(self.unique, self.unique, self._shares, self._shares, self._shared, self._shared)
        at_starts = prior[np.ix_(self._index, self._index)]
        residual = measured.log_s - self._sum(self.unique, times)[self._index]
        best = -math.inf
        calm_parts = CALM_PARTS if measured.calm.any() else CALM_PARTS[:1]
        for noise, part, drift in itertools.product(NOISES, calm_parts, DRIFTS):
            own = np.where(measured.calm, part * noise, noise) ** 2 + measured.errors**2
            covariance = at_starts + np.diag(own) + measured.common(drift)
            factor = np.linalg.cholesky(covariance + JITTER * np.eye(len(own)))
            white = solve_triangular(factor, residual, lower=True)
            score = -0.5 * float(white @ white) - float(np.log(np.diag(factor)).sum())
            score -= 0.5 * (math.log(noise / USUAL_NOISE) / math.log(NOISE_FACTOR)) ** 2 + 1.5 * (drift > 0)
            if score > best:
                best, kept = score, (noise, part, drift)
                self._factor, self._white = factor, white
        return kept

    def believe(self, levels: Ints) -> Beliefs:
        """Posterior of the step of configurations."""
        times, shares, shared = self._look_at(levels)
        cross = self._covariance(self.unique, levels, self._shares, shares, self._shared, shared)[self._index]
        white = solve_triangular(self._factor, cross, lower=True)
        mean = self._sum(levels, times) + white.T @ self._white
        variance = np.maximum(self._variance(levels, shares, shared) - (white**2).sum(0), 1e-10)
        return Beliefs(levels, mean, variance, times, shares, shared, white)

    def covariance(self, a: Beliefs, b: Beliefs) -> Floats:
        """Posterior covariance between the steps of two sets of configurations."""
        prior = self._covariance(a.levels, b.levels, a._shares, b._shares, list(a._shared), list(b._shared))
        return np.asarray(prior - a._white.T @ b._white)

    def start_noise(self, calm: bool) -> float:
        """Standard deviation between starts."""
        return self.noise_sd * (self.calm_part if calm else 1.0)


def draws(mean: Floats, covariance: Floats, count: int, generator: np.random.Generator) -> Floats:
    """Joint samples, one a row."""
    factor = np.linalg.cholesky(covariance + 1e-8 * np.eye(len(mean)))
    return np.asarray(mean + generator.standard_normal((count, len(mean))) @ factor.T)
