"""Numbers of the Gaussian model from trials and profiles: what was measured, and what is expected of choices."""

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
"""Share of the step below which, in every profile, a category is left out."""
PROMISES_NOTHING = 0.01
"""Expected logarithm of the factor of a change that its bound allows no gain: it rather costs."""
MOST = 0.95
"""Part of a category that a choice may be expected to save."""
UNKNOWN_ERROR = 0.05
"""Standard error of a start with too few windows to tell."""
HOST = "host"
TOGETHER = {Category.HOST: HOST, Category.LAUNCH_LATENCY: HOST, Category.OPTIMIZER_HOST: HOST, Category.DISPATCH: HOST}
"""Categories that move together are one."""
WHOLE = "the step"
"""The only category while nothing was profiled."""


def grouped(times: Mapping[Any, float]) -> dict[str, float]:
    """Times with the categories that move together added up."""
    found: dict[str, float] = {}
    for name, value in times.items():
        key = TOGETHER.get(Category(name), str(name))
        found[key] = found.get(key, 0.0) + value
    return found


class Evidence:
    """All that a search knows, by numbers.

    Args:
        starts: In the order of measuring; those that do not count are left out here.
        realisation: By strategy: part of its bound that earlier studies saw it realise.
        by_category: Whether profiles count, and with them bounds and expectations; else the step is all that is known.
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
        """Shares of the step by category; None of a start without a profile that can be believed."""
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
        """Every start that counts, the reference's first among the profiled ones."""
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
        """Prior from bounds and expectations on the incumbent; on the reference for what the incumbent has changed."""
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
        """Return where a choice acts, the logarithm of its factor there if its expected savings come true (both by
        category), and the most that it can save, as a part of the step.
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
        """Part of its bound that a choice is expected to realise; below 0 where it is expected to cost: then of what it
        acts on. Nothing is expected of another choice where the user has made one already, unless it is known.
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
        """Configurations that ran and took effect, with their largest peak of memory in bytes."""
        peaks: dict[Levels, int] = {}
        for levels, result in self.counted:
            peaks[levels] = max(result.peak_memory_bytes, peaks.get(levels, 0))
        return peaks

    def did_not_run(self, starts: Sequence[TrialResult], *, out_of_memory: bool) -> list[Levels]:
        """Configurations that ran out of memory, or that failed otherwise or had no effect. That others used the
        machine says neither.
        """
        ran = self.ran()
        found = set()
        for result in starts:
            contended = result.failure is None and result.contended
            fails = (not result.ok and not contended) or self._knowledge.had_no_effect(result.candidate)
            levels = self._grid.levels_of(result.candidate)
            if fails and levels is not None and levels not in ran and result.ran_out_of_memory is out_of_memory:
                found.add(levels)
        return sorted(found)
