"""Inputs of the Gaussian model from trials and profiles: measurements, and expected effects of choices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steptune.tuner.costs.bounds import Situation
from steptune.tuner.costs.categories import Category
from steptune.tuner.estimates import log_rate
from steptune.tuner.records import Candidate, TrialResult
from steptune.tuner.search.gaussian import Floats, Measured, Prior, level_kernel
from steptune.tuner.search.grid import Grid, Levels
from steptune.tuner.search.knowledge import Knowledge

SMALLEST = 0.004
"""Minimum share of the step, in at least one profile, for which a category is modelled."""
PROMISES_NOTHING = 0.01
"""Expected log factor on a category's time (a small cost) for a change that can save nothing according to its bound."""
MOST = 0.95
"""Maximum share of a category that a choice is expected to save."""
UNKNOWN_ERROR = 0.05
"""Standard error assumed for a run with too few windows."""
HOST = "host"
TOGETHER = {Category.HOST: HOST, Category.LAUNCH_LATENCY: HOST, Category.OPTIMIZER_HOST: HOST, Category.DISPATCH: HOST}
"""Categories that change together, merged into one."""
WHOLE = "the step"
"""Name of the only category while nothing is profiled."""


def grouped(times: Mapping[Any, float]) -> dict[str, float]:
    """Return times with the categories of `TOGETHER` merged."""
    found: dict[str, float] = {}
    for name, value in times.items():
        key = TOGETHER.get(Category(name), str(name))
        found[key] = found.get(key, 0.0) + value
    return found


class Evidence:
    """Measurements and expectations of a search, as arrays for the Gaussian model.

    Args:
        starts: Runs in the order of measuring; runs that do not count are left out.
        realisation: Share of its bound that each strategy realised in earlier studies.
        by_category: Whether profiles, bounds and expected savings are used; else only step times.
    """

    def __init__(
        self,
        grid: Grid,
        knowledge: Knowledge,
        starts: Sequence[TrialResult],
        realisation: Mapping[str, float],
        *,
        by_category: bool = True,
    ) -> None:
        self._grid, self._knowledge, self._realisation = grid, knowledge, realisation
        self.counted = [
            (levels, result)
            for result in starts
            if result.ok
            and not knowledge.had_no_effect(result.candidate)
            and (levels := grid.levels_of(result.candidate)) is not None
        ]
        self._profiles = [self._profile(result) if by_category else None for _, result in self.counted]
        self.categories = self._choose_categories()

    def _profile(self, result: TrialResult) -> dict[str, float] | None:
        """Return the shares of the step by category; None for a run without a reliable profile."""
        if not result.breakdowns or result.breakdowns[0].quality.problems:
            return None
        times = grouped(result.breakdowns[0].per_step_ns)
        total = sum(times.values())
        return {name: value / total for name, value in times.items()} if total > 0 else None

    def _choose_categories(self) -> list[str]:
        known = [profile for profile in self._profiles if profile is not None]
        reference = next(
            (p for (lv, _), p in zip(self.counted, self._profiles, strict=True) if p and not any(lv)), None
        )
        if reference is None:
            return [WHOLE]
        names = dict.fromkeys(name for profile in known for name in profile)
        return [n for n in names if max(profile.get(n, 0.0) for profile in known) >= SMALLEST] or [WHOLE]

    # --- what was measured --------------------------------------------------------------------

    def measured(self) -> Measured:
        """Return all runs that count; among the runs with a profile, one of the reference comes first."""
        rates = [log_rate(result) for _, result in self.counted]
        log_s = np.array([-rate.mean for rate in rates])
        profiled = self._profiled()
        groups = {name: n for n, name in enumerate(dict.fromkeys(result.group for _, result in self.counted))}
        places = {name: n for n, name in enumerate(dict.fromkeys(result.place for _, result in self.counted))}
        return Measured(
            levels=np.array([levels for levels, _ in self.counted], dtype=np.int64),
            log_s=log_s,
            errors=np.array([r.standard_error if r.standard_error < 1 else UNKNOWN_ERROR for r in rates]),
            calm=np.array([self._knowledge.is_calm(result.candidate) for _, result in self.counted]),
            groups=np.array([groups[result.group] for _, result in self.counted]),
            places=np.array([places[result.place] for _, result in self.counted]),
            profiles=np.exp(log_s[profiled])[:, None] * self._shares(profiled),
            profiled=np.array(profiled, dtype=np.int64),
        )

    def _profiled(self) -> list[int]:
        if self.categories == [WHOLE]:
            first = next(n for n, (levels, _) in enumerate(self.counted) if not any(levels))
            return [first, *(n for n in range(len(self.counted)) if n != first)]
        known = [n for n, profile in enumerate(self._profiles) if profile is not None]
        first = next(n for n in known if not any(self.counted[n][0]))
        return [first, *(n for n in known if n != first)]

    def _shares(self, profiled: Sequence[int]) -> Floats:
        if self.categories == [WHOLE]:
            return np.ones((len(profiled), 1))
        rows = [[(self._profiles[n] or {}).get(name, 0.0) for name in self.categories] for n in profiled]
        shares = np.array(rows)
        return np.asarray(shares / shares.sum(1, keepdims=True))

    # --- what is expected ---------------------------------------------------------------------

    def prior(self, incumbent: Candidate) -> Prior:
        """Return the prior, from bounds and expected savings: relative to the reference for strategies that the
        incumbent changes, and relative to the incumbent for all others.
        """
        kernels, acts, means, most = [], [], [], []
        for k, parameter in enumerate(self._grid.parameters):
            shape = (parameter.num_levels, len(self.categories))
            act, mean, bound = np.zeros(shape, dtype=bool), np.zeros(shape), np.zeros(shape[0])
            changed = parameter.name in incumbent.choices
            situation = self._knowledge.situation(self._grid.reference if changed else incumbent)
            for level in range(1, parameter.num_levels):
                act[level], mean[level], bound[level] = self._expected(k, level, situation)
            kernels.append(level_kernel(parameter.num_levels, parameter.ranks))
            acts.append(act)
            means.append(mean)
            most.append(-np.log1p(-bound))
        return Prior(kernels=kernels, acts=acts, means=means, most=most)

    def _expected(self, index: int, level: int, situation: Situation | None) -> tuple[NDArray[np.bool_], Floats, float]:
        """Return three facts about a choice: the categories that it acts on, the log factor on each if its expected
        savings are realised, and its maximum saving as a share of the step.
        """
        parameter, space = self._grid.parameters[index], self._grid.space
        acts, mean = np.zeros(len(self.categories), dtype=bool), np.zeros(len(self.categories))
        if situation is None or self.categories == [WHOLE]:
            return ~acts, mean, 1 - 1e-9
        choice = space.strategy(parameter.name).complete(parameter.options[level], space.workload)
        savings = grouped(parameter.strategy.savings(situation, choice))
        shares = self._shares_of(situation)
        declared = {TOGETHER.get(category, str(category)) for category in parameter.strategy.attacks} | savings.keys()
        hoped = self._hoped(index, level, situation, sum(savings.values()))
        for c, name in enumerate(self.categories):
            if name not in declared:
                continue
            part = min(1.0, savings.get(name, 0.0) / max(shares.get(name, 0.0), 1e-6))
            acts[c] = True
            saved = min(MOST, hoped * part) if hoped >= 0 else hoped
            mean[c] = math.log1p(-saved) if abs(saved) > 1e-9 else PROMISES_NOTHING
        return acts, mean, min(MOST, sum(savings.values()))

    def _hoped(self, index: int, level: int, situation: Situation, bound: float) -> float:
        """Return the share of `bound` that a choice is expected to realise; an expected cost is negative, as a share of
        the categories that the choice acts on. Return 0 if the user has set the strategy already, unless the saving is
        known.
        """
        parameter, space = self._grid.parameters[index], self._grid.space
        if bound <= 0:
            return 0.0
        strategy = parameter.strategy
        usual = strategy.likely_part(space.workload)
        learned = self._realisation.get(parameter.name, usual)
        known = strategy.expected(situation, strategy.complete(parameter.options[level], space.workload))
        if known is not None:
            return max(-1.0, min(1.0, known * (learned / usual if usual > 0 else 1.0) / bound))
        return 0.0 if space.workload.current.get(parameter.name) else learned

    @staticmethod
    def _shares_of(situation: Situation) -> dict[str, float]:
        times = grouped(situation.breakdown.per_step_ns)
        return {name: value / situation.step_ns for name, value in times.items()}

    # --- what ran -----------------------------------------------------------------------------

    def ran(self) -> dict[Levels, int]:
        """Return the configurations that ran and took effect, with their largest memory peak in bytes."""
        peaks: dict[Levels, int] = {}
        for levels, result in self.counted:
            peaks[levels] = max(result.peak_memory_bytes, peaks.get(levels, 0))
        return peaks

    def did_not_run(self, starts: Sequence[TrialResult], *, out_of_memory: bool) -> dict[Levels, int | None]:
        """Return the configurations that ran out of memory (`out_of_memory`), or those that failed otherwise or had no
        effect, each with the number of the parameter that the failure names; None if it names none. Runs that are void
        because of other load count as neither.
        """
        ran = self.ran()
        found: dict[Levels, int | None] = {}
        for result in starts:
            void = result.failure is None and result.contended and not result.is_rejected
            fails = (not result.ok and not void) or self._knowledge.had_no_effect(result.candidate)
            levels = self._grid.levels_of(result.candidate)
            if fails and levels is not None and levels not in ran and result.ran_out_of_memory is out_of_memory:
                known = found.get(levels)
                found[levels] = self._named(result, levels) if known is None else known
        return dict(sorted(found.items()))

    def _named(self, result: TrialResult, levels: Levels) -> int | None:
        """Return the number of the changed parameter whose strategy raises the failure's exception."""
        changed = (n for n, level in enumerate(levels) if level)
        return next((n for n in changed if self._grid.parameters[n].strategy.raised(result.failure)), None)
