"""Opponents: what people would use instead, behind the interface of a search. Random search and Optuna's samplers are
in `tuner/search/plain_searches.py`.

Those of DeepSpeed and Horovod are the procedures of these tuners on the parameters that all searches see; their own
parameters are ZeRO stages and micro-batches, and the fusion of collectives. DeepSpeed's needs `pip install
xgboost-cpu`, Horovod's scikit-learn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from steptune.tuner.estimates import log_rate
from steptune.tuner.records import BASELINE, Move, TrialResult
from steptune.tuner.search.grid import Grid, Levels
from steptune.tuner.search.history import History, Proposal
from steptune.tuner.search.model_search import ModelSearch, expected_improvement


class PlainGaussian(ModelSearch):
    """The additive Gaussian process with expected improvement, without any profile, bound or expectation."""

    def suggest(self, history: History) -> list[Proposal]:
        return super().suggest(self.blind(history))

    @staticmethod
    def blind(history: History) -> History:
        """Return the history as that of a search that was never profiled."""
        return replace(history, by_category=False)


class Greedy:
    """One change at a time, the largest bound first; what is faster stays."""

    def __init__(self) -> None:
        self._best, self._fastest = BASELINE, -np.inf

    def update(self, results: Sequence[TrialResult]) -> None:
        for result in results:
            if result.ok and log_rate(result).mean > self._fastest:
                self._best, self._fastest = result.candidate, log_rate(result).mean

    def suggest(self, history: History) -> list[Proposal]:
        base = self._best if history.knowledge.was_run(self._best) else history.grid.reference
        found = []
        for move in history.space.moves:
            candidate = history.space.combine(base, [move])
            if candidate is not None and not history.knowledge.was_run(candidate) and candidate != base:
                found.append((history.knowledge.bound(move, base), candidate))
        found.sort(key=lambda pair: -pair[0])
        return [Proposal(candidate=candidate) for _, candidate in found]


class ExpertList:
    """A list of nine settings, those that usually help most first: kept where faster."""

    def __init__(self) -> None:
        self._best, self._fastest, self._done = BASELINE, -np.inf, 0

    def update(self, results: Sequence[TrialResult]) -> None:
        for result in results:
            self._done += result.candidate != BASELINE
            if result.ok and log_rate(result).mean > self._fastest:
                self._best, self._fastest = result.candidate, log_rate(result).mean

    def suggest(self, history: History) -> list[Proposal]:
        for move in list(self._settings(history))[:9]:
            candidate = history.space.combine(self._best, [move])
            if candidate is not None and candidate != self._best and not history.knowledge.was_run(candidate):
                return [Proposal(candidate=candidate)]
        return []

    def _settings(self, history: History) -> Iterator[Move]:
        """One setting of each parameter, ordered by the part of today's step that it usually saves."""
        best: dict[str, tuple[float, Move]] = {}
        for move in history.space.moves:
            usual = history.space.strategy(move.strategy).usual_realisation
            value = usual * history.knowledge.bound(move, history.grid.reference)
            if value > best.get(move.strategy, (0.0, move))[0]:
                best[move.strategy] = (value, move)
        return (move for _, move in sorted(best.values(), key=lambda pair: -pair[0]))


class DeepSpeed:
    """The tuner by a cost model of DeepSpeed's autotuning: one configuration at random, then those that boosted trees,
    fitted to the order of all measured throughputs, put first. Without its stop after five trials that bring nothing.

    Source: https://github.com/deepspeedai/DeepSpeed/tree/master/deepspeed/autotuning/tuner (`ModelBasedTuner`,
    `XGBoostCostModel`: depth 3, rate 0.3, 10 rounds, pairwise ranking; a failure counts as a throughput of 0).
    """

    MOST = 6000
    TREES: ClassVar[dict[str, Any]] = {
        "max_depth": 3,
        "gamma": 1e-4,
        "eta": 0.3,
        "lambda": 1.0,
        "objective": "rank:pairwise",
        "nthread": 1,
    }

    def __init__(self) -> None:
        self._pool: list[Levels] = []

    def update(self, results: Sequence[TrialResult]) -> None:
        """Keeps nothing."""

    def suggest(self, history: History) -> list[Proposal]:
        grid, generator = history.grid, np.random.default_rng([history.seed, len(history.starts)])
        if not self._pool:
            self._pool = every_configuration(grid, self.MOST, generator)
        told = [(levels, r) for r in history.starts if (levels := grid.levels_of(r.candidate)) is not None]
        if len({levels for levels, _ in told}) < 2:
            order = generator.permutation(len(self._pool))
        else:
            order = np.argsort(-self._scores(grid, told), kind="stable")
        return fresh(history, (self._pool[n] for n in order))

    def _scores(self, grid: Grid, told: list[tuple[Levels, TrialResult]]) -> np.ndarray:
        import xgboost

        rates = np.array([math.exp(log_rate(r).mean) if r.ok else 0.0 for _, r in told])
        known = xgboost.DMatrix(as_numbers(grid, [levels for levels, _ in told]), label=rates / max(rates.max(), 1e-9))
        known.set_group([len(told)])
        trees = xgboost.train(self.TREES, known, num_boost_round=10)
        return np.asarray(trees.predict(xgboost.DMatrix(as_numbers(grid, self._pool))))


class Horovod:
    """The autotuning of Horovod: ordered parameters together by a Gaussian process and expected improvement, after four
    fixed points; then all over again for every combination of the others, the first of which changes fastest.

    Source: https://github.com/horovod/horovod (`parameter_manager.cc`, `bayesian_optimization.cc`: squared exponential
    kernel of one length, noise 0.8, 20 samples; the best single score is the answer).
    """

    BEGINNINGS = (1 / 16, 1 / 2, 1 / 4, 1 / 8)
    NOISE, SAMPLES, MOST = 0.8, 20, 2000

    def __init__(self) -> None:
        self._combination = 0
        self._scores: dict[Levels, float] = {}
        self._grid: Grid | None = None

    def update(self, results: Sequence[TrialResult]) -> None:
        for result in results:
            levels = None if self._grid is None else self._grid.levels_of(result.candidate)
            if levels is not None:
                lowest = min(self._scores.values(), default=0.0)
                self._scores[levels] = math.exp(log_rate(result).mean) if result.ok else lowest

    def suggest(self, history: History) -> list[Proposal]:
        self._grid = history.grid
        parameters = history.grid.parameters
        others = [range(1 if p.ranks is not None else p.num_levels) for p in parameters]
        combinations = math.prod(len(levels) for levels in others)
        while self._combination < combinations:
            fixed = self._fixed([len(levels) for levels in others])
            if len(self._scores) < self.SAMPLES and (found := fresh(history, self._liked(history, fixed))):
                return found
            self._combination, self._scores = self._combination + 1, {}
        return []

    def _fixed(self, sizes: list[int]) -> list[int]:
        """Levels of the unordered parameters in the present combination."""
        number, found = self._combination, []
        for size in sizes:
            number, level = divmod(number, size)
            found.append(level)
        return found

    def _liked(self, history: History, fixed: list[int]) -> list[Levels]:
        """Configurations of one combination: the fixed points, then by expected improvement."""
        parameters = history.grid.parameters
        if len(self._scores) < len(self.BEGINNINGS):
            parts = self.BEGINNINGS[len(self._scores) :]
            points = [[nearest(p, part, level) for p, level in zip(parameters, fixed, strict=True)] for part in parts]
            return [tuple(point) for point in points]
        choices = [
            range(p.num_levels) if p.ranks is not None else (level,) for p, level in zip(parameters, fixed, strict=True)
        ]
        pool = list(itertools.islice(itertools.product(*choices), self.MOST))
        improvement = self._improvement(as_numbers(history.grid, list(self._scores)), as_numbers(history.grid, pool))
        return [pool[n] for n in np.argsort(-improvement, kind="stable")]

    def _improvement(self, known: np.ndarray, pool: np.ndarray) -> np.ndarray:
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import RBF, ConstantKernel

        scores = np.array(list(self._scores.values()))
        scores = (scores - scores.mean()) / max(float(scores.std()), 1e-9)
        kernel: Any = ConstantKernel(1.0) * RBF(1.0)
        process = GaussianProcessRegressor(kernel, alpha=self.NOISE**2).fit(known, scores)
        mean, sd = process.predict(pool, return_std=True)
        return expected_improvement(mean - process.predict(known).max(), np.maximum(sd, 1e-9))


def every_configuration(grid: Grid, most: int, generator: np.random.Generator) -> list[Levels]:
    """All levels of a grid, or as many of them at random."""
    if math.prod(grid.num_levels) <= most:
        return list(itertools.product(*(range(n) for n in grid.num_levels)))
    return list({tuple(int(generator.integers(n)) for n in grid.num_levels) for _ in range(most)})


def as_numbers(grid: Grid, configurations: Sequence[Levels]) -> np.ndarray:
    """One row a configuration: the rank of an ordered parameter, one column for each level of another."""
    levels = np.array(configurations, dtype=np.int64).reshape(len(configurations), len(grid.parameters))
    columns: list[np.ndarray] = []
    for k, parameter in enumerate(grid.parameters):
        if parameter.ranks is not None:
            columns.append(np.asarray(parameter.ranks)[levels[:, k]])
        else:
            columns += [(levels[:, k] == n).astype(float) for n in range(1, parameter.num_levels)]
    return np.stack(columns, axis=1)


def nearest(parameter: Any, part: float, otherwise: int) -> int:
    """Return the level of an ordered parameter at a part of its range."""
    return otherwise if parameter.ranks is None else int(np.argmin(np.abs(parameter.ranks - part)))


def fresh(history: History, wanted: Any) -> list[Proposal]:
    """Proposals of the configurations that were not run, in their order; a dozen are enough."""
    found = []
    for levels in wanted:
        candidate = history.grid.candidate(levels)
        if candidate is not None and not history.knowledge.was_run(candidate):
            found.append(Proposal(candidate=candidate))
        if len(found) == 12:
            break
    return found
