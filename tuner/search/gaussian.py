"""Gaussian model of a training step over configurations: the time of each category, and the step as their sum.

Effects multiply, so everything is in logarithms of times over the reference's. In a category the effect of a strategy
has a Student distribution: wide on what the strategy declares to act on, narrow elsewhere; its true size is learned.
Choices interact in pairs; neighbours of an ordered parameter are alike. The expected savings move the mean by a common
factor, which is learned too. The step is the sum of the categories as they are at that configuration: an effect counts
with the share that its category has there.

A profiled run is one observation of each category, and the errors of its profile leave its step as it was measured. A
run without a profile is one observation of a sum, about the categories that are expected there.

Everything here is NumPy on whole numbers (levels of parameters, 0 being the reference's); nothing knows of strategies.
Sources: Rasmussen and Williams, "Gaussian Processes for Machine Learning" (2006); Duvenaud et al., "Additive Gaussian
Processes" (2011); Astudillo and Frazier, "Bayesian Optimization of Composite Functions" (ICML 2019); Tipping, "Sparse
Bayesian Learning and the Relevance Vector Machine" (2001), for the sizes of effects.
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

WIDTH, SIDE = 0.35, 0.08
"""Usual size of an effect, in logarithms: on categories that the strategy is declared to affect, and on all others."""
FREEDOM = 1.0
"""Degrees of freedom of the distribution of effect sizes: with fewer, the data may move sizes further."""
PAIRS = 0.15
"""Variance of the interaction of two choices, relative to the product of their own variances."""
SCATTER = 0.02
"""Standard deviation of the part of a category's log time that no choice explains."""
HOPE, HOPE_SD = 0.3, 0.3
"""Prior mean and standard deviation of the realised share of expected savings."""
ALIKE = 0.7
"""Correlation of the effects of two unordered choices of one strategy."""
LENGTH = 0.3
"""Length scale over which effects of ordered choices are similar, as a share of the range that the choices span."""
SMOOTH = 0.85
"""Part of the variance of an ordered choice's effect that it has in common with neighbouring choices, from 0 to 1."""
PROFILE_NOISE, LEAST_ERROR = 0.05, 0.003
"""Relative noise of a category's time in one profile, and the minimum error of its logarithm."""
FLOOR = 0.004
"""Share of the shortest measured step below which a category's time is indistinguishable from zero."""
BY_ITSELF = 0.0002
"""Penalty on the log step time for each change, so that of two equal configurations the one with fewer changes wins."""
IN_ORDER = 1e-5
"""Penalty on the log step time for each place in the order of choices, so that of equal choices the first wins."""
LEVEL = 1.0
"""Prior standard deviation of a category's log time at the reference, wide enough that the data decide."""
NOISES = (0.003, 0.006, 0.012, 0.025, 0.05)
"""Standard deviations between runs: values that the fit compares."""
USUAL_NOISE, NOISE_FACTOR = 0.015, 2.5
CALM_PARTS = (1.0, 0.25)
"""Candidate values for the fit: noise of steps in which the device hardly ever waits for its host, as a multiple of
the noise of other steps.
"""
DRIFTS = (0.0, 0.006, 0.02)
"""Standard deviations of a machine's drift from one run to the next: values that the fit compares."""
DRIFT_PENALTY = 1.5
GROUP = 0.2
"""Standard deviation of the log time shared by trials that take turns, so large that only ratios within a group count.
"""
PLACE = 0.5
ROUNDS, LONGEST_STEP = 8, 0.5
"""Number of rounds that learn effect sizes and linearisation points, and maximum change of a category's log time in
each round.
"""
JITTER = 1e-9


@functools.cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController()


def one_blas_thread() -> AbstractContextManager[object]:
    """Limit linear algebra to one thread: it is faster for a few hundred rows; on a busy machine, several threads that
    wait for each other take forty times as long.
    """
    limited: AbstractContextManager[object] = _blas().limit(limits=1, user_api="blas")
    return limited


def level_kernel(num_levels: int, ranks: Floats | None) -> Floats:
    """Return the correlations of the effects of a parameter's levels; 0 for level 0, which has no effect.

    Args:
        ranks: Ranks of ordered levels, from 0 to 1; None for unordered levels.
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
    """Prior of the effects of every level, before any measurement.

    Attributes:
        kernels: By parameter: correlations of its levels.
        acts: By parameter, level and category: whether the choice declares to act there.
        means: By parameter, level and category: logarithm of the factor if the expected savings come true.
        most: By parameter and level: logarithm of the largest speed-up that its bound allows.
    """

    kernels: Sequence[Floats]
    acts: Sequence[NDArray[np.bool_]]
    means: Sequence[Floats]
    most: Sequence[Floats]

    @property
    def num_categories(self) -> int:
        return int(self.means[0].shape[1])

    def correlations(self, a: Ints, b: Ints) -> Floats:
        """Return the correlations of every parameter (first axis) between two sets of configurations."""
        return np.stack([kernel[np.ix_(a[:, k], b[:, k])] for k, kernel in enumerate(self.kernels)])

    def mean(self, levels: Ints) -> Floats:
        """Return, for each configuration, the expected log factor on the time of each category."""
        return np.asarray(sum(mean[levels[:, k]] for k, mean in enumerate(self.means)))


@dataclass(frozen=True)
class Measured:
    """Measured runs of configurations, in order.

    Attributes:
        levels: Levels of each run.
        log_s: Logarithm of the seconds per unit.
        errors: Standard errors of `log_s` within the run.
        calm: Whether the step hardly ever waits for its host.
        groups, places: Number of the group and of the place; trials of one group took turns.
        profiles: Seconds by category, of the runs that `profiled` lists.
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
        """Return the covariance between runs that comes from drift, group and place, not from their configurations."""
        order = np.arange(len(self.log_s))
        walk = drift**2 * np.minimum(order[:, None], order[None, :])
        together = self.groups[:, None] == self.groups[None, :]
        paired = together & (together.sum(1) > 1)
        return np.asarray(
            walk + GROUP**2 * paired + PLACE**2 * (self.places[:, None] == self.places[None, :]) * (self.places > 0)
        )


@dataclass(frozen=True)
class Beliefs:
    """Posterior of some configurations under a model.

    Attributes:
        levels: The configurations.
        mean: Mean of the logarithm of the seconds per unit.
        variance: Variance of the same logarithm.
        categories_s: Expected seconds by category, one row a configuration.
    """

    levels: Ints
    mean: Floats
    variance: Floats
    categories_s: Floats
    _shares: Floats
    _hoped: Floats
    _white: Floats

    @classmethod
    def joined(cls, parts: Sequence[Beliefs]) -> Beliefs:
        """Join the posteriors of several sets of configurations under the same model."""
        rows = {name: np.concatenate([getattr(part, name) for part in parts]) for name in cls.__dataclass_fields__}
        return cls(**rows)


@dataclass
class _Rows:
    """Observations, each a weighted sum of the categories of one run.

    Attributes:
        starts: Number of the run of each row.
        weights: Weights of the categories (second axis).
        values: Logarithms relative to the reference's.
        noise: Covariance of measurement errors, without the noise between runs.
    """

    starts: Ints
    weights: Floats
    values: Floats
    noise: Floats


class StepModel:
    """Posterior of the step time, from profiles and measured steps."""

    def __init__(self, prior: Prior, measured: Measured) -> None:
        self.measured, self.prior = measured, prior
        self._floor_s = FLOOR * float(np.exp(measured.log_s.min()))
        self._reference = np.log(measured.profiles[0] + self._floor_s)
        self._sizes = [np.where(acts, WIDTH, SIDE) for acts in prior.acts]
        self._own = [kernel[1:, 1:] + 1e-6 * np.eye(len(kernel) - 1) for kernel in prior.kernels]
        self._inverses = [np.linalg.inv(own) for own in self._own]
        self._means = prior.mean(measured.levels)
        self._rows = self._observed()
        self._correlations = prior.correlations(measured.levels, measured.levels)
        self._noise = (USUAL_NOISE, 1.0, 0.0)
        about = self._as_profiled()
        self._put_sums_about(about)
        for round_ in range(ROUNDS):
            self._condition(choose_noise=round_ == 0)
            self._learn_sizes()
            about += np.clip(self._categories(measured.levels, self._means) - about, -LONGEST_STEP, LONGEST_STEP)
            self._put_sums_about(about)
        self._about = {tuple(row): point for row, point in zip(measured.levels.tolist(), about, strict=True)}
        self._condition(choose_noise=True)

    # --- what was observed --------------------------------------------------------------------

    def _observed(self) -> _Rows:
        """Return one row for each category of every profiled run, then one row for each run without a profile."""
        measured, count = self.measured, self.prior.num_categories
        times = measured.profiles
        shares = times / times.sum(1, keepdims=True)
        others = np.setdiff1d(np.arange(len(measured.log_s)), measured.profiled)
        starts = np.concatenate([np.repeat(measured.profiled, count), others])
        weights = np.concatenate([np.tile(np.eye(count), (len(times), 1)), np.tile(shares[0], (len(others), 1))])
        values = (np.log(times + self._floor_s) - self._reference).ravel()
        noise = np.zeros((len(starts), len(starts)))
        for n, share in enumerate(shares):
            errors = np.diag((PROFILE_NOISE * times[n] / (times[n] + self._floor_s)) ** 2)
            within = np.eye(count) - share  # what a category has too much, the others have too little
            rows = slice(n * count, (n + 1) * count)
            noise[rows, rows] = within @ errors @ within.T + LEAST_ERROR**2 * np.eye(count)
        return _Rows(starts, weights, np.concatenate([values, np.zeros(len(others))]), noise)

    def _put_sums_about(self, about: Floats) -> None:
        """Linearise the rows of runs without a profile, in which only the sum of the categories was measured.

        Args:
            about: Linearisation points by run and category, as logarithms relative to the reference's.
        """
        rows = slice(self.measured.profiles.size, None)
        starts = self._rows.starts[rows]
        times, weights = self._seconds(about[starts])
        self._rows.weights[rows] = weights
        off = self.measured.log_s[starts] - np.log(times.sum(1))
        self._rows.values[rows] = off + (weights * about[starts]).sum(1)

    def _seconds(self, about: Floats) -> tuple[Floats, Floats]:
        """Return the times of the categories, and the derivative of their log sum with respect to each category's log
        time.
        """
        above = np.exp(about + self._reference)
        times = np.maximum(above - self._floor_s, 1e-3 * self._floor_s)
        return times, above / times.sum(1, keepdims=True)

    def _as_profiled(self) -> Floats:
        """Return the categories' times for every run, as logarithms relative to the reference's, from a profile of the
        run's configuration; without one, all categories of the reference are scaled to the run's step.
        """
        count, times = self.prior.num_categories, self.measured.profiles
        seen = self._rows.values[: times.size].reshape(-1, count)
        scaled = np.exp(self.measured.log_s)[:, None] * times[0] / times[0].sum()
        found = np.log(scaled + self._floor_s) - self._reference
        for values, levels in zip(seen, self.measured.levels[self.measured.profiled], strict=True):
            found[np.all(self.measured.levels == levels, axis=1)] = values
        return np.asarray(found)

    # --- the prior ----------------------------------------------------------------------------

    def _wide(self, levels: Ints) -> Floats:
        """Return the effect sizes of configurations; axes: parameter, configuration, category."""
        return np.stack([size[levels[:, k]] for k, size in enumerate(self._sizes)])

    def _covariance(self, a: Ints, b: Ints, correlations: Floats) -> Floats:
        """Return the prior covariance of the categories between two sets of configurations; axes: a, b, category."""
        both = self._wide(a)[:, :, None] * self._wide(b)[:, None] * correlations[..., None]
        same = np.all(a[:, None] == b[None], axis=2)[..., None]
        return np.asarray(_with_pairs(both) + SCATTER**2 * same)

    def _variance(self, levels: Ints) -> Floats:
        """Return the prior variance of the categories of configurations."""
        own = np.stack([np.diag(kernel)[levels[:, k]] for k, kernel in enumerate(self.prior.kernels)])
        return np.asarray(_with_pairs(self._wide(levels) ** 2 * own[..., None]) + SCATTER**2)

    # --- the posterior ------------------------------------------------------------------------

    def _condition(self, *, choose_noise: bool) -> None:
        """Condition the model on the observations; if `choose_noise`, use the noise with the largest posterior."""
        rows, measured = self._rows, self.measured
        covariance = self._covariance(measured.levels, measured.levels, self._correlations)
        between = covariance[np.ix_(rows.starts, rows.starts)]
        self._hoped = (rows.weights * self._means[rows.starts]).sum(1)
        prior = np.einsum("ac,bc,abc->ab", rows.weights, rows.weights, between)
        prior += HOPE_SD**2 * np.outer(self._hoped, self._hoped) + rows.noise + JITTER * np.eye(len(rows.starts))
        residual = rows.values - HOPE * self._hoped
        best = -math.inf
        for noise in self._noises() if choose_noise else [self._noise]:
            at_starts = self._noise_of_starts(*noise)[np.ix_(rows.starts, rows.starts)]
            factor = np.linalg.cholesky(prior + at_starts)
            white = solve_triangular(factor, residual, lower=True)
            score = -0.5 * float(white @ white) - float(np.log(np.diag(factor)).sum()) + _log_prior(*noise)
            if score > best:
                best, self._noise, self._factor, self._residual = score, noise, factor, white
        self._alpha = solve_triangular(self._factor, self._residual, lower=True, trans="T")

    def _noises(self) -> list[tuple[float, float, float]]:
        calm_parts = CALM_PARTS if self.measured.calm.any() else CALM_PARTS[:1]
        return list(itertools.product(NOISES, calm_parts, DRIFTS))

    def _noise_of_starts(self, noise: float, calm_part: float, drift: float) -> Floats:
        """Return the covariance between runs that comes from each run's own noise and from shared deviations, not from
        their configurations.
        """
        own = np.where(self.measured.calm, calm_part * noise, noise) ** 2 + self.measured.errors**2
        return np.diag(own) + self.measured.common(drift)

    def _learn_sizes(self) -> None:
        """Update the size of every strategy's effect on every category from the data.

        A variational step for effects with a Student prior: the expected square of the effects, in units of their usual
        size, replaces the usual one as far as `FREEDOM` lets it.
        """
        rows, levels = self._rows, self.measured.levels[self._rows.starts]
        for k, (kernel, own, inverse) in enumerate(zip(self.prior.kernels, self._own, self._inverses, strict=True)):
            size, usual = self._sizes[k][1:].T, np.where(self.prior.acts[k][1:], WIDTH, SIDE).T
            at_rows = (self._sizes[k][levels[:, k]] * rows.weights).T
            cross = size[:, :, None] * kernel[1:, levels[:, k]] * at_rows[:, None]  # category, level, row
            white = solve_triangular(self._factor, cross.reshape(-1, len(rows.starts)).T, lower=True)
            white = white.T.reshape(cross.shape)
            mean = cross @ self._alpha
            spread = size[:, :, None] * own * size[:, None] - white @ white.transpose(0, 2, 1)
            spread += mean[:, :, None] * mean[:, None]
            square = (inverse * spread / (usual[:, :, None] * usual[:, None])).sum((1, 2))
            grown = np.sqrt((FREEDOM + square) / (FREEDOM + len(own)))
            self._sizes[k] = np.concatenate([self._sizes[k][:1], (usual * grown[:, None]).T])

    def _categories(self, levels: Ints, means: Floats) -> Floats:
        """Return the posterior mean of the logarithm of every category relative to the reference's."""
        correlations = self.prior.correlations(self.measured.levels, levels)
        return self._project(self._covariance(self.measured.levels, levels, correlations), means)

    def _project(self, covariance: Floats, means: Floats) -> Floats:
        weighted = np.zeros((len(self.measured.levels), self.prior.num_categories))
        np.add.at(weighted, self._rows.starts, self._alpha[:, None] * self._rows.weights)
        hope = HOPE + HOPE_SD**2 * float(self._hoped @ self._alpha)
        return np.asarray(np.einsum("sc,sqc->qc", weighted, covariance) + hope * means)

    def believe(self, levels: Ints) -> Beliefs:
        """Return the posterior of these configurations' step times."""
        rows, means = self._rows, self.prior.mean(levels)
        correlations = self.prior.correlations(self.measured.levels, levels)
        covariance = self._covariance(self.measured.levels, levels, correlations)
        logs = self._project(covariance, means)
        times, shares = self._seconds(logs)
        hoped = (shares * means).sum(1)
        cross = np.zeros((len(rows.starts), len(levels)))
        for c in range(self.prior.num_categories):
            cross += rows.weights[:, c, None] * covariance[rows.starts, :, c] * shares[:, c]
        cross += HOPE_SD**2 * np.outer(self._hoped, hoped)
        white = solve_triangular(self._factor, cross, lower=True)
        own = (shares**2 * self._variance(levels)).sum(1) + HOPE_SD**2 * hoped**2
        variance = np.maximum(own - (white**2).sum(0), 1e-10)
        mean = self._log_sums(levels, logs) + BY_ITSELF * (levels > 0).sum(1) + IN_ORDER * levels.sum(1)
        return Beliefs(levels, mean, variance, times, shares, hoped, white.T)

    def _log_sums(self, levels: Ints, logs: Floats) -> Floats:
        """Return the log step times for categories' times; for configurations that were measured, to first order about
        the point at which their runs were taken in. After a large effect the two differ, and only there are the runs
        what was measured.
        """
        found = [self._about.get(tuple(row)) for row in levels.tolist()]
        about = np.array([own if point is None else point for own, point in zip(logs, found, strict=True)])
        times, shares = self._seconds(about.reshape(logs.shape))
        return np.asarray(np.log(times.sum(1)) + (shares * (logs - about.reshape(logs.shape))).sum(1))

    def covariance(self, a: Beliefs, b: Beliefs) -> Floats:
        """Return the posterior covariance between the step times of two sets of configurations."""
        prior = self._covariance(a.levels, b.levels, self.prior.correlations(a.levels, b.levels))
        total = np.einsum("ac,bc,abc->ab", a._shares, b._shares, prior) + HOPE_SD**2 * np.outer(a._hoped, b._hoped)
        return np.asarray(total - a._white @ b._white.T)

    def start_noise(self, calm: bool) -> float:
        """Return the standard deviation between runs."""
        noise, calm_part, _ = self._noise
        return noise * (calm_part if calm else 1.0)


def _with_pairs(both: Floats) -> Floats:
    """Return the covariance from main effects (given by parameter on the first axis), their pairwise interactions, and
    the reference's level.
    """
    main = both.sum(0)
    return np.asarray(main + 0.5 * PAIRS * (main**2 - (both**2).sum(0)) + LEVEL**2)


def _log_prior(noise: float, calm_part: float, drift: float) -> float:
    return -0.5 * (math.log(noise / USUAL_NOISE) / math.log(NOISE_FACTOR)) ** 2 - DRIFT_PENALTY * (drift > 0)


def draws(mean: Floats, covariance: Floats, count: int, generator: np.random.Generator) -> Floats:
    """Draw samples from a multivariate normal distribution, one sample per row."""
    factor = np.linalg.cholesky(covariance + 1e-8 * np.eye(len(mean)))
    return np.asarray(mean + generator.standard_normal((count, len(mean))) @ factor.T)
