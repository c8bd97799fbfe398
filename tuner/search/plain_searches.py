"""Searches without a performance model of the training: random search, and Optuna's samplers.

They see configurations and rates only: no profiles, bounds or expected savings. Ordered parameters are whole numbers in
the order of their values, others are categories. A sampler is built anew from everything measured each time (tens of
milliseconds), so that the stored trials are the only truth.

Sources: Bergstra et al., "Algorithms for Hyper-Parameter Optimization" (2011);
https://optuna.readthedocs.io/en/stable/reference/samplers/generated/optuna.samplers.TPESampler.html,
https://optuna.readthedocs.io/en/stable/reference/samplers/generated/optuna.samplers.GPSampler.html
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from steptune.tuner.estimates import log_rate
from steptune.tuner.records import TrialResult
from steptune.tuner.search.grid import Grid, Levels, Parameter
from steptune.tuner.search.history import History, Proposal

TRIES, NUM_PROPOSALS = 200, 20
ASKS = {"tpe": 12, "gp": 3}
"""Maximum number of configurations that each sampler is asked for per round of proposals; not all of them can be run.
"""
STARTUP_TRIALS = 5
WORSE = 0.1
"""Penalty for a failed configuration: the log time reported to a sampler exceeds the slowest configuration's by this
amount.
"""


class RandomSearch:
    """Search that draws configurations uniformly."""

    def update(self, results: Sequence[TrialResult]) -> None:
        """Do nothing: draws do not depend on results."""

    def suggest(self, history: History) -> list[Proposal]:
        generator = np.random.default_rng([history.seed, len(history.starts)])
        grid = history.grid
        drawn = [grid.candidate(tuple(int(generator.integers(n)) for n in grid.num_levels)) for _ in range(TRIES)]
        fresh = [c for c in drawn if c is not None and not history.knowledge.was_run(c)]
        return [Proposal(candidate=candidate, reason="drawn at random") for candidate in fresh[:NUM_PROPOSALS]]


class OptunaSearch:
    """Search by one of Optuna's samplers.

    Args:
        name: "tpe", multivariate, or "gp", which loads torch.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def update(self, results: Sequence[TrialResult]) -> None:
        """Do nothing: the history already has all results."""

    def suggest(self, history: History) -> list[Proposal]:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        reason = f"suggested by Optuna's {self._name.upper()} sampler from all trials so far"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study = optuna.create_study(direction="minimize", sampler=self._sampler(history))
            self._tell(study, history)
            found = []
            for _ in range(ASKS[self._name]):
                asked = study.ask(_distributions(history.grid)).params
                candidate = history.grid.candidate(_levels(history.grid, asked))
                if candidate is not None and not history.knowledge.was_run(candidate):
                    found.append(Proposal(candidate=candidate, reason=reason))
                    if self._name == "gp":
                        break
        return [*found, *RandomSearch().suggest(history)]

    def _sampler(self, history: History) -> Any:
        from optuna import samplers

        seed = 1000 * history.seed + len(history.starts)
        if self._name == "tpe":
            return samplers.TPESampler(seed=seed, multivariate=True, group=True, n_startup_trials=STARTUP_TRIALS)
        return samplers.GPSampler(seed=seed, n_startup_trials=STARTUP_TRIALS, deterministic_objective=False)

    @staticmethod
    def _tell(study: Any, history: History) -> None:
        import optuna

        distributions = _distributions(history.grid)
        slowest = max((-log_rate(result).mean for result in history.starts if result.ok), default=0.0)
        for result in history.starts:
            levels = history.grid.levels_of(result.candidate)
            if levels is not None:
                value = -log_rate(result).mean if result.ok else slowest + WORSE
                params = _params(history.grid, levels)
                study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=value))


def _distributions(grid: Grid) -> dict[str, Any]:
    from optuna.distributions import CategoricalDistribution, IntDistribution

    return {
        p.name: CategoricalDistribution(list(range(p.num_levels))) if p.ranks is None else IntDistribution(0, _top(p))
        for p in grid.parameters
    }


def _top(parameter: Parameter) -> int:
    """Return the largest rank of an ordered parameter's values. Ranks count from 0, and no two values share one."""
    return parameter.num_levels - 1


def _params(grid: Grid, levels: Levels) -> dict[str, int]:
    pairs = zip(grid.parameters, levels, strict=True)
    return {p.name: level if p.ranks is None else round(p.ranks[level] * _top(p)) for p, level in pairs}


def _levels(grid: Grid, params: dict[str, int]) -> Levels:
    found = []
    for p in grid.parameters:
        value = params[p.name]
        found.append(value if p.ranks is None else int(np.argmin(np.abs(p.ranks * _top(p) - value))))
    return tuple(found)
