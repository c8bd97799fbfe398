"""Probability that a configuration runs, from configurations that ran and configurations that failed.

A failed run is blamed on those of its choices, and pairs of choices, that no successful run had. The blame of one
depends on how many others are suspected; the blame of several failures adds up. A choice that failed beside today's
others may run beside different ones, so a pair of a choice and an unchanged strategy is suspected too, with less
weight. Where the failure names its choice, as an exception of the compiler does, only that choice and its pairs are
suspected. Memory is modelled separately (`Room`): the needs of choices add up, and a configuration that ran out of
memory needs more than any that fitted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
PAIR, PAIR_WITH_TODAY = 0.2, 0.05
"""Weights of blame, relative to the weight of a single choice: for a pair of choices, and for a choice paired with an
unchanged strategy.
"""
FAILED_BEFORE, RAN_BEFORE = 0.5, 12.0
"""Prior counts for the failure rate of a choice: failures, and tries in all."""

ADDED, SAVED, PEAK_NOISE, HALFWAY = 0.2, 0.1, 0.01, 0.02
"""Standard deviation of a choice's effect on the peak, expected saving of a choice that saves memory, noise of a peak
between runs, and headroom assumed above the largest peak that fitted; all are shares of the smallest configuration's
peak memory.
"""


class Blame:
    """Probability that configurations run, from the choices that are blamed for failed runs.

    Args:
        ran, failed: Levels of configurations, one a row; level 0 is the reference's.
        named: For each failed configuration, the number of the parameter that the failure names; None if it names none.
    """

    def __init__(
        self, num_levels: list[int], ran: Ints, failed: Ints, named: Sequence[int | None] | None = None
    ) -> None:
        self._offsets = np.concatenate([[0], np.cumsum(num_levels)[:-1]]).astype(np.int64)
        self._size = int(sum(num_levels))
        self._touched = np.ones(self._size)
        self._touched[self._offsets] = 0.0
        success = self._one_hot(ran)
        self._pair_ran = (success.T @ success) > 0
        self._ran = np.diag(self._pair_ran)
        levels_run = float((self._ran * self._touched).sum())
        self.rate = (FAILED_BEFORE + len(failed)) / (RAN_BEFORE + levels_run + len(failed))
        weights, pair_weights = self._weights()
        single = np.where(self._ran, 0.0, self.rate * self._touched)
        both = self._touched[:, None] * self._touched[None, :]
        pair = np.where(self._pair_ran, 0.0, PAIR * self.rate * both)
        np.fill_diagonal(pair, 0.0)
        for row, parameter in zip(self._one_hot(failed), named or [None] * len(failed), strict=True):
            alone = row if parameter is None else row * self._of(parameter)
            for suspects in (alone, row):  # the named choice and all its pairs may have run elsewhere
                inside = np.maximum(suspects[:, None] * row[None, :], row[:, None] * suspects[None, :])
                total = (weights * suspects).sum() + 0.5 * (pair_weights * inside).sum()
                if total > 0:
                    single = 1 - (1 - single) * (1 - weights * suspects / total)
                    pair = 1 - (1 - pair) * (1 - pair_weights * inside / total)
                    break
        self._single = np.log1p(-np.minimum(single, 0.999))
        self._pair = np.log1p(-np.minimum(pair, 0.999))

    def _weights(self) -> tuple[Floats, Floats]:
        single = np.where(self._ran, 0.0, self._touched)
        both = self._touched[:, None] * self._touched[None, :]
        one = np.maximum(self._touched[:, None], self._touched[None, :]) - both
        pair = np.where(self._pair_ran, 0.0, PAIR * both + PAIR_WITH_TODAY * one)
        np.fill_diagonal(pair, 0.0)
        return single, pair

    def _of(self, parameter: int) -> Floats:
        """Return 1 for the levels of a parameter, and 0 for all others."""
        numbers = np.searchsorted(self._offsets, np.arange(self._size), side="right") - 1
        return np.asarray(numbers == parameter, dtype=np.float64)

    def _one_hot(self, levels: Ints) -> Floats:
        found = np.zeros((len(levels), self._size))
        for row, number in enumerate(levels):
            found[row, self._offsets + number] = 1.0
        return found

    def runs(self, levels: Ints) -> Floats:
        """Return, for each configuration, the probability that it runs."""
        chosen = self._one_hot(levels)
        pairs = 0.5 * ((chosen @ self._pair) * chosen).sum(1)
        return np.asarray(np.exp(chosen @ self._single + pairs))


class Room:
    """Probability that configurations fit into memory, from the peaks of configurations that fitted, and from
    configurations that did not fit.

    What choices add is a sum of independent normal amounts. A configuration that ran out of memory is only known to
    need more than the largest that fitted: moments are matched to that, one such configuration after another (Minka, "A
    family of algorithms for approximate Bayesian inference", 2001, assumed-density filtering). That puts probabilities
    off by about 0.1, depending on the order.

    Args:
        ran: Levels of configurations that fitted, one a row; level 0 is the reference's.
        peaks: Peak memory of the configurations that fitted, in any unit; 0 where it is unknown.
        ran_out: Levels of configurations that did not fit, one a row.
        directions: For each level of every parameter: -1 for a level that saves memory, 1 for one that gives up such a
            saving of the reference, else 0.
    """

    def __init__(
        self,
        num_levels: list[int],
        ran: Ints,
        peaks: Floats,
        ran_out: Ints,
        directions: Sequence[Sequence[int]] = (),
    ) -> None:
        self._offsets = np.concatenate([[0], np.cumsum(num_levels)[:-1]]).astype(np.int64)
        self._size = int(sum(num_levels))
        self.limits = bool(len(ran_out)) and bool((peaks > 0).any())
        if not self.limits:
            return
        known = peaks > 0
        base = float(peaks[known].min())
        self._cap = float(peaks.max()) / base
        self._need = np.zeros(self._size + 1)
        self._need[:-1] = SAVED * np.concatenate([*directions, [0] * (self._size - sum(map(len, directions)))])
        self._need[-1] = 1.0
        self._spread = np.diag([*[ADDED**2] * self._size, 1.0])
        self._fitted(self._features(ran[known]), peaks[known] / base)
        for features in self._features(ran_out):
            self._exceeded(features)

    def _features(self, levels: Ints) -> Floats:
        """Return the features of configurations: one for each choice other than the reference's, and a constant (last
        column).
        """
        found = np.zeros((len(levels), self._size + 1))
        found[:, -1] = 1.0
        for row, number in enumerate(levels):
            found[row, (self._offsets + number)[number > 0]] = 1.0
        return found

    def _fitted(self, features: Floats, peaks: Floats) -> None:
        """Update the posterior with the peaks of configurations that ran."""
        between = features @ self._spread
        gain = between.T @ np.linalg.inv(between @ features.T + PEAK_NOISE**2 * np.eye(len(peaks)))
        self._need = self._need + gain @ (peaks - features @ self._need)
        self._spread = self._spread - gain @ between

    def _exceeded(self, features: Floats) -> None:
        """Update the posterior with a configuration that needs more memory than the largest peak that fitted."""
        direction = self._spread @ features
        sd = math.sqrt(float(features @ direction) + PEAK_NOISE**2)
        z = (float(features @ self._need) - self._cap) / sd
        hazard = math.exp(-0.5 * z**2 - float(log_ndtr(z))) / math.sqrt(2 * math.pi)
        self._need = self._need + direction * (hazard / sd)
        self._spread = self._spread - np.outer(direction, direction) * (hazard * (hazard + z) / sd**2)

    def fits(self, levels: Ints) -> Floats:
        """Return, for each configuration, the probability that it fits into memory; 1 while none ran out of memory."""
        if not self.limits:
            return np.ones(len(levels))
        features = self._features(levels)
        variance = ((features @ self._spread) * features).sum(1)
        sd = np.sqrt(np.maximum(variance, PEAK_NOISE**2))
        return np.asarray(ndtr((self._cap + HALFWAY - features @ self._need) / sd))
